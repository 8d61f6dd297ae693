"""Is it the model? Before, within and after a run, with the model here and without it."""

import json

import pytest

import mechattn as ma
from mechattn.errors import ServerError
from mechattn.evaluation import served_answers, server_probe
from mechattn.evaluation.server_probe import LEAST_ALIKE_TO_MODEL, Reference
from tests.served.stand_in import StandIn, running, served

SLASH = {"slash": ma.MeaninglessTokens("/", 20)}


@pytest.fixture(scope="module")
def prompts():
    return ma.load_prompts("word-problems", limit=8)


@pytest.fixture(scope="module")
def few(prompts):
    return prompts[:3]


def test_log_probabilities_of_prompts_tell_other_weights(toy, few, changed_engine):
    """Rounded to 8 bits it is the model; rounded to 4 bits it is not."""
    differences = {}
    for name in ("8 bits", "4 bits"):
        with running(StandIn(changed_engine(name))) as server:
            evaluation = served(server, few, None, toy, 2, verify=False)
            figures = evaluation.provenance["probe"]["rounds"][0]
            assert figures["alike"] > 0.9
            differences[name] = figures["logprob_difference"]
            if name == "8 bits":
                served(server, few, None, toy, 2)
                continue
            with pytest.raises(
                ServerError, match=r"does not run the model, against the model here \(fl"
            ):
                served(server, few, None, toy, 2)
    assert differences["8 bits"] < 0.1 * differences["4 bits"]


def test_greedy_answers_alone_tell_coarse_changes_alone(toy, prompts, changed_engine, monkeypatch):
    """A server of texts: noise of 30 % is told, four bits are not; the share comes with its interval."""
    monkeypatch.setattr(server_probe, "MOST_ANSWER_TOKENS", 24)
    with running(StandIn(changed_engine("4 bits"), takes_ids=False)) as server:
        served(server, prompts[:4], None, toy, 2)
    with running(StandIn(changed_engine("30 % noise"), takes_ids=False)) as server:
        with pytest.raises(
            ServerError, match=r"\d\d % \[\d\d, \d\d\] of 8 greedy answers are alike"
        ) as refusal:
            served(server, prompts, None, toy, 2)
        assert "log-probabilities" not in str(refusal.value), "none were compared"
        evaluation = served(server, prompts, None, toy, 2, verify=False)
    figures = evaluation.provenance["probe"]["rounds"][0]
    assert 0.2 < figures["alike"] < LEAST_ALIKE_TO_MODEL - 0.1
    assert 0 < figures["alike_low"] < figures["alike"] < figures["alike_high"] < 1


def test_a_tie_may_turn_either_way():
    reference = Reference("ab c", (), {"": 2.0, "a": 0.1, "ab": 3.0, "ab c": 4.0})
    assert reference.agrees("ab c")
    assert reference.agrees("ax")  # at the second token, where both are as likely
    assert not reference.agrees("ab d")
    assert not reference.agrees("ab c d")
    assert not reference.agrees("x")
    assert not Reference("ab c", ()).agrees("ax")


@pytest.mark.parametrize("kind", ["model", "name"])
def test_a_model_that_is_exchanged_is_found(
    toy, few, engine, changed_engine, kind, tmp_path, monkeypatch
):
    """After 3 of 6 answers; those since the last probe are dropped, and the same call goes on."""
    monkeypatch.setattr(served_answers, "_PROBED_AFTER", 2)
    model = {"model": toy, "name": "toy:llama"}[kind]
    path = tmp_path / "answers.jsonl"
    with running(StandIn(engine)) as server:
        whole = served(server, few, SLASH, model, 4)
        server.bodies.clear()
        model_reply = server.reply
        other_reply = StandIn(changed_engine("30 % noise")).reply

        def exchanged_reply(body):
            if len(server.answers_asked(4)) > 3:
                return other_reply(body)
            return model_reply(body)

        server.reply = exchanged_reply
        with pytest.raises(ServerError, match=r"does not run the model, .* are dropped"):
            served(server, few, SLASH, model, 4, batch=1, out=path)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert lines[0]["provenance"]["probe"]["rounds"][-1]["logprob_difference"] > 0.5
        assert len(lines) - 1 == 2  # the stretch before
        server.reply = model_reply
        evaluation = served(server, few, SLASH, model, 4, out=path)
    assert evaluation.answers == whole.answers


def test_a_resumed_run_compares_log_probabilities_with_its_first_ones(
    few, engine, changed_engine, tmp_path
):
    """Four bits leave most answers as they are; so without weights here the prompts tell."""
    path = tmp_path / "answers.jsonl"
    with running(StandIn(engine)) as server:
        served(server, few, new_tokens=4, out=path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with (
        running(StandIn(changed_engine("4 bits"))) as server,
        pytest.raises(
            ServerError, match=r"when this run began: .*probabilities are 0\.[1-9]\d+ nats"
        ),
    ):
        served(server, few, new_tokens=4, out=path)


def test_another_tokenizer_is_refused_without_weights(prompts, server):
    """The answers are never asked for; one token around each text is a BOS, and not another tokenizer."""
    added = [0, 7, 1]

    def change(reply):
        if not reply["choices"][0]["logprobs"]:  # of a text
            reply["usage"]["prompt_tokens"] += added[len(server.bodies) % 3]
        return reply

    server.change = change
    with pytest.raises(
        ServerError, match="has another tokenizer, so it is another model: it reads"
    ):
        served(server, prompts, batch=1)
    assert len(server.bodies) == 3
    served(server, prompts[:1], batch=1, verify=False)
    added[:] = [1, 1, 1]
    served(server, prompts[:1], batch=1)


@pytest.mark.parametrize("kind", ["name", "model"])
def test_what_cannot_be_told_without_weights_is_said(toy, prompts, server, kind, recwarn):
    served(server, prompts[:1], None, {"name": "toy:llama", "model": toy}[kind])
    warnings = [str(warning.message) for warning in recwarn]
    limits = [text for text in warnings if "Without the weights here it can only" in text]
    assert len(limits) == (kind == "name")
