"""The comparison table: the right cells, the right null, the right prompts; and what it refuses."""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from numpy.testing import assert_allclose
from scipy import stats

import mechattn as ma
from mechattn.errors import OptionError
from mechattn.results.result import Result
from mechattn.stats.paired import paired
from mechattn.stats.units import halves_of


def made_up(values, names=("baseline", "other"), prompts="a", compared="difference"):
    """A result with one quantity [prompt, condition, layer, head] and no tokens."""
    n, c, layers, heads = values.shape
    coords = {"condition": list(names), "layer": range(layers), "head": range(heads)}
    variable = (("prompt", "condition", "layer", "head"), values, {"compared": compared})
    data = xr.Dataset({"quantity": variable}, coords)
    origin = xr.Dataset(
        {"origin": (("prompt", "condition", "pos"), np.zeros((n, c, 2)))},
        {"condition": list(names)},
    )
    about = {"model": {"name": "m"}, "prompts": {"hash": prompts}}
    return Result({"analysis": data, "sequences": origin}, about)


def test_the_table_is_that_of_loops(result):
    table = result.compare("slash", quantity="scale", columns="all")
    dataset = result["affine_shift"].sel(segment="question")
    assert len(table) == 4 * 8
    assert (table.scale == "log-ratio").all()
    for row in table.itertuples():
        of_layer = dataset.sel(layer=row.layer, condition="slash").astype(float)
        ours = np.log(of_layer.scale.sel(head=row.head).values)
        null = np.log(of_layer.scale_uniform.values)
        got = row.difference, row.difference_low, row.difference_high
        interval = stats.ttest_1samp(ours, 0).confidence_interval()
        assert got == pytest.approx((ours.mean(), *interval), abs=1e-9)
        assert row.null == pytest.approx(null.mean(), abs=1e-9)
        beyond = ours - null
        got = row.beyond, row.beyond_low, row.beyond_high
        interval = stats.ttest_1samp(beyond, 0).confidence_interval()
        assert got == pytest.approx((beyond.mean(), *interval), abs=1e-9)
    assert table.attrs["null"] == "uniform attention"
    assert table.attrs["family"] == "32 tests: layer × head"
    assert_allclose(table.q_beyond, stats.false_discovery_control(table.p_beyond))


def test_the_change_is_the_ratio_of_geometric_means_less_one(result):
    """A fraction with its interval beside it, and that of the null; none for differences, which have no ratio."""
    table = result.compare("slash", columns="all")
    at = result["received_attention"].sel(segment="question", layer=2, head=5)
    received = at.received_by_segment.astype(float)
    ours, theirs = (received.sel(condition=name).values for name in ("slash", "baseline"))
    row = table.set_index(["layer", "head"]).loc[(2, 5)]
    assert row.change == pytest.approx(stats.gmean(ours) / stats.gmean(theirs) - 1)
    low, high = np.exp(stats.ttest_1samp(np.log(ours / theirs), 0).confidence_interval()) - 1
    assert (row.change_low, row.change_high) == (pytest.approx(low), pytest.approx(high))
    assert row.change_null == pytest.approx(np.exp(row.null) - 1)
    assert row.change != pytest.approx(row.difference, abs=1e-3), (
        "negative control: a log-ratio is another number"
    )
    plain = result.compare("slash", quantity="total_variation", columns="all")
    parts = ("", "_low", "_high", "_null", "_units")
    assert set(table) - set(plain) == {f"change{part}" for part in parts}


def test_one_null_for_all_heads_beside_one_for_each(slash_result):
    """Two results of which one was changed by hand: the null's difference is that of each head."""
    data = slash_result["received_attention"]
    factors = xr.DataArray(np.arange(1.0, 9), dims="head")
    changed = data.assign(received_by_segment_uniform=data.received_by_segment_uniform * factors)
    other = replace(slash_result, datasets=slash_result.datasets | {"received_attention": changed})
    got, expected = (
        slash_result.compare("slash", other=from_result, null="uniform", columns="all").null
        for from_result in (other, None)
    )
    assert_allclose(got, expected - np.tile(np.log(factors), 4), atol=1e-6)


def test_other_quantities_and_other_conditions(result):
    flow = result.compare("slash", quantity="flow", columns="all")
    assert set(flow.to_segment) == {"first", "template", "system", "question"}, (
        "the baseline has no inserted segment"
    )
    assert len(flow) == 32 * 4
    against = result.compare("slash", to="sentence", quantity="total_variation", columns="all")
    assert against.attrs["to"] == "sentence"
    opposite = result.compare("sentence", to="slash", quantity="total_variation", columns="all")
    assert_allclose(against.difference, -opposite.difference)
    plain = result.compare("slash", quantity="total_variation", columns="all")
    assert (plain.scale == "difference").all(), "0 in the baseline by definition"
    assert plain.null.abs().max() < 1e-6, "as uniform attention is only diluted"


def test_without_a_null_the_difference_is_tested(result):
    table = result.compare("slash", quantity="output_norm", columns="all")
    assert table.attrs["null"] == "no null is known; a change may be there by definition"
    assert table[["null", "beyond", "beyond_low", "beyond_high_simultaneous"]].isna().all(axis=None)
    selected = result.compare("slash", quantity="output_norm", select="half", top=2, by="beyond")
    assert selected.attrs["ranked_by"] == "difference"
    dataset = (
        result["affine_shift"].output_norm.sel(segment="question", layer=1, head=3).astype(float)
    )
    log = np.log(dataset.sel(condition="slash") / dataset.sel(condition="baseline")).values
    row = table.set_index(["layer", "head"]).loc[(1, 3)]
    assert row.effect_size == pytest.approx(log.mean() / log.std(ddof=1))
    assert row.p_flip == pytest.approx(paired(log[:, None], 0.0).p_flip[0])
    control = result.compare("slash", to="sentence", quantity="output_norm", columns="all")
    assert control.attrs["null"] == "no difference", (
        "as many tokens at the same place: nothing is there by definition"
    )
    assert_allclose(control.beyond, control.difference)
    masked = result.compare("masked", to="sentence", quantity="output_norm", columns="all")
    assert masked.attrs["null"].startswith("no null is known"), "one is masked, the other is not"


@dataclass(frozen=True)
class Sevens(ma.conditions.Insertion):
    count: int = 20
    place: str = "before_question"

    def filler(self, prompt, model, seed=0):
        return [7] * self.count


def test_equal_counts_at_one_place_have_a_null(toy, prompts):
    conditions = {
        "sevens": Sevens(),
        "slash": ma.MeaninglessTokens("/", 20),
        "more": Sevens(21),
    }
    result = ma.run(toy, prompts[:6], conditions, ma.analyses.AffineShift(), layers=0)

    def null(one, other):
        return result.compare(
            one, to=other, quantity="output_norm", matched=False, columns="all"
        ).attrs["null"]

    assert null("sevens", "slash") == null("slash", "sevens") == "no difference"
    assert null("more", "slash").startswith("no null is known"), "one token more"


def test_a_cell_without_a_ratio_is_left_out_and_named():
    values = np.exp(np.random.default_rng(0).normal(size=(8, 2, 2, 3)))
    values[3, 1, 1, 2] = 0
    result = made_up(values, compared="ratio")
    with pytest.warns(UserWarning, match=r"1 of 6 cells are left out \(layer 1 head 2\)"):
        table = result.compare("other", quantity="quantity", columns="all")
    assert (table.scale == "log-ratio").all()
    assert len(table) == 5
    assert table.attrs["left_out"] == ["layer 1 head 2"]
    assert table.attrs["family"] == "5 tests: layer × head"
    whole = result.compare("other", quantity="quantity", scale="difference", columns="all")
    expected = (values[:, 1] - values[:, 0]).mean(0).flatten()
    assert_allclose(whole.difference, expected)
    with pytest.raises(OptionError, match=r"has no ratio in any cell.*scale="):
        made_up(-values, compared="ratio").compare("other", quantity="quantity", columns="all")


def test_a_layer_without_values_is_left_out():
    values = np.random.default_rng(0).normal(size=(6, 2, 2, 3))
    values[:, :, 0] = np.nan
    with pytest.warns(UserWarning, match="3 of 6 cells are left out"):
        assert set(made_up(values).compare("other", quantity="quantity", columns="all").layer) == {
            1
        }
    values[2, 1, 1, 0] = np.nan
    with pytest.raises(
        OptionError,
        match=r"^1 of 6 prompts have no 'quantity' with 'other'; leave .* result.sel\(prompt=…\)$",
    ):
        made_up(values).compare("other", quantity="quantity", columns="all")


def test_the_columns_are_those_of_a_paper(slash_result):
    whole = slash_result.compare("slash", columns="all")
    table = slash_result.compare("slash")
    effect = ["change", "change_low", "change_high", "change_null"]
    assert list(table) == ["layer", "head", *effect, "q_beyond", "q_difference", "n"]
    pd.testing.assert_frame_equal(table, whole[list(table)])
    assert table.loc["L1H2"].change == whole.loc["L1H2"].change
    assert table.attrs == whole.attrs
    assert len(whole.columns) > 40

    points = slash_result.compare("slash", scale="difference", margin=0.01, segment=None)
    labels = ["layer", "head", "segment"]
    effect = ["difference", "difference_low", "difference_high", "null"]
    assert sorted(points) == sorted([*labels, *effect, "q_beyond", "q_difference", "n", "q_same"])
    with pytest.raises(OptionError, match="columns='few': choose one of 'main', 'all'"):
        slash_result.compare("slash", columns="few")


def test_select_half_reports_what_the_other_half_says():
    """Heads with an effect in the first half's prompts alone are chosen, and shown to have none."""
    generator = np.random.default_rng(0)
    values = generator.normal(size=(24, 2, 2, 16)) * 0.1
    values[:, 1, 0, 3] += 1.0
    values[halves_of(24)[0], 1, 1, 5] += 1.0
    result = made_up(values)
    table = result.compare("other", quantity="quantity", select="half", columns="all").set_index(
        ["layer", "head"]
    )
    assert {(0, 3), (1, 5)} <= set(table.index)
    assert len(table) < 6
    assert table.loc[(0, 3)].q_difference < 0.01
    assert table.loc[(1, 5)].q_difference > 0.01
    assert (table.n == 12).all()
    nothing = made_up(generator.normal(size=(24, 2, 2, 16)))
    assert nothing.compare("other", quantity="quantity", select="half").empty


def test_top_ranks_on_one_half_and_reports_the_other_once():
    """Three of 32 heads by a loop over both halves; those that no half would choose again are reported all the same."""
    generator = np.random.default_rng(0)
    values = generator.normal(size=(24, 2, 2, 16))
    values[:, 1, 1, 4] -= 3.0
    table = made_up(values).compare(
        "other", quantity="quantity", select="half", top=3, by="difference", columns="all"
    )
    d = (values[:, 1] - values[:, 0]).reshape(24, -1)
    first, other = halves_of(24)
    order = np.argsort(-abs(d[first].mean(0)))[:3]
    assert (16 * table.layer + table["head"]).tolist() == order.tolist()
    assert_allclose(table.difference, d[other].mean(0)[order])
    assert_allclose(table.q_difference, paired(d[other][:, order]).q)
    assert table.attrs["top"] == 3
    assert table.difference.iloc[0] < -1, "up to sign"
    dipped = np.argsort(-abs(d.mean(0)))[:3].tolist()
    assert order.tolist() != dipped, "negative control: all prompts would choose others"


def test_two_results_of_the_same_prompts():
    values = np.random.default_rng(0).normal(size=(6, 2, 1, 3))
    one = made_up(values)
    two = made_up(values + 1)
    table = two.compare("other", to="other", quantity="quantity", other=one, columns="all")
    assert_allclose(table.difference, 1)
    for other, message in (
        (made_up(values, prompts="b"), "different prompts"),
        (made_up(values[..., :2]), "different heads"),
    ):
        with pytest.raises(OptionError, match=message):
            two.compare("other", to="other", quantity="quantity", other=other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(condition="dash"), "no condition 'dash'.*'slash'"),
        (dict(condition="slash", quantity="weight"), "has 'weight'.*there are .*scale"),
        (
            dict(condition="long", segment="inserted"),
            r"^'baseline' inserts no tokens.* no 'received'.*result\.heads\(…",
        ),
        (
            dict(condition="slash", segment="answer"),
            "^12 of 12 prompts have no 'received' in the segment 'answer' with 'slash'; name a segment"
            " that all have",
        ),
        (dict(condition="slash", to="slash"), "'slash' is compared with itself"),
        (dict(condition="slash", to="long"), r"inserts 20 tokens, 'long' 25.*matched=False"),
        (dict(condition="slash", top=3), 'top=3: give select="half" too'),
        (
            dict(condition="slash", select="half", top=3, by="q"),
            "by='q': choose one of 'beyond', 'difference'",
        ),
        (dict(condition="slash", segment=["question"]), "segment=.'question'.: choose"),
        (dict(condition="slash", seed=-1), "seed=-1: give a whole number"),
        (dict(condition="slash", other="b.zarr"), "other='b.zarr': give a result"),
        (dict(condition="slash", margins=0.1), "a comparison has no option 'margins'"),
        (
            dict(condition="slash", null="random"),
            "null='random': choose one of 'dilution', 'uniform', 'blind'",
        ),
        (dict(condition="slash", null="blind"), "has no null=.blind.*ALiBi"),
    ],
)
def test_what_it_refuses(result, options, message):
    with pytest.raises(OptionError, match=message):
        result.compare(**options, columns="all")


def test_different_lengths_can_be_compared_on_purpose(result):
    assert len(result.compare("slash", to="long", matched=False, columns="all")) == 32
    with pytest.raises(OptionError, match="matched=False"):
        result.resolution("slash", to="long")
