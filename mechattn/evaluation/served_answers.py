"""Answers from a server, which is compared with the model before, within and after a run."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mechattn.errors import OptionError, PromptError, PromptTooLong, ServerError, warn
from mechattn.evaluation import server_probe
from mechattn.evaluation.answer_file import Kept, Key
from mechattn.evaluation.generate import Answer, Request, Sampling, until_end
from mechattn.evaluation.progress import AnswerBar
from mechattn.evaluation.server import Server
from mechattn.evaluation.server_completions import (
    Completion,
    CompletionRequest,
    Connection,
    connected,
)
from mechattn.evaluation.server_probe import NotTheModel, Probe, Question
from mechattn.model.checkpoint import UnloadedModel
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import TokenSequence

Todo = tuple[Prompt, str, Request]  # a prompt, the name of a condition, and the sequence
Sent = Mapping[Question, "list[int] | str"]
_LEFT_OUT = 0.1  # of the texts, at most, which would be read as other tokens
_AS_IT_IS = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}


def served_answers(
    server: Server,
    model: UnloadedModel,
    requested: Mapping[Key, Todo],
    todo: Sequence[Key],
    sampling: Sampling,
    at_once: int,
    file: Kept,
) -> Generator[tuple[Key, Answer, str], None, None]:
    """Each answer with its text, in the order of arrival; meanwhile the server is probed again.

    What is found out about the server is noted in the file of the run.

    Raises:
        ServerError: It is not, or no longer, the model.
    """
    if not todo:
        return
    requests = {(prompt.id, name): request for prompt, name, request in requested.values()}
    longest = max(len(request.sequence) for request in requests.values())
    tokens = longest + max(sampling.new_tokens, server_probe.TOKENS)
    with connected(server, model, at_once, tokens) as connection:
        check_room(requested.values(), sampling.new_tokens, connection.longest, "the server")
        server_probe.check_tokenizer(connection)
        sent = _sent(connection, requests)
        requests = {question: requests[question] for question in sent}
        todo = [key for key in todo if key[:2] in sent]
        probe = _probe(connection, requests, sent, len(todo), sampling, file.about.get("probe"))
        file.note("probe", probe.about)
        with AnswerBar(len(todo), len(file.answers)) as bar:
            for stretch in server_probe.stretches(todo):
                completion_requests = (
                    (key, _completion_request(key, requests, sent, sampling)) for key in stretch
                )
                for key, completion in connection.completions(completion_requests):
                    answer, text = _answer(completion, model)
                    bar.add_tokens(len(answer.tokens))
                    bar.add_answer()
                    yield key, answer, text
                reason = probe.again()
                if reason is not None:
                    file.note("probe", probe.about, without=stretch)
                    raise server.error(
                        f"no longer serves the model, {reason}. Its {len(stretch)} answers since it"
                        " last did are dropped; serve the model, and call evaluate again with the"
                        " same arguments"
                    )
        file.note("probe", probe.about)


def _completion_request(
    key: Key, requests: Mapping[Question, Request], sent: Sent, sampling: Sampling
) -> CompletionRequest:
    prompt, name, sample = key
    # The same under each condition, as without a server; 31 bits, which every server takes.
    digest = hashlib.sha256(f"{sampling.seed} {sample} {prompt}".encode(errors="backslashreplace"))
    return CompletionRequest(
        prompt=sent[prompt, name],
        length=len(requests[prompt, name].sequence),
        new_tokens=sampling.new_tokens,
        temperature=sampling.temperature,
        seed=int.from_bytes(digest.digest()[:4], "big") >> 1,
    )


def _answer(completion: Completion, model: UnloadedModel) -> tuple[Answer, str]:
    """The answer of a completion, and its text."""
    logprobs = torch.tensor(completion.logprobs or [torch.nan], dtype=torch.float64)
    if completion.ids is None:
        tokens = model.tokenizer(completion.text, add_special_tokens=False)["input_ids"]
        answer = Answer(tuple(tokens), completion.stopped, float(logprobs.mean()))
        return answer, completion.text
    answer = until_end(completion.ids, logprobs, model.end)
    text = model.tokenizer.decode(answer.tokens, skip_special_tokens=True)
    return replace(answer, finished=answer.finished or completion.stopped), text


def _probe(
    connection: Connection,
    requests: Mapping[Question, Request],
    sent: Sent,
    answer_count: int,
    sampling: Sampling,
    before: Mapping[str, Any] | None,
) -> Probe:
    """A server that serves the model, as it did ``before`` if a run is resumed."""

    def probed(names: Sequence[Question], tokens: int, first_texts: Sequence[str] = ()) -> Probe:
        questions = {name: requests[name] for name in names}
        return server_probe.probed(
            connection, questions, sent, tokens, sampling.temperature, first_texts
        )

    first = before or {"texts": []}
    first_texts = {(prompt, name): text for prompt, name, text in first["texts"]}
    first_questions = [question for question in first_texts if question in requests]
    if first_questions:
        texts = [first_texts[question] for question in first_questions]
        probe = probed(first_questions, first["tokens"], texts)
        probe.about["texts"] = first["texts"]
        probe.about["rounds"] = first["rounds"] + probe.about["rounds"]
        return probe

    questions = random.Random(sampling.seed).sample([*requests], len(requests))
    count, tokens = server_probe.probe_size(answer_count, sampling.new_tokens)
    # A few short answers can clear a server; only the whole probe can refuse one.
    try:
        probe = probed(questions[:count], tokens)
    except NotTheModel:
        probe = probed(questions[: server_probe.ANSWERS], server_probe.TOKENS)
    if connection.server.verify and not probe.has_weights:
        name = connection.reader.cfg.model_name
        warn(
            f"the server at {connection.server.address} has the tokenizer of {name} and repeats its"
            " own answers. Without the weights here nothing more can be told: a fine-tuned,"
            " quantised or differently sized model with this tokenizer would not be noticed. To"
            " compare the model itself, give evaluate a loaded one, ma.load_model(…), or a config"
            " weights = true in [evaluation.server]"
        )
    return probe


def _sent(connection: Connection, requests: Mapping[Question, Request]) -> Sent:
    """What the server gets: token ids if it takes them, or else texts that give the same ids.

    A problem without such a text is left out under every condition, so that conditions are compared
    on the same problems.

    Raises:
        PromptError: More than a tenth of the texts would be read as other tokens.
    """
    all_ids = {question: request.sequence.tokens.tolist() for question, request in requests.items()}
    first_ids = next(iter(all_ids.values()))
    try:
        connection.completion(CompletionRequest(first_ids, len(first_ids), 1))
        return all_ids
    except ServerError as error:
        if error.status not in (400, 422):  # it has taken texts, so these are bad input to it
            raise
    tokenizer = connection.reader.tokenizer
    texts = {question: text_of(tokenizer, ids) for question, ids in all_ids.items()}
    refused = [question for question, text in texts.items() if text is None]
    lacking = {prompt for prompt, _ in refused}
    if refused:
        prompt, name = refused[0]
        names = ", ".join(sorted({repr(name) for _, name in refused}))
        message = (
            f"the server takes only text, and the text of prompt {prompt} with the condition"
            f" {name!r} would be read as other tokens. So would {len(refused)} of {len(all_ids)} in"
            f" all, under {names}."
        )
        if len(refused) > _LEFT_OUT * len(all_ids):
            raise PromptError(
                f"{message} Omit them, or serve the model with an engine that takes token ids, such"
                " as vLLM or SGLang"
            )
        warn(f"{message} These problems are left out under every condition")
    return {
        question: text for question, text in texts.items() if text and question[0] not in lacking
    }


def text_of(tokenizer: Any, ids: list[int]) -> str | None:
    """The text from which a tokenizer makes exactly these ids, including its BOS token, if any."""
    for start in (0, 1):  # without the first token, which the tokenizer may add
        text = str(tokenizer.decode(ids[start:], **_AS_IT_IS))
        if tokenizer(text)["input_ids"] == ids:
            return text
    return None


def check_servable(sequences: Sequence[Mapping[str, TokenSequence]]) -> None:
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


def check_room(items: Iterable[Todo], new_tokens: int, longest: int, who: str) -> None:
    """Refuse prompts that are too long with their answers."""
    for prompt, name, request in items:
        length = len(request.sequence)
        if length + new_tokens > longest:
            raise PromptTooLong(
                f'prompt {prompt.id} ("{prompt.excerpt}") has {length:,} tokens with the condition'
                f' "{name}" and {new_tokens} new ones are allowed; {who} takes {longest:,}'
            )
