"""Requests to a server and its replies, which are checked for completeness, model and tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mechattn.errors import ServerError

# vLLM and SGLang take missing options from the checkpoint's generation_config.json, so every option is sent.
_PLAIN = {"top_p": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "logprobs": 1}
_PLAIN_BESIDE_OPENAI = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "return_token_ids": True}


class Garbled(Exception):
    """An incomplete reply; it is requested again."""


@dataclass(frozen=True)
class Asked:
    """A requested completion.

    Args:
        prompt: Token ids, or a text that gives them.
        read: The number of tokens that the model has to read.
        new_tokens: The largest number of tokens per answer.
        temperature: 0 for the likeliest token.
        seed: The seed of the sampling.
        end: Tokens that end an answer.
        prompt_logprobs: Whether to request the log-probabilities of the prompt's own tokens.
    """

    prompt: tuple[int, ...] | str
    read: int
    new_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    end: frozenset[int] = frozenset()
    prompt_logprobs: bool = False

    def body(self) -> dict[str, Any]:
        """What is sent, in addition to the model's name."""
        made = {"max_tokens": self.new_tokens, "temperature": self.temperature, **_PLAIN}
        if self.temperature and self.seed is not None:
            made["seed"] = self.seed
        if isinstance(self.prompt, str):
            return {"prompt": self.prompt, **made}
        beside = {**_PLAIN_BESIDE_OPENAI, "stop_token_ids": sorted(self.end)}
        beside |= {"prompt_logprobs": 0} if self.prompt_logprobs else {}  # not of alternatives
        return {"prompt": list(self.prompt), **made, "extra_body": beside}


@dataclass(frozen=True)
class Reply:
    """A server's completion.

    Args:
        text: The text, without special tokens.
        tokens: Its token ids, if the server gives them.
        logprobs: The log-probability of each token, if the server gives them.
        stopped: Whether the model ended the text itself.
        written: The number of generated tokens, including the end token, if the server gives it.
        prompt_logprobs: The log-probability of each prompt token except the first, if requested and given.
    """

    text: str
    tokens: tuple[int, ...] | None
    logprobs: tuple[float, ...] | None
    stopped: bool
    written: int | None
    prompt_logprobs: tuple[float, ...] | None = None


def reply_of(data: Any, asked: Asked, model: str, address: str) -> Reply:
    """Read a reply.

    Raises:
        Garbled: The reply is incomplete.
        ServerError: It comes from another model, or the model has not read what was sent.
    """
    if not isinstance(data, dict) or not isinstance(data.get("choices"), list):
        raise Garbled("it has no choices")
    if len(data["choices"]) != 1 or not isinstance(data["choices"][0], dict):
        raise Garbled(f"it has {len(data['choices'])} choices, but one was requested")
    choice = data["choices"][0]
    if not isinstance(choice.get("text"), str) or choice.get("finish_reason") not in ("stop", "length"):
        raise Garbled(f"it was not finished: finish_reason is {str(choice.get('finish_reason'))[:40]!r}")
    _check_model(data.get("model"), model, address)
    usage = data["usage"] if isinstance(data.get("usage"), dict) else {}
    _check_read(usage.get("prompt_tokens"), choice.get("prompt_token_ids"), asked, address)
    logprobs = choice["logprobs"] if isinstance(choice.get("logprobs"), dict) else {}
    tokens, written = _whole_numbers(choice.get("token_ids")), usage.get("completion_tokens")
    return Reply(
        choice["text"],
        tokens,
        _numbers(logprobs.get("token_logprobs")),
        choice["finish_reason"] == "stop",
        written if isinstance(written, int) else None if tokens is None else len(tokens),
        _of_prompt(choice.get("prompt_logprobs"), asked),
    )


def _check_model(said: Any, model: str, address: str) -> None:
    """Refuse a reply from another model; transformers adds the revision to the name."""
    if isinstance(said, str) and said != model and not said.startswith(f"{model}@"):
        raise ServerError(
            f"the server at {address} answers as {said[:200]!r}, but served_model is {model!r}. If that is the model, "
            f"give its name: served_model={said[:200]!r}"
        )


def _check_read(count: Any, ids: Any, asked: Asked, address: str) -> None:
    if isinstance(count, int) and count != asked.read:
        raise ServerError(
            f"the server at {address} has read {count} tokens of a prompt that has {asked.read}: it adds a BOS token "
            "or a template, cuts prompts short, or has another tokenizer, so its answers are not to this prompt"
        )
    read = _whole_numbers(ids)
    if read is not None and not isinstance(asked.prompt, str) and read != asked.prompt:
        raise ServerError(f"the server at {address} has read other tokens than those of the prompt")


def _of_prompt(given: Any, asked: Asked) -> tuple[float, ...] | None:
    """Parse vLLM's format: for each token except the first, {"its id": {"logprob": …}}."""
    if not isinstance(given, list) or isinstance(asked.prompt, str) or len(given) != asked.read:
        return None
    try:
        return _numbers([one[str(token)]["logprob"] for one, token in zip(given[1:], asked.prompt[1:], strict=True)])
    except (KeyError, TypeError):
        return None


def _whole_numbers(given: Any) -> tuple[int, ...] | None:
    return tuple(given) if isinstance(given, list) and all(isinstance(one, int) for one in given) else None


def _numbers(given: Any) -> tuple[float, ...] | None:
    if not isinstance(given, list) or not all(isinstance(one, (int, float)) and math.isfinite(one) for one in given):
        return None
    return tuple(map(float, given)) or None
