"""Conditions in the provenance: data, told from words alone in results of older versions."""

import json
import shutil
from pathlib import Path

import pytest

import mechattn as ma
from mechattn.engine.describe import condition_data
from mechattn.results.canonical import identity
from mechattn.results.stored_conditions import from_words, stored_condition

SLASH = ma.MeaninglessTokens("/", 5)
CONDITIONS = {
    "slash": SLASH,
    "masked": SLASH.masked(),
    "both": SLASH.masked().unshifted(),
    "cut": SLASH.under(ma.interventions.Knockout("question", "inserted", layers=0)),
    "sentence": ma.RandomSentence(5, draw=2),
    "arm": ma.Baseline(intervention=ma.interventions.ARM(control="random_channels")),
    "two": ma.Baseline(intervention=(ma.interventions.ARM(), ma.interventions.HeadAblation(((0, 1),)))),
    "odd": ma.MeaninglessTokens("'(,\"= hides=True", 9),
}
SCHEMA_2 = Path(__file__).parent / "stored" / "schema-2.zip"


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
    acts = {"cut": ["Knockout"], "arm": ["ARM"], "two": ["ARM", "HeadAblation"]}.get(name, [])
    assert [act["kind"] for act in data["interventions"]] == acts


@pytest.mark.parametrize("name", CONDITIONS)
def test_the_words_of_an_older_result_give_the_same(name):
    data = condition_data(CONDITIONS[name])
    old = json.loads(json.dumps(from_words(data["written"])))
    assert {key: old[key] for key in data if key not in ("options", "interventions")} == {
        key: data[key] for key in data if key not in ("options", "interventions")
    }
    assert old["options"] == data["options"]
    assert [act["kind"] for act in old["interventions"]] == [act["kind"] for act in data["interventions"]]


@pytest.mark.parametrize("words", ["", "Own[source 12ab](count=3)", "x" * 5000, "(" * 500, "f()()", "Baseline", "1 +"])
def test_words_that_are_no_condition_of_ours(words):
    data = from_words(words)
    assert data["written"] == words
    assert data["kind"] in ("", "f")
    assert data["interventions"] == []


def test_a_condition_of_ones_own_is_told_from_ours():
    class MeaninglessTokens:
        def apply(self, prompt, model, seed=0):
            return SLASH.apply(prompt, model, seed)

    assert condition_data(MeaninglessTokens())["kind"].startswith("test_a_condition_of_ones_own")


def test_a_result_of_version_0_1_is_read_drawn_and_stored_again(tmp_path):
    shutil.unpack_archive(SCHEMA_2, tmp_path)
    result = ma.load_result(tmp_path / "stored-0.1.zarr")
    assert result.digest() == "b594609baae74a5e19ca34892e3dcab5"
    assert stored_condition(result, "slash").options["count"] == 3
    assert "with the matched control “sentence”" in ma.render.verdict_words(result, control="sentence")
    assert result.compare("slash", to="sentence", resamples=99).attrs["null"] == "uniform attention"
    result.save(tmp_path / "again.zarr")
    again = ma.load_result(tmp_path / "again.zarr")
    assert again.provenance == result.provenance
    assert json.loads((tmp_path / "again.zarr" / "zarr.json").read_text())["attributes"]["mechattn_schema"] == 3


def test_words_alone_are_refused_in_a_new_result(slash_result, tmp_path):  # negative control
    from dataclasses import replace

    about = slash_result.provenance | {"conditions": {"baseline": "Baseline()", "slash": "MeaninglessTokens()"}}
    with pytest.raises(ma.MechattnError, match=r"conditions\.baseline"):
        replace(slash_result, provenance=about).save(tmp_path / "r.zarr")
