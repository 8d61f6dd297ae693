"""Is it the model? Before, within and after a run, with the model here and without it."""

import copy
import json

import pytest
import torch

import mechattn as ma
from mechattn.errors import ServerError
from mechattn.evaluation.server_probe import ALIKE, Known, Probe, stretches
from tests.served.stand_in import Engine, StandIn, asked_of, running

SLASH = {"slash": ma.MeaninglessTokens("/", 20)}


@pytest.fixture(scope="module")
def some():
    return ma.load_prompts("word-problems", limit=8)


def there(model, prompts, server, **options):
    given = asked_of(server, {"new_tokens": 12, "batch": 4} | options)
    return ma.evaluate(model, prompts, SLASH, **given)


def changed(engine, change):
    made = copy.deepcopy(engine.model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.copy_(change(parameter))
    return Engine(made, engine.tokenizer)


@pytest.fixture(scope="module")
def noisy(engine):
    """Weights with noise of 30 % of their spread: three in four answers are still those of the model."""
    return changed(engine, lambda w: w + 0.3 * w.std() * torch.randn_like(w))


TELLS = {"all": {}, "text": {"takes_ids": False}}


@pytest.mark.parametrize("tells", ["all", "text"])
def test_weights_with_noise_are_refused(toy, some, noisy, tells):
    """Even by greedy answers alone, most of which are the same; the share of these is given with its interval."""
    with running(StandIn(noisy, **TELLS[tells])) as server:
        with pytest.raises(
            ServerError, match=r"\d\d % \[\d\d, \d\d\] of 16 greedy answers are alike"
        ):
            there(toy, some, server)
        probe = there(toy, some[:1] if tells == "all" else some, server, verify=False).provenance[
            "probe"
        ]
    if tells != "all":
        assert 0.2 < probe["alike"] < ALIKE - 0.1
        assert 0 < probe["alike_low"] < probe["alike"] < probe["alike_high"] < 1


@pytest.mark.parametrize(("tells", "dtype"), [("all", "float16"), ("text", "bfloat16")])
def test_the_same_weights_in_another_dtype_are_the_model(toy, some, engine, tells, dtype):
    rounded = changed(engine, lambda w: w.to(getattr(torch, dtype)).float())
    with running(StandIn(rounded, **TELLS[tells])) as server:
        probe = there(toy, some, server, new_tokens=2).provenance["probe"]
    assert probe["alike"] == 1
    assert (probe["logprob_difference"] or 0) < 0.01
    assert probe["alike_low"] == pytest.approx(0.806, abs=0.001)  # Wilson's, of 16 in 16
    assert all(again["alike"] == 1 for again in probe["again"])


def test_a_tie_may_turn_either_way():
    known = Known("ab c", None, None, ("", "a", "ab", "ab c"), (2.0, 0.1, 3.0, 4.0))
    assert known.agrees("ab c")
    assert known.agrees("ax")  # at the second token, where both are as likely
    assert not known.agrees("ab d")
    assert not known.agrees("ab c d")
    assert not known.agrees("x")
    assert not Known("ab c", None, None).agrees("ax")


@pytest.mark.parametrize(("given", "after"), [("model", 0), ("name", 10)])
def test_a_model_that_is_exchanged_is_found(toy, some, engine, noisy, given, after, tmp_path):
    """After so many of 16 answers; those since the last probe that agreed are dropped, and the same call goes on."""

    model, path = {"model": toy, "name": "toy:llama"}[given], tmp_path / "answers.jsonl"
    first_probe = 4 + 16 * (1 if given == "model" else 2)
    with running(StandIn(engine)) as server:
        whole = there(model, some, server)
    with running(StandIn(engine)) as server:
        first, other = server.reply, StandIn(noisy).reply

        def reply(body):
            before = [one["max_tokens"] for one in server.asked[:-1]]
            return (other if len(before) >= first_probe and before.count(12) >= after else first)(
                body
            )

        server.reply = reply
        with pytest.raises(
            ServerError,
            match=r"no longer serves the model, .* answers since it last did are dropped",
        ):
            there(model, some, server, out=path)
        kept = [json.loads(line) for line in path.read_text().splitlines()]
        assert kept[0]["provenance"]["probe"]["again"][-1]["logprob_difference"] > 0.5
        right = {(a.prompt, a.condition): a.tokens for a in whole.answers}
        assert all(
            tuple(row["tokens"]) == right[row["prompt"], row["condition"]] for row in kept[1:]
        )
        assert len(kept) - 1 <= after
        server.reply = first
        made = there(model, some, server, out=path)
    assert made.answers == whole.answers


def test_where_a_run_is_probed_is_drawn_by_seed():
    """Once in each part, nothing is left out or asked for twice, and the places differ with the seed."""
    for total in (1, 5, 256, 257, 5000):
        parts = stretches(range(total), 0)
        assert [one for part in parts for one in part] == list(range(total))
        assert len(parts) == min(8, -(-total // 256)) + 1
        assert parts == stretches(range(total), 0)
    assert len({len(stretches(range(100), seed)[0]) for seed in range(20)}) > 10


def counting_texts(server, count):
    """The server says that it has read so many tokens of a text."""
    first = server.reply

    def reply(body):
        made = first(body)
        if isinstance(body["prompt"], str):
            made["usage"]["prompt_tokens"] = count(body["prompt"], made["usage"]["prompt_tokens"])
        return made

    server.reply = reply


def test_another_tokenizer_is_refused_without_weights(some, engine):
    """The answers are never asked for; one token around each text is a BOS, and not another tokenizer."""
    with running(StandIn(engine)) as server:
        counting_texts(server, lambda text, read: len(text.split()))
        with pytest.raises(
            ServerError,
            match=r"has another tokenizer, so it is another model: it reads three texts",
        ):
            there("toy:llama", some, server)
        assert len(server.asked) == 3
        there("toy:llama", some[:1], server, verify=False)
    with running(StandIn(engine)) as server:
        counting_texts(server, lambda text, read: read + 1)
        there("toy:llama", some[:1], server)


@pytest.mark.parametrize("given", ["name", "model"])
def test_what_cannot_be_told_without_weights_is_said(toy, some, engine, given, recwarn):
    with running(StandIn(engine)) as server:
        there({"name": "toy:llama", "model": toy}[given], some[:1], server)
    told = [str(warning.message) for warning in recwarn if "would not be noticed" in str(warning)]
    told = [text for text in told if "Without the weights here nothing more can be told" in text]
    assert len(told) == (given == "name")


@pytest.mark.parametrize("given", ["name", "model"])
@pytest.mark.parametrize(("count", "new_tokens"), [(8, 24), (2, 200)])
def test_probes_cost_at_most_a_tenth(toy, engine, monkeypatch, given, count, new_tokens):
    """Of the tokens that a run may generate; and the control, where they may cost ten times as many."""
    prompts = ma.load_prompts("word-problems", limit=count)
    costs = {}
    for share in (0.1, 1.0):
        monkeypatch.setattr("mechattn.evaluation.server_probe.SHARE", share)
        with running(StandIn(engine)) as server:
            model = {"name": "toy:llama", "model": toy}[given]
            there(model, prompts, server, new_tokens=new_tokens)
            probes = [body for body in server.asked if body["max_tokens"] != new_tokens]
        costs[share] = sum(body["max_tokens"] for body in probes[4:])  # three texts, and token ids
    most = 0.1 * count * 2 * new_tokens
    assert costs[0.1] <= most < costs[1.0]


def test_an_address_without_v1_is_told_at_once(some, engine):
    """As llama.cpp answers there: in a form of its own."""
    with running(StandIn(engine)) as server:
        server.change = lambda made: {"content": made["choices"][0]["text"], "stop": True}
        with pytest.raises(ServerError, match=r"no choices; is the address right, such as .*/v1"):
            there("toy:llama", some, server)
        assert len(server.asked) <= 4


def test_a_bad_request_is_not_read_as_a_server_of_texts(some, engine):
    def refused(handler):
        if handler.command == "POST":
            handler.send(400, {"error": "max_tokens must be even"})
        return handler.command == "POST"

    with (
        running(StandIn(engine, raw=refused)) as server,
        pytest.raises(ServerError, match=r"answers 400: .*max_tokens must be even"),
    ):
        there("toy:llama", some, server)


@pytest.mark.parametrize("served", ["the model", "another"])
def test_a_small_probe_refuses_no_server(toy, some, engine, noisy, monkeypatch, served):
    """Where a few short answers speak against it the whole probe is asked, which alone refuses."""
    monkeypatch.setattr("mechattn.evaluation.server_probe.SHARE", 0.01)
    doubt = Probe.doubt

    def doubtful(probe, figures, *least):
        if len(probe.requests) < 16:
            return "too few are alike"
        return doubt(probe, figures, *least)

    monkeypatch.setattr("mechattn.evaluation.server_probe.Probe.doubt", doubtful)
    with running(StandIn({"the model": engine, "another": noisy}[served])) as server:
        if served == "the model":
            made = there(toy, some, server)
            assert made.provenance["probe"]["answers"] == 16
        else:
            with pytest.raises(ServerError, match="of 16 greedy answers are alike"):
                there(toy, some, server)
