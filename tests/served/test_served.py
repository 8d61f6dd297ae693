"""Answers of a server against those of the loop here: the same tokens sent, the same answers read."""

import json
import math
from dataclasses import replace

import pytest
import torch
from tqdm.auto import tqdm

import mechattn as ma
from mechattn.errors import OptionError, PromptError, PromptTooLong, ServerError
from mechattn.evaluation.server_completions import text_of
from tests.served.stand_in import Engine, StandIn, asked_of, running

SLASH = ma.MeaninglessTokens("/", 20)
CONDITIONS = {
    "slash": SLASH,
    "middle": ma.MeaninglessTokens("/", 7, place="middle"),
    "sentence": ma.RandomSentence(20),
}
LIMIT = 24  # so that some answers reach it


@pytest.fixture(scope="module")
def some():
    return ma.load_prompts("word-problems", limit=4)


@pytest.fixture(scope="module")
def here(toy, some):
    return ma.evaluate(toy, some, CONDITIONS, new_tokens=LIMIT)


@pytest.fixture
def server(engine):
    with running(StandIn(engine)) as made:
        yield made


def there(model, prompts, server, conditions=None, **options):
    return ma.evaluate(
        model, prompts, conditions, **asked_of(server, {"new_tokens": LIMIT} | options)
    )


def changed(model, change):
    """A copy of a model with other weights."""
    import copy

    made = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.copy_(change(parameter))
    return made


def rounded(bits):
    """Weights rounded to so many bits, with one scale a row."""

    def change(weights):
        scale = weights.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        return (weights / scale).round() * scale

    return change


@pytest.mark.parametrize("given", ["name", "model", "tokenizer"])
def test_answers_are_those_of_the_loop_here(toy, some, server, here, given):
    model = {"name": "toy:llama", "model": toy, "tokenizer": toy.tokenizer}[given]
    made = there(model, some, server, CONDITIONS)
    assert len(made.answers) == 16
    assert {a.finished for a in here.answers} == {True, False}
    for ours, theirs in zip(here.answers, made.answers, strict=True):
        assert replace(theirs, logprob=0.0) == replace(ours, logprob=0.0)
        assert theirs.logprob == pytest.approx(ours.logprob, abs=1e-4)
    probe = made.provenance["probe"]
    assert (probe["sent"], probe["alike"], probe["model"]) == ("token ids", 1.0, "toy")
    if given == "model":
        assert probe["against"].startswith("the model here (float32, weights ")
        assert probe["logprob_difference"] < 1e-4
    else:
        assert probe["against"] == "a second run of itself"
        assert probe["logprob_difference"] == 0


def test_an_answer_that_ends_at_the_limit_is_finished(toy, some, server):
    """Whatever a server says of an end token that is the last one allowed; some look at the limit first."""

    def limit_first(made):
        if made["usage"]["completion_tokens"] >= server.asked[-1]["max_tokens"]:
            made["choices"][0]["finish_reason"] = "length"
        return made

    server.change = limit_first
    whole = ma.evaluate(toy, some[:1], new_tokens=60).answers[0]
    for limit, finished in ((len(whole.tokens), False), (len(whole.tokens) + 1, True)):
        ours = ma.evaluate(toy, some[:1], new_tokens=limit).answers[0]
        assert ours.finished == finished
        for takes_ids, tells_ids in ((True, True), (True, False), (False, False)):
            server.takes_ids, server.tells_ids = takes_ids, tells_ids
            theirs = there(toy, some[:1], server, new_tokens=limit).answers[0]
            assert (theirs.tokens, theirs.text, theirs.finished) == (
                ours.tokens,
                ours.text,
                ours.finished,
            )


@pytest.mark.parametrize("tells", ["text", "ids, and no ids back"])
def test_a_server_that_tells_text_alone(toy, some, here, engine, tells):
    conditions = {name: CONDITIONS[name] for name in ("slash", "middle")}
    with running(StandIn(engine, takes_ids=tells != "text", tells_ids=False)) as server:
        made = there("toy:llama", some, server, conditions)
    assert made.provenance["probe"]["sent"] == ("text" if tells == "text" else "token ids")
    assert all(isinstance(b["prompt"], str) == (tells == "text") for b in server.asked[4:])
    ours = [a for a in here.answers if a.condition != "sentence"]
    assert [(a.tokens, a.text, a.finished) for a in made.answers] == [
        (a.tokens, a.text, a.finished) for a in ours
    ]
    if tells == "text":
        assert all(math.isnan(a.logprob) for a in made.answers)
        with pytest.raises(OptionError, match="a server that reports none"):
            made.best_of(1)


def test_what_is_sent(toy, some, server):
    there(toy, some[:2], server, {"slash": SLASH})
    sent = {tuple(body["prompt"]): body for body in server.asked if body["max_tokens"] == LIMIT}
    assert set(sent) == {
        tuple(c.apply(p, toy).tokens.tolist()) for p in some[:2] for c in (ma.Baseline(), SLASH)
    }
    for body in sent.values():
        plain = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
        assert {name: body[name] for name in plain} == plain
        assert body["stop_token_ids"] == [toy.tokenizer.eos_token_id]
        assert "seed" not in body
    assert {h.get("authorization") for h in server.headers} == {"Bearer none"}


def test_samples_have_seeds_of_their_own(some, server):
    asked = {"samples": 3, "temperature": 4.0, "new_tokens": 6}
    made = there("toy:llama", some[:2], server, {"slash": SLASH}, **asked)
    bodies = [body for body in server.asked if body["max_tokens"] == 6]
    assert len(bodies) == 12
    assert len({body["seed"] for body in bodies}) == 6  # the same under both conditions
    assert len({a.tokens for a in made.answers}) > 4
    assert made.provenance["probe"]["same_seed"] == 1.0
    assert made.pass_at_k([1, 3]).estimate.between(0, 1).all()
    assert there("toy:llama", some[:2], server, {"slash": SLASH}, **asked).answers == made.answers
    assert (
        there("toy:llama", some[:3], server, {"slash": SLASH}, **asked, seed=1).answers
        != made.answers
    )


def test_a_server_that_does_not_sample_is_refused(some, server, engine, monkeypatch):
    complete = engine.complete
    monkeypatch.setattr(engine, "complete", lambda ids, n, t, seed: complete(ids, n, 0, None))
    with pytest.raises(
        ServerError, match=r"does not sample: 3 answers at temperature 2 are the greedy ones"
    ):
        there("toy:llama", some[:3], server, samples=2)


def test_texts_that_give_other_tokens_are_refused(toy, some, engine):
    with running(StandIn(engine, takes_ids=False)) as server:
        with pytest.raises(
            PromptError, match=r"takes only text, and prompt .* with the condition \"words\""
        ) as raised:
            there(toy, some, server, {"slash": SLASH, "words": ma.conditions.ShuffledSentence(20)})
        assert len(server.asked) == 4  # three texts, and token ids, which it does not take
    text = str(raised.value)
    refused = [
        p
        for p in some
        if text_of(toy.tokenizer, ma.conditions.ShuffledSentence(20).apply(p, toy).tokens.tolist())
        is None
    ]
    assert len(refused) > 2
    assert f"So would {len(refused)} of 12 in all, under 'words'" in text
    ids = ma.conditions.ShuffledSentence(20).apply(some[0], toy).tokens.tolist()
    read = toy.tokenizer(toy.tokenizer.decode(ids[1:]))["input_ids"]
    at = next(i for i, (a, b) in enumerate(zip(ids, read, strict=False)) if a != b)
    assert (
        f"at position {at} {toy.tokenizer.decode(ids[at : at + 1])!r} ({ids[at]}) becomes" in text
    )


def test_a_text_comes_back_with_bos_once(toy):
    tokenizer = toy.tokenizer
    bos = tokenizer.bos_token_id
    ids = tokenizer("Tom has 3 apples.")["input_ids"]
    assert text_of(tokenizer, ids) == "Tom has 3 apples."
    assert text_of(tokenizer, ids[1:]) is None  # the server would put one first
    assert text_of(tokenizer, [bos, *ids]) == tokenizer.bos_token + "Tom has 3 apples."


def test_the_probe_tells_other_weights(toy, some, engine):
    """Rounded to bfloat16 or 8 bits it is the model; rounded to 4 bits, or of another revision, it is not."""
    native = engine.model
    torch.manual_seed(0)
    ways = {
        "bfloat16": lambda w: w.bfloat16().float(),
        "8 bits": rounded(8),
        "4 bits": rounded(4),
        "revision": lambda w: w + 0.05 * w.std() * torch.randn_like(w),
    }
    figures = {}
    for name, way in ways.items():
        with running(StandIn(Engine(changed(native, way), toy.tokenizer))) as server:
            probe = there(toy, some[:3], server, verify=False, new_tokens=2).provenance["probe"]
            figures[name] = probe["logprob_difference"]
            assert probe["logprobs_of"] == "prompts"
            if name in ("bfloat16", "8 bits"):
                assert probe["alike"] > 0.9
                there(toy, some[:3], server, new_tokens=2)
            else:
                with pytest.raises(
                    ServerError, match=r"is not the model, against the model here \(float32"
                ):
                    there(toy, some[:3], server, new_tokens=2)
    assert figures["bfloat16"] < figures["8 bits"] < 0.1 * figures["4 bits"]


def test_greedy_answers_alone_tell_coarse_changes_alone(toy, some, engine):
    """Of a server that tells no log-probabilities of prompts: two bits are told, four are not."""
    for bits, told in ((2, True), (4, False)):
        with running(
            StandIn(Engine(changed(engine.model, rounded(bits)), toy.tokenizer), tells_ids=False)
        ) as server:
            if told:
                with pytest.raises(ServerError, match="is not the model"):
                    there(toy, some[:3], server, new_tokens=2)
            else:
                there(toy, some[:3], server, new_tokens=2)


def test_two_models_behind_one_address_are_told(some, engine, toy):
    other = Engine(changed(engine.model, rounded(2)), toy.tokenizer)
    with running(StandIn(engine)) as server:
        first = server.reply
        server.reply = lambda body: (
            first(body) if len(server.bodies) < 9 else StandIn(other).reply(body)
        )
        with pytest.raises(ServerError, match="is not the model, against a second run of itself"):
            there("toy:llama", some, server)


@pytest.mark.parametrize("fault", ["doubled BOS", "another tokenizer", "cut short"])
def test_prompts_that_are_read_otherwise_are_told(some, server, fault):
    def change(made):
        ids = made["choices"][0].get("prompt_token_ids")
        if fault == "cut short" and ids is not None:
            made["choices"][0]["prompt_token_ids"] = ids[::-1]
        elif fault != "cut short":
            made["usage"]["prompt_tokens"] += 1 if fault == "doubled BOS" else -3
        return made

    server.change = change
    expected = {
        "doubled BOS": r"has read \d+ tokens of a prompt that has \d+",
        "another tokenizer": "has another tokenizer, so it is another model",
        "cut short": "has read other tokens",
    }[fault]
    with pytest.raises(ServerError, match=expected):
        there("toy:llama", some, server)


def test_the_limit_of_the_server_is_known_before_it_answers(some, engine):
    with (
        running(StandIn(engine, longest=64)) as server,
        pytest.raises(PromptTooLong, match=r"the server at .* takes 64"),
    ):
        there("toy:llama", some, server)
    assert not server.asked


def test_the_probe_has_room_where_the_answers_have(toy, some, engine):
    longest = max(len(ma.Baseline().apply(p, toy)) for p in some) + 2
    with running(StandIn(engine, longest=longest)) as server:
        there("toy:llama", some, server, new_tokens=2)
        assert all(len(body["prompt"]) + body["max_tokens"] <= longest for body in server.asked)


def test_a_bar_says_tokens_a_second(some, server, capsys, monkeypatch):
    shown = {"mininterval": 0, "disable": False}
    monkeypatch.setattr(
        "mechattn.evaluation.progress.tqdm", lambda **options: tqdm(**options | shown)
    )
    there("toy:llama", some[:2], server)
    assert "tokens/s" in capsys.readouterr().err


def test_a_run_goes_on_wherever_the_server_is_now(some, engine, tmp_path):
    path = tmp_path / "answers.jsonl"
    with running(StandIn(engine)) as server:
        whole = there("toy:llama", some, server, {"slash": SLASH}, out=path)
        assert {b["model"] for b in server.asked} == {"toy"}
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], lines[4][:20]]))
    with running(StandIn(engine)) as server:
        made = there("toy:llama", some, server, {"slash": SLASH}, out=path)
        asked = [b for b in server.asked if b["max_tokens"] == LIMIT]
        assert len(asked) == 8 - 3
        assert made.answers == whole.answers
        was, now = (
            json.loads(line)["provenance"] for line in (lines[0], path.read_text().splitlines()[0])
        )
        again = was["probe"].pop("again"), now["probe"].pop("again")
        assert [one["since"] for one in again[1][: len(again[0])]] == [
            one["since"] for one in again[0]
        ]
        assert len(again[1]) == len(again[0]) + 3  # before, within, after
        assert now == was
        server.bodies.clear()
        assert there("toy:llama", some, server, {"slash": SLASH}, out=path).answers == whole.answers
        assert not server.asked  # all is there
    assert len(ma.load_evaluation(path).answers) == 8


def test_a_run_does_not_go_on_with_another_model(toy, some, engine, tmp_path):
    path = tmp_path / "answers.jsonl"
    with running(StandIn(engine)) as server:
        there("toy:llama", some, server, out=path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:3]) + "\n")
    other = Engine(changed(engine.model, rounded(2)), toy.tokenizer)
    with (
        running(StandIn(other)) as server,
        pytest.raises(ServerError, match="gives other answers than when this run"),
    ):
        there("toy:llama", some, server, out=path)
    assert path.read_text().splitlines() == lines[:3]
    with pytest.raises(OptionError, match=r"holds answers of another run \(\w+ differs\)"):
        ma.evaluate(toy, some, new_tokens=LIMIT, out=path)
