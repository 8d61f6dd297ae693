"""Compares a server with the model: a few greedy answers and their log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import takewhile
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.errors import ModelError, ServerError
from mechattn.evaluation.generate import Request, answers, native_of
from mechattn.evaluation.served.connection import Connection, Refused
from mechattn.evaluation.served.reply import Asked, Reply
from mechattn.evaluation.served.server import Server
from mechattn.model.fingerprint import weights_hash
from mechattn.model.unloaded import UnloadedModel
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.sequences import Sequence
from mechattn.results.provenance import name_of

PROMPTS, TOKENS = 8, 32
ALIKE = 0.8  # the least share of an answer's text up to the first difference
LOGPROB = 0.05  # the largest mean difference in nats; on the toys bfloat16 gives 0.005, 8 bits 0.016, 4 bits 0.35
_HOT = 2.0  # a temperature at which no two answers are equal


def takes_ids(connection: Connection, made: Mapping[str, Sequence], end: frozenset[int]) -> bool:
    """Whether a server takes token ids; one that doesn't rejects the request."""
    ids = tuple(next(iter(made.values())).tokens.tolist())
    try:
        connection.reply(Asked(ids, len(ids), 1, end=end))
    except Refused as error:
        if error.status not in (400, 422):
            raise
        return False
    return True


def probed(
    connection: Connection,
    model: UnloadedModel,
    prompts: Seq[Prompt],
    sequences: Seq[Mapping[str, Sequence]],
    texts: Mapping[tuple[str, str], str] | None,
    temperature: float,
) -> dict[str, Any]:
    """Probe the server with a few answers; return figures, and the answers, with which a resumed run is compared.

    Returns:
        "model", its name there; "sent" (token ids or text); "against" what; "alike", the mean share of an answer's
        text up to the first difference; "logprob_difference", the mean |difference| in nats of the log-probabilities
        of the prompts' tokens, or of those of the answers where the server tells no others, which are so sure that
        they tell little (None where there are none to compare), and "logprobs_of" which; "texts"; where answers are
        sampled "same_seed", the share of answers that a second run with the same seeds repeats.

    Raises:
        ServerError: The server should sample but does not.
    """
    some = _some(prompts, sequences)
    asked = [
        Asked(
            tuple(sequence.tokens.tolist()) if texts is None else texts[prompt, name],
            len(sequence),
            min(TOKENS, min(model.cfg.n_ctx, connection.longest or model.cfg.n_ctx) - len(sequence)),
            end=model.end,
            prompt_logprobs=True,
        )
        for prompt, name, sequence in some
    ]
    replies = _all(connection, asked)
    sent = "token ids" if texts is None else "text"
    found: dict[str, Any] = {"model": name_of(connection.model), "sent": sent, "prompts": len(some)}
    native, found["against"] = _here(model)
    if native is None:
        others = [reply.text for reply in _all(connection, asked)]
        found |= {"logprob_difference": None, "logprobs_of": None}
    else:
        wanted = [Request(prompt, sequence, 0) for prompt, _, sequence in some]
        made = answers(native, wanted, TOKENS, model.end)
        others = [model.tokenizer.decode(one.tokens, skip_special_tokens=True) for one in made]
        found |= _logprob_difference(native, [sequence for _, _, sequence in some], replies)
    found["texts"] = [reply.text for reply in replies]
    found["alike"] = _alike(found["texts"], others)
    if temperature > 0:
        found["same_seed"] = _same_seed(connection, asked, found["texts"])
    return found


def accepted(found: Mapping[str, Any], before: Mapping[str, Any] | None, server: Server) -> None:
    """Refuse a server whose answers are not the model's, or no longer those of the run that is resumed.

    Raises:
        ServerError: With the figures.
    """
    difference = found["logprob_difference"]
    far = difference is not None and difference > LOGPROB
    figures = f"{100 * found['alike']:.0f} % of the text of {found['prompts']} greedy answers is the same"
    figures += (
        "" if difference is None else f", log-probabilities of {found['logprobs_of']} {difference:.3f} nats apart"
    )
    if server.verify and (far or found["alike"] < ALIKE):
        raise ServerError(
            f"the server at {server.address} is not the model, against {found['against']}: {figures} (at least "
            f"{100 * ALIKE:.0f} %, at most {LOGPROB} nats). Is it quantised, another revision, or does it change the "
            "prompt? With verify_server=False its answers are accepted, and these figures are recorded with them"
        )
    same = 1.0 if before is None else _alike(found["texts"], before["texts"])
    if server.verify and same < ALIKE:
        raise ServerError(
            f"the server at {server.address} gives other answers than when this run began ({100 * same:.0f} % of the "
            "text up to the first difference), so it now serves another model. Serve the first one, or use a new file"
        )


def _some(prompts: Seq[Prompt], sequences: Seq[Mapping[str, Sequence]]) -> list[tuple[str, str, Sequence]]:
    """A few sequences, spread over the prompts, with each condition in turn."""
    names = list(sequences[0])
    places = sorted({i * len(prompts) // PROMPTS for i in range(PROMPTS)})
    named = [(at, names[i % len(names)]) for i, at in enumerate(places)]
    return [(prompts[at].id, name, sequences[at][name]) for at, name in named]


def _all(connection: Connection, asked: Seq[Asked]) -> list[Reply]:
    found = dict(connection.replies(enumerate(asked), len(asked)))
    return [found[i] for i in range(len(asked))]


def _here(model: UnloadedModel) -> tuple[Any, str]:
    """The model without hooks, if it is loaded, and a description of what the server is compared with."""
    if model.loaded is None:
        return None, "a second run of itself"
    try:
        native = native_of(model.loaded)
    except ModelError:
        return None, "a second run of itself"
    dtype = str(next(native.parameters()).dtype).removeprefix("torch.")
    return native, f"the model here ({dtype}, weights {weights_hash(model.loaded)})"


def _alike(one: Seq[str], other: Seq[str]) -> float:
    """The mean fraction of the texts before the first difference; 1 if they are equal."""
    shares = []
    for a, b in zip(one, other, strict=False):
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
        shares.append(same / max(len(a), len(b)) if a or b else 1.0)
    return sum(shares) / len(shares)


def _logprob_difference(native: Any, sequences: Seq[Sequence], replies: Seq[Reply]) -> dict[str, Any]:
    """The mean |difference| of log-probabilities between server and model, of prompt tokens or generated tokens."""
    differences: dict[str, list[Float[Tensor, " token"]]] = {"prompts": [], "answers": []}
    for sequence, reply in zip(sequences, replies, strict=True):
        here = _logprobs(native, [*sequence.tokens.tolist(), *(reply.tokens or ())])
        split = len(sequence) - 1
        for of, mine, told in (
            ("prompts", here[:split], reply.prompt_logprobs),
            ("answers", here[split:], reply.logprobs),
        ):
            if told is not None and len(mine) == len(told):
                differences[of].append((mine - torch.tensor(told, dtype=torch.float64)).abs())
    for of, some in differences.items():
        if some:
            return {"logprob_difference": float(torch.cat(some).mean()), "logprobs_of": of}
    return {"logprob_difference": None, "logprobs_of": None}


@torch.no_grad()
def _logprobs(native: Any, ids: list[int]) -> Float[Tensor, " token"]:
    """The log-probability of each token after the first, in one pass."""
    tokens = torch.tensor([ids], device=next(native.parameters()).device)
    logits = native(input_ids=tokens).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0].cpu()


def _same_seed(connection: Connection, asked: Seq[Asked], greedy: Seq[str]) -> float:
    """The fraction of answers that the same seed reproduces.

    Raises:
        ServerError: No answer differs from the greedy one, even at a high temperature.
    """
    hot = [Asked(a.prompt, a.read, a.new_tokens, _HOT, seed, a.end) for seed, a in enumerate(asked)]
    first, second = ([reply.text for reply in _all(connection, hot)] for _ in range(2))
    if first == list(greedy):
        raise ServerError(
            f"the server at {connection.server.address} does not sample: {len(hot)} answers at temperature {_HOT:g} "
            "are the greedy ones. `transformers serve` samples only if generation_config.json of the checkpoint says "
            "do_sample = true"
        )
    return sum(a == b for a, b in zip(first, second, strict=True)) / len(hot)
