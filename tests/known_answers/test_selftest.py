"""What is known is found, what is wrong is noticed, and what is not there is not tried."""

import pytest
import torch
from typer.testing import CliRunner

import mechattn as ma
from mechattn.commands.main import app
from mechattn.errors import ModelError
from mechattn.known_answers import known_heads, selftest
from mechattn.known_answers.answer import KnownAnswer, SelfTest, compared


def outcomes(answers):
    return [answer.outcome for answer in answers]


@pytest.mark.slow
def test_every_answer_is_found(models):
    said = []
    made = ma.selftest(models, say=said.append)
    assert tuple(said) == made.answers
    assert outcomes(made.answers) == ["passed"] * 30, str(made)


def test_published_models(models):
    assert outcomes(selftest.sorting(str(models / "llm-viz-sort"))) == ["passed"] * 8
    assert outcomes(selftest.story(str(models / "stories260K"))) == ["passed"]


def test_another_models_activations_are_noticed(models, monkeypatch):  # negative control
    loaded = selftest.load_model

    def changed(place):
        model = loaded(place)
        with torch.no_grad():
            model.blocks[0].attn.q.weight.mul_(1.00001)
        return model

    monkeypatch.setattr(selftest, "load_model", changed)
    found = {
        a.known.split(",")[0]: a.outcome for a in selftest.sorting(str(models / "llm-viz-sort"))
    }
    assert found["q of layer 0"] == "failed"
    assert found["k of layer 0"] == "passed"


def test_another_text_is_noticed(models, monkeypatch):  # negative control
    monkeypatch.setattr(selftest, "_TEXT", selftest._TEXT.replace("red ball", "blue ball"))
    (answer,) = selftest.story(str(models / "stories260K"))
    assert answer.outcome == "failed"
    assert "then 'red ball" in answer.found


def test_handmade_heads():
    answers = list(known_heads.handmade_heads())
    assert outcomes(answers) == ["passed"] * len(known_heads.HEADS)


def test_a_head_that_does_something_else_is_noticed(monkeypatch):  # negative control
    monkeypatch.setitem(known_heads.HEADS, (0, 3), ("induction", "induction_mass"))
    assert [a.outcome for a in known_heads.handmade_heads() if a.known.startswith("0.3")] == [
        "failed"
    ]


def test_handmade_patterns_by_loops():
    """The pattern of the induction head is what its definition says, key by key, in plain transformers."""
    model = known_heads.handmade_model()
    model.set_attn_implementation("eager")
    tokens = [47, 5, 9, 2, 30, 5, 9, 2, 30]
    with torch.no_grad():
        first, second = model(torch.tensor([tokens]), output_attentions=True).attentions
    for query in range(1, len(tokens)):
        assert first[0, 0, query, query - 1] == pytest.approx(1, abs=1e-6)
        assert first[0, 2, query, 0] == pytest.approx(1, abs=1e-6)
        assert first[0, 3, query, : query + 1].tolist() == pytest.approx(
            [1 / (query + 1)] * (query + 1)
        )
        if tokens[query] in tokens[1:query]:
            place = tokens.index(tokens[query])
            assert first[0, 1, query, place] == pytest.approx(1, abs=1e-6)
            assert second[0, 0, query, place + 1] == pytest.approx(1, abs=1e-6)


def test_before_it_has_learned_no_induction_head_is_found():
    """A model that was trained for a few steps copies nothing, and fails each of the three answers."""
    answers = list(known_heads.trained_heads(steps=5))
    assert outcomes(answers) == ["failed"] * 6 + ["passed"]


def test_what_can_be_foreseen():
    tokens, foreseen = known_heads.repeated_spans(8, torch.Generator().manual_seed(0))
    for row, known in zip(tokens.tolist(), foreseen.tolist(), strict=True):
        for place, sure in enumerate(known):
            pair = any(row[p : p + 2] == row[place - 1 : place + 1] for p in range(place - 1))
            assert sure == (place > 1 and pair), (
                "the token before stood there already, before the same token"
            )


def test_nothing_is_there():
    assert outcomes(selftest.sorting(None)) == ["not tried"] * 2
    assert outcomes(selftest.story("./nowhere")) == ["not tried"]
    with pytest.raises(
        ModelError, match="there is no folder of models at nowhere; it should hold stories260K and"
    ):
        ma.selftest("nowhere")


def test_what_was_not_tried_has_not_passed():
    passed = compared("a | b", "x", 0.5, 1.0, "s")
    failed = compared("a", "x", float("nan"), 1.0, "s")
    untried = KnownAnswer("a", "x", "absent", "not tried", "s")
    assert (passed.outcome, failed.outcome) == ("passed", "failed")
    assert SelfTest((passed, untried)).passed
    assert not SelfTest((untried,)).passed
    assert not SelfTest((passed, failed)).passed
    table = str(SelfTest((passed, failed, untried)))
    assert table.endswith("1 passed, 1 failed, 1 not tried")
    assert "a \\| b" in table


@pytest.mark.parametrize(("outcome", "code"), [("passed", 0), ("failed", 1)])
def test_the_command(monkeypatch, outcome, code):
    made = SelfTest((KnownAnswer("a", "x", "y", outcome, "s"),))
    monkeypatch.setattr("mechattn.known_answers.selftest.selftest", lambda *_, **__: made)
    done = CliRunner().invoke(app, ["selftest"])
    assert done.exit_code == code
    assert "1 " + outcome in done.output
