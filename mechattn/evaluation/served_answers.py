"""Answers from a server, which is compared with the model before, during and after a run."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

from mechattn.axes import BASELINE
from mechattn.engine.request_checks import check_is_unchanged, check_side
from mechattn.errors import OptionError, PromptError, PromptTooLong, ServerError, warn
from mechattn.evaluation import server_probe
from mechattn.evaluation.answer_file import KeptAnswers
from mechattn.evaluation.generate import Answer, AnswerBar, Sampling, mean_logprob, until_end
from mechattn.evaluation.generating_rows import Question, Request
from mechattn.evaluation.server import Completion, CompletionRequest, Connection, Server, connected
from mechattn.evaluation.server_probe import SentPrompts
from mechattn.model.unloaded import UnloadedModel
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import TokenSequence

_MOST_LEFT_OUT = 0.1  # the largest fraction of texts that may be read as other tokens
_PROBED_AFTER = 256  # answers; all of these are lost if the server then no longer serves the model
_EVERY_CHARACTER = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}


def served_answers(
    server: Server,
    model: UnloadedModel,
    requests: Sequence[Request],
    open_requests: Sequence[Request],
    sampling: Sampling,
    at_once: int,
    file: KeptAnswers,
) -> Generator[tuple[Request, Answer, str], None, None]:
    """Get answers from a server that is probed before, during and after this.

    The record of the probe becomes part of the provenance in ``file``.

    Args:
        server: The server.
        model: The model here, of which only the tokenizer is needed.
        requests: All requests of the run.
        open_requests: Those of them that have no answer yet.
        sampling: How answers are sampled.
        at_once: The number of requests at a time.
        file: The answers so far.

    Yields:
        A request, its answer and the answer's text, in the order of arrival.

    Raises:
        ServerError: The server fails, does not serve the model, or no longer serves it. In the last
            case its answers since the last probe are dropped.
        PromptTooLong: A prompt and its answer may be longer than the server takes.
        PromptError: The server takes only text, and would read too many texts as other tokens.
    """
    if not open_requests:
        return

    # All samples of a question read the same tokens.
    questions = {request.question: request for request in requests}
    longest = max(len(request.sequence) for request in requests)
    most_tokens = longest + max(sampling.new_tokens, server_probe.MOST_ANSWER_TOKENS)
    with connected(server, model, at_once, most_tokens) as connection:
        check_room(requests, sampling.new_tokens, connection.n_ctx, "the server")
        server_probe.check_tokenizer(connection)

        # Questions that a server of texts would read as other tokens are left out.
        sent_prompts = _prompts_sent(connection, questions)
        kept_count = len(requests) - len(open_requests)
        open_requests = [request for request in open_requests if request.question in sent_prompts]

        stored_record = file.provenance.get("probe", {})
        probe = server_probe.start_probe(
            connection, questions, sent_prompts, sampling, stored_record
        )
        file.note("probe", probe.record)

        with AnswerBar(len(open_requests), kept_count) as bar:
            for start in range(0, len(open_requests), _PROBED_AFTER):
                stretch = open_requests[start : start + _PROBED_AFTER]
                completion_requests = {
                    request: _sampled(sent_prompts, request, sampling) for request in stretch
                }
                for request, completion in connection.completions(completion_requests):
                    answer, text = _answer(completion, model)
                    bar.add_tokens(len(answer.tokens))
                    bar.update()
                    yield request, answer, text

                probe_completions = dict(connection.completions(probe.requests))
                try:
                    probe.compare(probe_completions)
                except ServerError:
                    file.drop(request.key for request in stretch)
                    file.note("probe", probe.record)
                    raise

        file.note("probe", probe.record)


def text_of(tokenizer: Any, ids: list[int]) -> str | None:
    """A text from which the tokenizer makes exactly these ids; None if there is none.

    The BOS token, which a tokenizer may add by itself, is then not in the text.
    """
    for start in (0, 1):  # with and without the first token
        text = str(tokenizer.decode(ids[start:], **_EVERY_CHARACTER))
        if tokenizer(text)["input_ids"] == ids:
            return text
    return None


def check_servable(
    model: UnloadedModel,
    prompts: Sequence[Prompt],
    sequences: Sequence[Mapping[str, TokenSequence]],
    new_tokens: int,
) -> None:
    """Refuse conditions that act inside the model, which a server does not allow, and prompts that
    a loaded model would refuse too.

    Args:
        model: The model here, of which only the tokenizer is needed.
        prompts: The prompts.
        sequences: The sequences of each prompt by condition.
        new_tokens: The longest answer, in tokens.

    Raises:
        OptionError: A condition acts inside the model.
        PromptError: There is such a prompt.
    """
    for prompt, by_condition in zip(prompts, sequences, strict=True):
        check_is_unchanged(by_condition[BASELINE])
        for name, sequence in by_condition.items():
            if sequence.interventions or sequence.cut_edges is not None or sequence.keeps_positions:
                raise OptionError(
                    f"{name!r} acts inside the model (an intervention, .masked() or .unshifted()),"
                    " but a server takes only tokens. Omit the condition, or evaluate it here,"
                    " without server=…"
                )
        if model.loaded is not None:
            check_side(prompt, by_condition, model.loaded, new_tokens)


def check_room(requests: Iterable[Request], new_tokens: int, n_ctx: int, who: str) -> None:
    """Refuse prompts that may be too long together with their answers.

    Args:
        requests: The requested answers.
        new_tokens: The longest answer, in tokens.
        n_ctx: The largest number of tokens of a prompt and its answer.
        who: What has this limit, such as "the server", for the message.

    Raises:
        PromptTooLong: A prompt and its answer may be longer.
    """
    for request in requests:
        length = len(request.sequence)
        if length + new_tokens > n_ctx:
            raise PromptTooLong(
                f"prompt {request.prompt} has {length:,} tokens with the condition"
                f' "{request.condition}" and its answer up to {new_tokens:,}; {who} takes'
                f" {n_ctx:,} in all"
            )


def _prompts_sent(connection: Connection, questions: Mapping[Question, Request]) -> SentPrompts:
    """The prompts as the server gets them: token ids, or texts if it does not take ids.

    A problem is left out under every condition if its text would be read as other tokens under any,
    so that conditions are compared on the same problems.

    Raises:
        PromptError: More than a tenth of the texts would be read as other tokens.
        ServerError: The server fails.
    """
    ids = {question: request.sequence.tokens.tolist() for question, request in questions.items()}

    # A completion of one token shows whether the server takes ids.
    first_ids = next(iter(ids.values()))
    try:
        connection.completion(CompletionRequest(first_ids, len(first_ids), new_tokens=1))
        return ids
    except ServerError as error:
        # It has taken texts, so with one of these statuses it refuses ids.
        if error.status not in (400, 422):
            raise

    tokenizer = connection.reader.tokenizer
    texts = {question: text_of(tokenizer, tokens) for question, tokens in ids.items()}
    refused_questions = [question for question, text in texts.items() if text is None]
    if refused_questions:
        prompt, name = refused_questions[0]
        message = (
            f"the server takes only text, and the text of prompt {prompt} with the condition"
            f" {name!r} would be read as other tokens, as would {len(refused_questions)} of"
            f" {len(texts)} in all"
        )
        if len(refused_questions) > _MOST_LEFT_OUT * len(texts):
            raise PromptError(
                f"{message}. Omit them, or serve the model with an engine that takes token ids,"
                " such as vLLM or SGLang"
            )
        warn(f"{message}. These problems are left out under every condition")

    left_out_prompts = {prompt for prompt, _ in refused_questions}
    return {
        question: text
        for question, text in texts.items()
        if text is not None and question.prompt not in left_out_prompts
    }


def _sampled(sent_prompts: SentPrompts, request: Request, sampling: Sampling) -> CompletionRequest:
    """The request to the server for an answer, with the same seed under each condition."""
    name = f"{sampling.seed} {request.sample} {request.prompt}"
    seed = crc32(name.encode(errors="backslashreplace"))
    return CompletionRequest(
        sent_prompts[request.question],
        len(request.sequence),
        sampling.new_tokens,
        sampling.temperature,
        seed=seed >> 1,  # 31 bits, which every server takes
    )


def _answer(completion: Completion, model: UnloadedModel) -> tuple[Answer, str]:
    """The answer in a completion, and its text."""
    is_stopped = completion.finish_reason == "stop"
    logprobs = [logprob for logprob in completion.logprobs or () if logprob is not None]

    # The text of a server that reports no ids does not contain the end token.
    if completion.ids is None:
        tokens = model.tokenizer(completion.text, add_special_tokens=False)["input_ids"]
        return Answer(tuple(tokens), is_stopped, mean_logprob(logprobs)), completion.text

    answer = until_end(completion.ids, logprobs, model.end)
    text = model.tokenizer.decode(answer.tokens, skip_special_tokens=True)
    return replace(answer, finished=answer.finished or is_stopped), text
