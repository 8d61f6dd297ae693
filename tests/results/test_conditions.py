"""Conditions in the provenance are data."""

import json

import pytest

import mechattn as ma
from mechattn.engine.description import condition_data
from mechattn.results.provenance import identity

SLASH = ma.MeaninglessTokens("/", 5)
CONDITIONS = {
    "slash": SLASH,
    "masked": SLASH.masked(),
    "both": SLASH.masked().unshifted(),
    "cut": SLASH.under(ma.interventions.AttentionKnockout("question", "inserted", layers=0)),
    "sentence": ma.RandomSentence(5, draw=2),
    "arm": ma.Baseline(intervention=ma.interventions.ARM(control="random_channels")),
    "two": ma.Baseline(
        intervention=(ma.interventions.ARM(), ma.interventions.HeadAblation(((0, 1),)))
    ),
    "odd": ma.MeaninglessTokens("'(,\"= hides=True", 9),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_the_data_are_those_of_the_condition(name):
    condition = CONDITIONS[name]
    data = condition_data(condition)
    assert json.loads(json.dumps(data)) == data
    assert data["written"] == identity(condition)
    inner = getattr(condition, "condition", condition)
    assert data["kind"] == type(inner).__name__
    for option, value in data["options"].items():
        assert getattr(inner, option) == value
    assert (data["masked"], data["unshifted"]) == (name in ("masked", "both"), name == "both")
    acts = {"cut": ["AttentionKnockout"], "arm": ["ARM"], "two": ["ARM", "HeadAblation"]}.get(
        name, []
    )
    assert [act["kind"] for act in data["interventions"]] == acts


def test_a_condition_of_ones_own_is_told_from_ours():
    class MeaninglessTokens:
        def apply(self, prompt, model, seed=0):
            return SLASH.apply(prompt, model, seed)

    assert condition_data(MeaninglessTokens())["kind"].startswith("test_a_condition_of_ones_own")


def test_interventions_of_ones_own_condition_are_recorded_under_another(toy, prompts):
    class Own(ma.MeaninglessTokens):
        apply = CONDITIONS["two"].apply

    condition = Own().under(CONDITIONS["arm"].intervention)
    data = condition_data(condition, condition.apply(prompts[0], toy))
    assert [act["kind"] for act in data["interventions"]] == ["ARM", "HeadAblation", "ARM"]


def test_words_alone_are_refused_in_a_new_result(slash_result, tmp_path):  # negative control
    from dataclasses import replace

    about = slash_result.provenance | {
        "conditions": {"baseline": "Baseline()", "slash": "MeaninglessTokens()"}
    }
    with pytest.raises(ma.MechattnError, match=r"conditions\.baseline"):
        replace(slash_result, provenance=about).save(tmp_path / "r.zarr")
