"""Answers from a server, which is compared with the model before, within and after a run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from mechattn.errors import OptionError, PromptTooLong, ServerError
from mechattn.evaluation import server_probe
from mechattn.evaluation.generate import Answer, Request, Sampling, until_end
from mechattn.evaluation.progress import AnswerBar
from mechattn.evaluation.server import Refused, Server
from mechattn.evaluation.server_completions import Asked, Connection, Reply, connected, texts_of
from mechattn.evaluation.server_probe import (
    NotTheModel,
    Probe,
    ProbeSize,
    check_tokenizer,
    probed,
    questions_for,
    stretches,
    tell_limits,
)
from mechattn.model.checkpoint import UnloadedModel
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import Sequence

Todo = tuple[Prompt, str, Request]  # a prompt, the name of a condition, and the sequence
Key = tuple[str, str, int]  # a prompt's id, the name of a condition, and the number of the sample


class Exchanged(ServerError):
    """A server no longer serves the model; these are the answers since it last did."""

    since: Seq[Key] = ()


@dataclass(frozen=True)
class Served:
    """A model on a server, probed; ``texts`` of prompts and conditions if it takes text only."""

    connection: Connection
    model: UnloadedModel
    texts: Mapping[tuple[str, str], str] | None
    probe: Probe
    sampling: Sampling

    def answered(self, todo: Seq[Todo]) -> Iterator[tuple[Todo, Answer, str]]:
        """Each answer with its text, in the order of arrival; meanwhile the server is probed again.

        Raises:
            Exchanged: It no longer serves the model.
        """
        with AnswerBar(len(todo)) as bar:
            for stretch in stretches(todo, self.sampling.seed):
                for item, answer, text in self._answered(stretch):
                    bar.add_tokens(len(answer.tokens))
                    bar.add_answer()
                    yield item, answer, text
                reason = self.probe.again(len(stretch))
                if reason is not None:
                    error = Exchanged(
                        f"the server at {self.connection.server.address} no longer serves the"
                        f" model, {reason}. Its {len(stretch)} answers since it last did are"
                        " dropped; serve the model, and call evaluate again with the same"
                        " arguments"
                    )
                    error.since = [_key(item) for item in stretch]
                    raise error

    def _answered(self, todo: Seq[Todo]) -> Iterator[tuple[Todo, Answer, str]]:
        """The answers between two probes."""
        new_tokens = self.sampling.new_tokens
        requests = ((item, self._request(item, new_tokens)) for item in todo)
        doubtful: dict[Key, tuple[Answer, str]] = {}
        for item, reply in self.connection.replies(requests):
            answer, text = self._read(reply)
            # The last allowed token may have ended the answer, although the server says "length".
            is_short = len(answer.tokens) < new_tokens
            if is_short and not reply.tells_ids and not reply.stopped:
                doubtful[_key(item)] = (answer, text)
            else:
                yield item, answer, text

        items = [item for item in todo if _key(item) in doubtful]
        longer_requests = ((item, self._request(item, new_tokens + 1)) for item in items)
        for item, reply in self.connection.replies(longer_requests):
            answer, text = doubtful[_key(item)]
            is_finished = reply.stopped and reply.text == text
            yield item, replace(answer, finished=is_finished), text

    def _read(self, reply: Reply) -> tuple[Answer, str]:
        """The answer of a reply, and its text."""
        logprobs = torch.tensor(reply.logprobs or [torch.nan], dtype=torch.float64)
        if not reply.tells_ids:
            return Answer(reply.tokens, reply.stopped, float(logprobs.mean())), reply.text
        answer = until_end(list(reply.tokens), logprobs, self.model.end)
        text = self.model.tokenizer.decode(list(answer.tokens), skip_special_tokens=True)
        return replace(answer, finished=answer.finished or reply.stopped), text

    def _request(self, item: Todo, new_tokens: int) -> Asked:
        prompt, name, request = item
        ids = tuple(request.sequence.tokens.tolist())
        sent: tuple[int, ...] | str = ids
        if self.texts is not None:
            sent = self.texts[prompt.id, name]
        context = self.model.cfg.n_ctx
        room = min(context, self.connection.longest or context) - len(ids)
        # The same under each condition, as without a server; 31 bits, which every server takes.
        key = f"{self.sampling.seed} {request.sample} {prompt.id}"
        digest = hashlib.sha256(key.encode("utf-8", "backslashreplace")).digest()
        seed = int.from_bytes(digest[:4], "big") >> 1
        return Asked(
            sent, len(ids), min(new_tokens, room), self.model, self.sampling.temperature, seed
        )


@contextmanager
def served(
    server: Server,
    model: UnloadedModel,
    prompts: Seq[Prompt],
    sequences: Seq[Mapping[str, Sequence]],
    sampling: Sampling,
    at_once: int,
    answer_count: int,
    before: Mapping[str, Any] | None,
) -> Iterator[Served]:
    """A connection to a server that serves the model, as it did ``before`` if a run is resumed."""
    with connected(server, at_once) as connection:
        if connection.longest is not None:
            who = f"the server at {server.address}"
            check_room(prompts, sequences, sampling.new_tokens, connection.longest, who)
        beyond = check_tokenizer(connection, model)
        texts: dict[tuple[str, str], str] | None = None
        if not _takes_ids(connection, model, sequences):
            texts = texts_of(model.tokenizer, prompts, sequences, server.address)

        rounds = server_probe.probe_rounds(
            answer_count, sampling.seed, model.loaded is not None, sampling.temperature
        )
        size = server_probe.probe_size(answer_count, sampling.new_tokens, rounds)

        def probed_by(size: ProbeSize) -> Probe:
            questions = questions_for(prompts, sequences, sampling.seed, size.answers, before)
            return probed(connection, model, questions, texts, size, sampling.temperature, before)

        # A few short answers can clear a server; only the whole probe can refuse one.
        try:
            probe = probed_by(size)
        except NotTheModel:
            whole = ProbeSize(server_probe.ANSWERS, server_probe.TOKENS)
            if size == whole:
                raise
            probe = probed_by(whole)
        if not probe.has_weights:
            tell_limits(connection, model)
        probe.about.setdefault("tokens_beyond_tokenizer", beyond)
        yield Served(connection, model, texts, probe, sampling)


def _takes_ids(
    connection: Connection, model: UnloadedModel, sequences: Seq[Mapping[str, Sequence]]
) -> bool:
    """Whether the server takes token ids, which it refuses as bad input if not: texts it has
    taken."""
    ids = tuple(next(iter(sequences[0].values())).tokens.tolist())
    try:
        connection.all([Asked(ids, len(ids), 1, model)])
    except Refused as error:
        if error.status not in (400, 422):
            raise
        return False
    return True


def check_servable(sequences: Seq[Mapping[str, Sequence]]) -> None:
    """Refuse conditions that act inside the model, which a server does not allow."""
    for by_condition in sequences:
        for name, sequence in by_condition.items():
            if sequence.interventions:
                kind = type(sequence.interventions[0]).__name__
                reason = f"intervenes ({kind}), which needs hooks inside the model"
            elif sequence.edge_mask is not None:
                reason = (
                    "hides tokens from others (.masked() or AttentionKnockout), and a server takes"
                    " no mask"
                )
            elif sequence.keeps_positions:
                reason = "keeps positions (.unshifted()), and a server counts them itself"
            else:
                continue
            raise OptionError(
                f"{name!r} {reason}: a server takes tokens and nothing else. Omit the condition, or"
                " evaluate it here, without server=…"
            )


def check_room(
    prompts: Seq[Prompt],
    sequences: Seq[Mapping[str, Sequence]],
    new_tokens: int,
    longest: int,
    who: str,
) -> None:
    """Refuse prompts that are too long with their answers."""
    for prompt, by_condition in zip(prompts, sequences, strict=True):
        for name, sequence in by_condition.items():
            if len(sequence) + new_tokens > longest:
                raise PromptTooLong(
                    f'prompt {prompt.id} ("{prompt.excerpt}") has {len(sequence):,} tokens with the'
                    f' condition "{name}" and {new_tokens} new ones are allowed; {who} takes'
                    f" {longest:,}"
                )


def _key(item: Todo) -> Key:
    prompt, name, request = item
    return prompt.id, name, request.sample
