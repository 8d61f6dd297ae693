"""Answers from a server, which is compared with the model before, during and after a run."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

from mechattn.errors import OptionError, PromptError, PromptTooLong, ServerError, warn
from mechattn.evaluation import server_probe
from mechattn.evaluation.answer_file import KeptAnswers
from mechattn.evaluation.generate import Answer, AnswerBar, Sampling, mean_logprob, until_end
from mechattn.evaluation.generating_rows import Question, Request
from mechattn.evaluation.server import Completion, CompletionRequest, Connection, Server, connected
from mechattn.evaluation.server_probe import Sent
from mechattn.model.unloaded import UnloadedModel
from mechattn.prompts.token_sequences import TokenSequence

_MOST_LEFT_OUT = 0.1  # of the texts, at most, which would be read as other tokens
_PROBED_AFTER = 256  # answers, after which a server is probed again
_EVERY_CHARACTER = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}


def served_answers(
    server: Server,
    model: UnloadedModel,
    requests: Sequence[Request],
    todo: Sequence[Request],
    sampling: Sampling,
    at_once: int,
    file: KeptAnswers,
) -> Generator[tuple[Request, Answer, str], None, None]:
    """Each answer with its text, in the order of arrival; meanwhile the server is probed again.

    What is found out about the server is noted in the file of the run.

    Args:
        server: The server.
        model: The model here, of which only the tokenizer is needed.
        requests: Everything that is asked for in the run.
        todo: What of it is not answered yet.
        sampling: How answers are sampled.
        at_once: The number of requests at a time.
        file: The answers so far.

    Raises:
        ServerError: It is not, or no longer, the model.
    """
    if not todo:
        return

    # Samples of a question read the same tokens.
    questions = {request.question: request for request in requests}
    longest = max(len(request.sequence) for request in requests)
    most_tokens = longest + max(sampling.new_tokens, server_probe.TOKENS)
    with connected(server, model, at_once, most_tokens) as connection:
        check_room(requests, sampling.new_tokens, connection.longest, "the server")
        server_probe.check_tokenizer(connection)

        # What cannot be sent as text is left out.
        sent = _prompts_sent(connection, questions)
        todo = [request for request in todo if request.question in sent]

        earlier = file.about.get("probe", {})
        probe = server_probe.start_probe(connection, questions, sent, sampling, earlier)
        file.note("probe", probe.about)

        with AnswerBar(len(todo), len(file.answers)) as bar:
            for start in range(0, len(todo), _PROBED_AFTER):
                stretch = todo[start : start + _PROBED_AFTER]

                asked = {request: _sampled(sent, request, sampling) for request in stretch}
                for request, completion in connection.completions(asked):
                    answer, text = _answer(completion, model)
                    bar.add_tokens(len(answer.tokens))
                    bar.update()
                    yield request, answer, text

                probe = probe.compared(dict(connection.completions(probe.requests)))
                if server.verify and not probe.is_passed:
                    file.drop(request.key for request in stretch)
                    file.note("probe", probe.about)
                    raise server.error(
                        f"no longer serves the model, {probe.comparison}. Its {len(stretch)}"
                        " answers since it last did are dropped; serve the model, and call evaluate"
                        " again with the same arguments"
                    )

        file.note("probe", probe.about)


def _sampled(sent: Sent, request: Request, sampling: Sampling) -> CompletionRequest:
    """The request of an answer, whose seed is the same under each condition."""
    name = f"{sampling.seed} {request.sample} {request.prompt}"
    seed = crc32(name.encode(errors="backslashreplace"))
    return CompletionRequest(
        sent[request.question],
        len(request.sequence),
        sampling.new_tokens,
        sampling.temperature,
        seed=seed >> 1,  # 31 bits, which every server takes
    )


def _answer(completion: Completion, model: UnloadedModel) -> tuple[Answer, str]:
    """The answer of a completion, and its text."""
    is_stopped = completion.finish_reason == "stop"
    logprobs = [logprob for logprob in completion.logprobs or () if logprob is not None]

    # A server that reports no ids has left the end token out of its text.
    if completion.ids is None:
        tokens = model.tokenizer(completion.text, add_special_tokens=False)["input_ids"]
        return Answer(tuple(tokens), is_stopped, mean_logprob(logprobs)), completion.text

    answer = until_end(completion.ids, logprobs, model.end)
    text = model.tokenizer.decode(answer.tokens, skip_special_tokens=True)
    return replace(answer, finished=answer.finished or is_stopped), text


def _prompts_sent(connection: Connection, questions: Mapping[Question, Request]) -> Sent:
    """What the server gets: token ids if it takes them, or else texts that give the same ids.

    A problem without such a text is left out under every condition, so that conditions are compared
    on the same problems.

    Raises:
        PromptError: More than a tenth of the texts would be read as other tokens.
    """
    ids = {question: request.sequence.tokens.tolist() for question, request in questions.items()}

    # One token is asked for, to see whether ids are taken.
    first_ids = next(iter(ids.values()))
    try:
        connection.completion(CompletionRequest(first_ids, len(first_ids), new_tokens=1))
        return ids
    except ServerError as error:
        if error.status not in (400, 422):  # it has taken texts, so these are bad input to it
            raise

    tokenizer = connection.reader.tokenizer
    texts = {question: text_of(tokenizer, tokens) for question, tokens in ids.items()}
    refused = [question for question, text in texts.items() if text is None]
    if refused:
        _check_left_out(refused, len(texts))

    left_out = {prompt for prompt, _ in refused}
    return {
        question: text
        for question, text in texts.items()
        if text is not None and question[0] not in left_out
    }


def _check_left_out(refused: Sequence[Question], count: int) -> None:
    """Warn of texts that would be read as other tokens; refuse a run with more than a few."""
    prompt, name = refused[0]
    message = (
        f"the server takes only text, and the text of prompt {prompt} with the condition {name!r}"
        f" would be read as other tokens, as would {len(refused)} of {count} in all"
    )
    if len(refused) > _MOST_LEFT_OUT * count:
        raise PromptError(
            f"{message}. Omit them, or serve the model with an engine that takes token ids, such as"
            " vLLM or SGLang"
        )
    warn(f"{message}. These problems are left out under every condition")


def text_of(tokenizer: Any, ids: list[int]) -> str | None:
    """The text from which a tokenizer makes exactly these ids, including its BOS token, if any."""
    for start in (0, 1):  # without the first token, which the tokenizer may add
        text = str(tokenizer.decode(ids[start:], **_EVERY_CHARACTER))
        if tokenizer(text)["input_ids"] == ids:
            return text
    return None


def check_servable(sequence: TokenSequence, name: str) -> None:
    """Refuse a condition that acts inside the model, which a server does not allow.

    Args:
        sequence: A sequence that the condition has made.
        name: The condition's name.

    Raises:
        OptionError: It does.
    """
    if sequence.interventions or sequence.cut_edges is not None or sequence.keeps_positions:
        raise OptionError(
            f"{name!r} acts inside the model (an intervention, .masked() or .unshifted()), and a"
            " server takes tokens and nothing else. Omit the condition, or evaluate it here,"
            " without server=…"
        )


def check_room(requests: Iterable[Request], new_tokens: int, longest: int, who: str) -> None:
    """Refuse prompts that are too long with their answers.

    Args:
        requests: What is asked for.
        new_tokens: The longest answer, in tokens.
        longest: How many tokens are taken in all.
        who: What takes them, such as "the server".

    Raises:
        PromptTooLong: A prompt and its answer may be longer.
    """
    for request in requests:
        length = len(request.sequence)
        if length + new_tokens > longest:
            raise PromptTooLong(
                f"prompt {request.prompt} has {length:,} tokens with the condition"
                f' "{request.condition}" and {new_tokens} new ones are allowed; {who} takes'
                f" {longest:,}"
            )
