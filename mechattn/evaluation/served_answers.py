"""Answers from a server, which is probed first: as token ids, or as a text that gives exactly the same tokens."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from mechattn.errors import OptionError, PromptError, PromptTooLong, ServerError
from mechattn.evaluation.completions import Asked, Connection, Reply, connected
from mechattn.evaluation.generate import Answer, Request, Sampling, until_end
from mechattn.evaluation.server import Server
from mechattn.evaluation.server_probe import Probe, probed, some_of, stretches, takes_ids
from mechattn.model.checkpoint import UnloadedModel
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.sequences import Sequence

Todo = tuple[Prompt, str, Request]  # a prompt, the name of a condition, and the sequence
Key = tuple[str, str, int]  # a prompt's id, the name of a condition, and the number of the sample


class Exchanged(ServerError):
    """A server no longer serves the model; these are the answers since it last did."""

    since: Seq[Key] = ()


@dataclass(frozen=True)
class Served:
    """A model on a server, probed; the texts of prompts and conditions for a server that takes text only."""

    connection: Connection
    model: UnloadedModel
    texts: Mapping[tuple[str, str], str] | None
    probe: Probe
    sampling: Sampling

    def answered(self, todo: Seq[Todo]) -> Iterator[list[tuple[Todo, Answer, str]]]:
        """Each answer with its text, in the order of arrival; within and after them the server is probed again."""
        with _bar(len(todo)) as advance:
            for some in stretches(todo, self.sampling.seed):
                for one, answer, text in self._answered(some):
                    advance(len(answer.tokens))
                    yield [(one, answer, text)]
                if why := self.probe.again(len(some)):
                    error = Exchanged(
                        f"the server at {self.connection.server.address} no longer serves the model, {why}. Its "
                        f"{len(some)} answers since it last did are dropped; serve the model, and call evaluate again "
                        "with the same arguments"
                    )
                    error.since = [_key(one) for one in some]
                    raise error

    def _answered(self, todo: Seq[Todo]) -> Iterator[tuple[Todo, Answer, str]]:
        """The answers between two probes."""
        new_tokens = self.sampling.new_tokens
        asked = ((one, self._asked(one, new_tokens)) for one in todo)
        doubtful: dict[Key, tuple[Answer, str]] = {}
        for one, reply in self.connection.replies(asked):
            answer, text = as_answer(reply, self.model)
            # the last allowed token may have ended the answer, although the server says "length"
            if not reply.tells_ids and not reply.stopped and len(answer.tokens) < new_tokens:
                doubtful[_key(one)] = answer, text
            else:
                yield one, answer, text
        more = ((one, self._asked(one, new_tokens + 1)) for one in todo if _key(one) in doubtful)
        for one, reply in self.connection.replies(more):
            answer, text = doubtful[_key(one)]
            yield one, replace(answer, finished=reply.stopped and reply.text == text), text

    def _asked(self, one: Todo, new_tokens: int) -> Asked:
        prompt, name, wanted = one
        ids = tuple(wanted.sequence.tokens.tolist())
        room = min(self.model.cfg.n_ctx, self.connection.longest or self.model.cfg.n_ctx) - len(ids)
        return Asked(
            ids if self.texts is None else self.texts[prompt.id, name],
            len(ids),
            min(new_tokens, room),
            self.model,
            self.sampling.temperature,
            seed_of(self.sampling.seed, prompt.id, wanted.sample),
        )


@contextmanager
def served(
    server: Server,
    model: UnloadedModel,
    prompts: Seq[Prompt],
    sequences: Seq[Mapping[str, Sequence]],
    sampling: Sampling,
    at_once: int,
    before: Mapping[str, Any] | None,
) -> Iterator[Served]:
    """A connection to a server that serves the model, as it did ``before`` if a run is resumed."""
    with connected(server, at_once) as connection:
        if connection.longest is not None:
            check_room(prompts, sequences, sampling.new_tokens, connection.longest, f"the server at {server.address}")
        ids = takes_ids(connection, sequences[0], model)
        texts = None if ids else texts_of(model.tokenizer, prompts, sequences, server.address)
        some = some_of(prompts, sequences, sampling.seed)
        probe = probed(connection, model, some, texts, sampling.temperature, before)
        yield Served(connection, model, texts, probe, sampling)


def check_servable(sequences: Seq[Mapping[str, Sequence]]) -> None:
    """Refuse conditions that act inside the model, which a server does not allow."""
    for made in sequences:
        for name, sequence in made.items():
            if sequence.interventions:
                acts = type(sequence.interventions[0]).__name__
                why = f"intervenes ({acts}), which needs hooks inside the model"
            elif sequence.edge_mask is not None:
                why = "hides tokens from others (.masked() or Knockout), and a server takes no mask"
            elif sequence.keeps_positions:
                why = "keeps positions (.unshifted()), and a server counts them itself"
            else:
                continue
            raise OptionError(
                f"{name!r} {why}: a server takes tokens and nothing else. Omit the condition, or evaluate it here, "
                f"without server=…"
            )


def check_room(
    prompts: Seq[Prompt], sequences: Seq[Mapping[str, Sequence]], new_tokens: int, longest: int, who: str
) -> None:
    """Refuse prompts that are too long with their answers."""
    for prompt, made in zip(prompts, sequences, strict=True):
        for name, sequence in made.items():
            if len(sequence) + new_tokens > longest:
                raise PromptTooLong(
                    f'prompt {prompt.id} ("{prompt.excerpt}") has {len(sequence):,} tokens with the condition "{name}" '
                    f"and {new_tokens} new ones are allowed; {who} takes {longest:,}"
                )


def seed_of(seed: int, prompt: str, sample: int) -> int:
    """The seed of one answer, the same under each condition, as without a server; 31 bits, which every server takes."""
    made = hashlib.sha256(f"{seed} {sample} {prompt}".encode("utf-8", "backslashreplace"))
    return int.from_bytes(made.digest()[:4], "big") >> 1


def as_answer(reply: Reply, model: UnloadedModel) -> tuple[Answer, str]:
    """An answer and its text."""
    logprobs = torch.tensor(reply.logprobs or [torch.nan], dtype=torch.float64)
    if not reply.tells_ids:
        return Answer(reply.tokens, reply.stopped, float(logprobs.mean())), reply.text
    answer = until_end(list(reply.tokens), logprobs, model.end)
    text = model.tokenizer.decode(list(answer.tokens), skip_special_tokens=True)
    return replace(answer, finished=answer.finished or reply.stopped), text


def _key(one: Todo) -> Key:
    return one[0].id, one[1], one[2].sample


@contextmanager
def _bar(total: int) -> Iterator[Any]:
    """A progress bar of answers that shows tokens per second."""
    from tqdm.auto import tqdm

    began, written = time.monotonic(), 0

    def advance(tokens: int) -> None:
        nonlocal written
        written += tokens
        bar.set_postfix_str(f"{written / max(time.monotonic() - began, 1e-3):,.0f} tokens/s", refresh=False)
        bar.update()

    with tqdm(desc="answers", total=total, unit="answer", delay=2) as bar:
        yield advance


def text_of(tokenizer: Any, ids: Seq[int]) -> str | None:
    """The text from which a tokenizer makes exactly these ids, including its BOS token; None if there is none."""
    ids = list(ids)
    bos = getattr(tokenizer, "bos_token_id", None)
    without = [ids[1:]] if ids and ids[0] == bos else []
    for some in (*without, ids):
        text = _decoded(tokenizer, some)
        if list(tokenizer(text)["input_ids"]) == ids:
            return text
    return None


def texts_of(
    tokenizer: Any, prompts: Seq[Prompt], sequences: Seq[Mapping[str, Sequence]], address: str
) -> dict[tuple[str, str], str]:
    """The text of each prompt under each condition; refused if one would be read as different tokens."""
    made: dict[tuple[str, str], str] = {}
    refused: list[tuple[Prompt, str, list[int]]] = []
    for prompt, by_name in zip(prompts, sequences, strict=True):
        for name, sequence in by_name.items():
            ids = sequence.tokens.tolist()
            text = text_of(tokenizer, ids)
            if text is None:
                refused.append((prompt, name, ids))
            else:
                made[prompt.id, name] = text
    if refused:
        prompt, name, ids = refused[0]
        others = sorted({name for _, name, _ in refused})
        raise PromptError(
            f'the server at {address} takes only text, and prompt {prompt.id} ("{prompt.excerpt}") with the condition '
            f'"{name}" would be read as other tokens: {_first_difference(tokenizer, ids)}. So would {len(refused)} of '
            f"{len(refused) + len(made)} in all, under {', '.join(map(repr, others))}. Omit them, or serve the model "
            f"with an engine that takes token ids, such as vLLM or SGLang"
        )
    return made


def _first_difference(tokenizer: Any, ids: list[int]) -> str:
    """The first place where the text's tokens differ from the intended ones."""
    bos = getattr(tokenizer, "bos_token_id", None)
    got = list(tokenizer(_decoded(tokenizer, ids[1:] if ids[:1] == [bos] else ids))["input_ids"])
    at = next((i for i, (a, b) in enumerate(zip(ids, got, strict=False)) if a != b), min(len(ids), len(got)))
    meant, read = (_shown(tokenizer, some, at) for some in (ids, got))
    return f"at position {at} {meant} becomes {read}"


def _shown(tokenizer: Any, ids: list[int], at: int) -> str:
    return f"{_decoded(tokenizer, ids[at : at + 1])!r} ({ids[at]})" if at < len(ids) else "the end"


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
