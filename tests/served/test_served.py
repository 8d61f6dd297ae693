"""Answers of a server against those of the loop here: the same tokens sent, the same answers read."""

import json
import math
from dataclasses import replace

import pytest

import mechattn as ma
from mechattn.errors import OptionError, PromptError, PromptTooLong, ServerError
from mechattn.evaluation import served_answers, server_probe
from mechattn.evaluation.served_answers import text_of
from tests.served.stand_in import StandIn, running, served

SLASH = {"slash": ma.MeaninglessTokens("/", 20)}
CONDITIONS = SLASH | {"middle": ma.MeaninglessTokens("/", 7, place="middle")}
LIMIT = 24  # so that some answers reach it


@pytest.fixture(scope="module")
def local(toy, prompts):
    return ma.evaluate(toy, prompts, CONDITIONS, new_tokens=LIMIT)


def assert_same_answers(here, served_ones):
    for ours, theirs in zip(here, served_ones, strict=True):
        assert replace(theirs, logprob=0.0) == replace(ours, logprob=0.0)
        assert theirs.logprob == pytest.approx(ours.logprob, abs=1e-4)


@pytest.mark.parametrize("kind", ["name", "model", "tokenizer"])
def test_answers_are_those_of_the_loop_here(toy, prompts, server, local, kind):
    model = {"name": "toy:llama", "model": toy, "tokenizer": toy.tokenizer}[kind]
    evaluation = served(server, prompts, CONDITIONS, model, LIMIT)
    assert {answer.finished for answer in local.answers} == {True, False}
    assert_same_answers(local.answers, evaluation.answers)
    probe = evaluation.provenance["probe"]
    assert (probe["sent"], probe["model"]) == ("token ids", "toy")
    shares = [figures["alike"] for figures in probe["rounds"]]
    if kind == "model":
        assert shares == [1.0, 1.0]
        assert probe["against"].startswith("the model here (float32, weights ")
        assert probe["rounds"][0]["logprob_difference"] < 1e-4
    else:
        assert shares == [1.0]  # at the end, against its answers at the beginning
        assert probe["against"] == "its answers when this run began"


@pytest.mark.parametrize("takes_ids", [True, False])
def test_a_server_that_tells_text_alone(prompts, local, engine, takes_ids):
    with running(StandIn(engine, takes_ids=takes_ids, tells_ids=False)) as server:
        evaluation = served(server, prompts, CONDITIONS, new_tokens=LIMIT)
    assert all(isinstance(body["prompt"], list) == takes_ids for body in server.bodies[4:])
    for ours, theirs in zip(local.answers, evaluation.answers, strict=True):
        assert (theirs.tokens, theirs.text, theirs.finished) == (
            ours.tokens,
            ours.text,
            ours.finished,
        )
    if not takes_ids:
        assert all(math.isnan(answer.logprob) for answer in evaluation.answers)


@pytest.mark.parametrize("tells_ids", [True, False])
def test_ids_and_log_probabilities_as_llama_cpp_tells_them(prompts, local, server, tells_ids):
    def as_llama_cpp(reply):
        (choice,) = reply["choices"]
        if choice["logprobs"]:
            pairs = zip(choice.pop("token_ids"), choice["logprobs"]["token_logprobs"], strict=True)
            content = [{"id": token, "logprob": logprob} for token, logprob in pairs]
            if tells_ids:
                choice["text"] += " "  # which is not read, as there are ids
            else:
                content = [{"logprob": token["logprob"]} for token in content]
            choice["logprobs"] = {"content": content}
        return reply

    server.change = as_llama_cpp
    evaluation = served(server, prompts, new_tokens=LIMIT)
    expected = [answer for answer in local.answers if answer.condition == "baseline"]
    assert_same_answers(expected, evaluation.answers)


def test_what_is_sent(toy, prompts, server):
    served(server, prompts[:2], SLASH)
    bodies = server.answers_asked(12)
    sequences = [
        condition.apply(prompt, toy).tokens.tolist()
        for prompt in prompts[:2]
        for condition in (ma.Baseline(), SLASH["slash"])
    ]
    assert sorted(body["prompt"] for body in bodies) == sorted(sequences)
    plain = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    for body in bodies:
        assert {name: body[name] for name in plain} == plain
        assert body["stop_token_ids"] == [toy.tokenizer.eos_token_id]
    assert {headers["authorization"] for headers in server.headers} == {"Bearer none"}
    assert {headers["accept-encoding"] for headers in server.headers} == {"identity"}


def test_samples_have_seeds_of_their_own(prompts, server, monkeypatch):
    monkeypatch.setattr(
        server_probe, "MOST_ANSWER_TOKENS", 14
    )  # the first are sure when it is hot, too
    options = {"samples": 3, "temperature": 4.0, "new_tokens": 6}
    evaluation = served(server, prompts[:2], SLASH, **options)
    bodies = server.answers_asked(6)
    assert len(bodies) == 12
    assert len({body["seed"] for body in bodies}) == 6  # the same under both conditions
    assert len({answer.tokens for answer in evaluation.answers}) > 4
    assert served(server, prompts[:2], SLASH, **options).answers == evaluation.answers
    assert served(server, prompts[:2], SLASH, **options, seed=1).answers != evaluation.answers


def test_a_server_that_does_not_sample_is_refused(prompts, server, engine, monkeypatch):
    complete = engine.complete
    monkeypatch.setattr(engine, "complete", lambda ids, n, t, seed: complete(ids, n, 0, None))
    with pytest.raises(ServerError, match=r"does not sample: 3 answers at temperature 2 are the"):
        served(server, prompts, samples=2)


def test_texts_that_give_other_tokens_are_refused(toy, prompts, engine):
    shuffled = ma.conditions.ShuffledSentence(20)
    with (
        running(StandIn(engine, takes_ids=False)) as server,
        pytest.raises(
            PromptError, match=r"takes only text, .* with the condition 'words'"
        ) as error,
    ):
        served(server, prompts, {**SLASH, "words": shuffled})
    assert len(server.bodies) == 4  # three texts, and token ids, which it does not take
    sequences = [shuffled.apply(prompt, toy).tokens.tolist() for prompt in prompts]
    refused = [ids for ids in sequences if text_of(toy.tokenizer, ids) is None]
    assert f"as would {len(refused)} of 9 in all" in str(error.value)


def test_such_a_problem_is_left_out_everywhere(engine, monkeypatch):
    many = ma.load_prompts("word-problems", limit=6)
    texts_of_ids = served_answers.text_of
    inserted = iter(range(12))  # of 12 texts, the fourth: the second problem's with slashes

    def text_of(tokenizer, ids):
        return None if next(inserted) == 3 else texts_of_ids(tokenizer, ids)

    monkeypatch.setattr(served_answers, "text_of", text_of)
    with (
        running(StandIn(engine, takes_ids=False)) as server,
        pytest.warns(UserWarning, match=r"as would 1 of 12 in all\. These problems"),
    ):
        evaluation = served(server, many, SLASH, new_tokens=4)
    answered = {name: [] for name in ("baseline", "slash")}
    for answer in evaluation.answers:
        answered[answer.condition].append(answer.prompt)
    kept = [many[index].id for index in (0, 2, 3, 4, 5)]
    assert answered == {"baseline": kept, "slash": kept}


def test_a_text_comes_back_with_bos_once(toy):
    tokenizer = toy.tokenizer
    ids = tokenizer("Tom has 3 apples.")["input_ids"]
    assert text_of(tokenizer, ids) == "Tom has 3 apples."
    assert text_of(tokenizer, ids[1:]) is None  # the server would put one first
    twice = [tokenizer.bos_token_id, *ids]
    assert text_of(tokenizer, twice) == tokenizer.bos_token + "Tom has 3 apples."


def test_prompts_that_are_read_otherwise_are_told(prompts, server):
    def change(reply):
        reply["usage"]["prompt_tokens"] += 1  # a second BOS
        return reply

    server.change = change
    with pytest.raises(ServerError, match=r"has read \d+ tokens of a prompt that has \d+"):
        served(server, prompts)


def test_the_limit_of_the_server_is_known_before_it_answers(prompts, engine):
    with (
        running(StandIn(engine, longest=64)) as server,
        pytest.raises(PromptTooLong, match=r"its answer up to .*; the server takes 64"),
    ):
        served(server, prompts, new_tokens=LIMIT)
    assert not server.bodies


def test_the_probe_has_room_where_the_answers_have(toy, prompts, engine):
    longest = max(len(ma.Baseline().apply(prompt, toy)) for prompt in prompts) + 2
    with running(StandIn(engine, longest=longest)) as server:
        served(server, prompts, new_tokens=2)
    assert all(len(body["prompt"]) + body["max_tokens"] <= longest for body in server.bodies[3:])


def test_a_run_goes_on_wherever_the_server_is_now(prompts, engine, tmp_path):
    path = tmp_path / "answers.jsonl"
    with running(StandIn(engine)) as server:
        whole = served(server, prompts, SLASH, out=path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], lines[4][:20]]))
    with running(StandIn(engine)) as server:
        evaluation = served(server, prompts, SLASH, out=path)
        assert len(server.answers_asked(12)) == 6 - 3
        assert evaluation.answers == whole.answers
        server.bodies.clear()
        assert served(server, prompts, SLASH, out=path).answers == whole.answers
        assert not server.bodies  # all answers were there
    first = json.loads(lines[0])["provenance"]
    continued = json.loads(path.read_text().splitlines()[0])["provenance"]
    rounds = first["probe"].pop("rounds")
    assert continued["probe"].pop("rounds")[: len(rounds)] == rounds
    assert continued == first


def test_a_server_does_not_continue_a_local_run(toy, prompts, server, tmp_path):
    path = tmp_path / "answers.jsonl"
    ma.evaluate(toy, prompts[:1], new_tokens=12, out=path)
    with pytest.raises(OptionError, match=r"another run \(served_model differs\)"):
        served(server, prompts, out=path)
    assert not server.bodies


def test_a_run_does_not_go_on_with_another_model(toy, prompts, engine, tmp_path, changed_engine):
    path = tmp_path / "answers.jsonl"
    with running(StandIn(engine)) as server:
        served(server, prompts, out=path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:3]) + "\n")
    with (
        running(StandIn(changed_engine("2 bits"))) as server,
        pytest.raises(ServerError, match="against its answers when this run began: 0 %"),
    ):
        served(server, prompts, out=path)
    assert path.read_text().splitlines() == lines[:3]
    with pytest.raises(OptionError, match=r"holds answers of another run \(\w+ differs\)"):
        ma.evaluate(toy, prompts, new_tokens=12, out=path)
