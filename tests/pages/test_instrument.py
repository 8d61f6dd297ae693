"""What a page holds is what the result says: heads by compare and heads, positions by the dataset."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

import mechattn as ma
from mechattn.commands.stored_results import report
from mechattn.contrast.means import at_positions, dilution_at_positions
from mechattn.errors import OptionError
from mechattn.pages.first_screen import ShownModel
from mechattn.pages.page_data import (
    head_curves,
    head_patterns,
    head_quantities,
    head_texts,
    head_values,
    shown_model_data,
)
from mechattn.pages.sections import HeadChoice
from tests.pages.read import data_of, unpacked


@pytest.fixture(scope="module")
def focused(toy, prompts):
    """Quantities with either null and without one, of which some have no ratio; and two layers alone."""
    analyses = [ma.ReceivedAttention(), ma.analyses.AffineShift()]
    slash = {"slash": ma.MeaninglessTokens(count=10)}
    return ma.run(toy, prompts[:6], slash, analyses, layers=[1, 3])


def square(table, column, layers):
    made = np.full((len(layers), 8), np.nan)
    made[[layers.index(layer) for layer in table["layer"]], table["head"]] = table[column]
    return made


def held_square(array):
    """Of [layer, head], also where nothing is held."""
    return np.full((2, 8), np.nan) if array is None else unpacked(array)


def ends(middle, half, low, high):
    middle, half = held_square(middle), held_square(half)
    scale = np.nanmax(np.abs(middle), initial=1e-9)
    assert_allclose(middle - half, low, rtol=1e-5, atol=1e-6 * scale)
    assert_allclose(middle + half, high, rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize("layers", [[1, 3], [3, 1]])
@pytest.mark.filterwarnings("ignore:.*left out")
def test_each_quantity_is_what_compare_and_heads_give(focused, layers):
    focused = focused.sel(layer=layers)
    names = head_quantities(focused)
    assert names[0] == "received"
    compared = set()
    for name in names:
        held = head_values(focused, name, layers, 8)
        for condition, found in held["values"].items():
            table = focused.heads(name, None, condition=condition)
            for column, of in {"mean": name, "null": "uniform"}.items():
                assert_allclose(held_square(found[column]), square(table, of, layers), rtol=1e-6)
            ends(
                found["mean"],
                found["half"],
                square(table, "low", layers),
                square(table, "high", layers),
            )
        for condition, found in held["changes"].items():
            table = focused.compare(condition, quantity=name, columns="all")
            nulls = {"received": "dilution", "mass": "dilution"}
            assert found["null_name"] == nulls.get(name, "uniform attention")
            effect, margin = ("change", 0.05) if "change" in table else ("difference", 0.005)
            table["marked"] = ((table[effect].abs() > margin) & (table.q_difference < 0.05)).astype(
                float
            )
            assert found["margin"] == margin
            for column in ("difference", "null", "beyond", "q_difference", "q_beyond", "marked"):
                assert_allclose(
                    held_square(found[column]), square(table, column, layers), rtol=1e-6
                )
            for middle, of in (("difference", ""), ("beyond", "beyond_")):
                low, high = (square(table, f"{middle}_{end}", layers) for end in ("low", "high"))
                ends(found[middle], found[f"{of}half"], low, high)
            assert found["known"] == bool(table.null.notna().any())
            compared.add((found["null_name"], found["known"], margin))
        assert held["values"] or held["missing"]

    assert len(compared) == 5, "each null and none, as a ratio and as a difference"


def test_what_cannot_be_compared_says_why(toy, prompts):
    result = ma.run(toy, prompts[:2], {"slash": ma.MeaninglessTokens()})
    model = shown_model_data(ShownModel(result))
    assert model["quantities"] == []
    assert model["without_values"]["received"].startswith("there are 2 prompts; give at least 3")


def test_curves_are_those_of_the_figure(slash_result):
    """The mean, its band and its null as ``render.received_attention`` draws them."""
    held = head_curves(slash_result)
    data = slash_result["received_attention"]
    prompts = np.arange(data.sizes["prompt"])
    layer = 2
    head = 5
    cell = {"condition": "slash", "layer": layer, "head": head}
    found = at_positions(data, "received_by_origin", cell, prompts)
    mean = unpacked(held["mean"])[1, layer, head]
    half = unpacked(held["relative_half_width"])[1, layer, head]
    assert np.flatnonzero(np.isfinite(mean)).tolist() == found.positions.tolist()
    mean = mean[found.positions]
    half = half[found.positions]
    assert_allclose(mean, found.mean, rtol=1e-6)
    assert_allclose(mean * (1 + half), found.high, rtol=1e-6)
    assert_allclose(mean * (1 - half), found.low, rtol=1e-5, atol=1e-8)
    assert unpacked(held["n"])[1, layer, found.positions].tolist() == found.n.tolist()
    null = unpacked(held["null"])[1, layer]
    expected = data.received_uniform_by_origin.sel(condition="slash", layer=layer).values
    assert_allclose(null, expected[: len(null)], rtol=1e-6)

    dilution = dilution_at_positions(
        slash_result, "received_by_origin", "slash", layer, head, prompts
    )
    shares = unpacked(held["shares"]["slash"])[layer, head]
    baseline = unpacked(held["mean"])[0, layer, head]
    drawn = np.isfinite(baseline)
    assert_allclose((baseline * shares)[drawn], dilution[: len(shares)][drawn], rtol=1e-5)
    assert (shares[drawn] < 0.99).any(), "negative control"


def test_what_is_inserted_has_numbers_of_its_own(slash_result):
    held = head_curves(slash_result)["inserted"]["slash"]
    where = np.flatnonzero(slash_result["sequences"].origin.sel(condition="slash").values[0] == -1)
    assert (held["start"], held["count"]) == (where[0], 55)
    data = slash_result["received_attention"].sel(condition="slash").isel(key=where)
    assert_allclose(unpacked(held["mean"]), data.received.values, rtol=1e-6)
    assert_allclose(unpacked(held["null"]), data.received_uniform.values, rtol=1e-6)


def test_tokens_at_other_places_in_each_prompt_have_none(toy, prompts):
    result = ma.run(toy, prompts[:4], {"random": ma.MeaninglessTokens(count=5, place="random")})
    assert head_curves(result)["inserted"] == {"random": None}


def test_where_the_question_starts(slash_result):
    codes = slash_result["sequences"].segment_index.sel(condition="baseline").values
    held = head_curves(slash_result)
    assert {row.tolist().index(4) for row in codes} == {held["question"]}
    name, first, last = held["segments"][-1]
    assert (name, first) == ("question", held["question"])
    assert last == held["mean"]["shape"][-1] - 1


def test_the_text_of_the_first_prompt(slash_result, toy, prompts):
    held = head_texts(slash_result)
    tokens = held["tokens"]["slash"]
    assert sum(segment == "inserted" for _, segment in tokens) == 55
    expected = (
        slash_result["received_attention"].received_per_prompt.sel(condition="slash").values[0]
    )
    assert_allclose(unpacked(held["received"]["slash"]), expected[..., : len(tokens)], rtol=1e-6)
    assert (
        "keep="
        in head_texts(ma.run(toy, prompts[:3], {"slash": ma.MeaninglessTokens()}))["missing"]
    )


def test_patterns_are_lower_triangles(toy, monkeypatch):
    result = ma.run(
        toy, ["Tom has 3 apples.", "Ann has 2 pears."], {}, [ma.analyses.AttentionMap()]
    )
    baseline = head_patterns(result)["prompts"][1]["baseline"]
    n = len(baseline["tokens"])
    square = result["attention_map"].pattern.values[1, 0, :, :, :n, :n]
    queries, keys = np.tril_indices(n)
    expected = square[..., queries, keys]
    assert_allclose(unpacked(baseline["rows"]) / 65535, expected, atol=8e-6)
    monkeypatch.setattr("mechattn.pages.page_data.MOST_PATTERN_NUMBERS", 10)
    assert "too large for a page" in head_patterns(result)["missing"]


def test_what_is_shown_first_is_what_was_asked_for(slash_result, tmp_path):
    named = slash_result.page(tmp_path / "named.html", heads=["L2H5", 1])
    assert data_of(named)["models"][0]["start"] == [2, 5]
    assert HeadChoice(heads=5).named_head(slash_result.sel(layer=[3])) == (3, 5)
    assert HeadChoice(1, ["L1H2"]).named_head(slash_result) == (1, 2)
    with pytest.raises(OptionError, match="heads holds 'abc'"):
        HeadChoice(heads=["abc"]).named_head(slash_result)
    slash_result.save(tmp_path / "r.zarr")
    report([tmp_path / "r.zarr"], tmp_path / "report.html", layer=3)
    assert data_of(tmp_path / "report.html")["models"][0]["start"] is None
