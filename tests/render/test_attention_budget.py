"""The figure of the attention budget: every number in its traces is that of a loop over prompts, in float64."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose

import mechattn as ma
from mechattn.contrast.budget_table import PAYERS, budget_table, busiest_layer
from mechattn.pages.sections import drawn_section
from mechattn.render.budget_figures import page_table
from tests.render.by_hand import t_interval

CAUSES = ("distance", "mass", "hidden states")


@pytest.fixture(scope="module")
def result(measured):
    few = measured["sequences"].prompt.values[:5]
    return measured.sel(condition=["baseline", "slash", "sentence"], prompt=few)


def interval_by_loop(values):
    """The mean over prompts and its t interval, in points of 100, from [prompt, head or layer and head]."""
    return 100 * t_interval([prompt.mean() for prompt in np.asarray(values, dtype=np.float64)])


def traces(figure, name, kind):
    return [trace for trace in figure.data if trace.name == name and trace.type == kind]


def test_the_stacks_are_the_means_of_each_layer(result):
    figure = ma.render.attention_budget(result)
    attention = result["attention_budget"].attention
    stacks = traces(figure, "system text", "bar")
    assert len(stacks) == 3
    for condition, stack in zip(result.conditions, stacks, strict=True):
        for number, layer in enumerate(attention.layer.values):
            cell = attention.sel(condition=condition, layer=layer, segment="system")
            expected = interval_by_loop(cell)
            drawn = [stack.y[number], *stack.customdata[number]]
            assert_allclose(drawn, expected, rtol=1e-6, atol=1e-8)

    other = interval_by_loop(attention.sel(condition="slash", layer=0, segment="template"))
    assert abs(other[0] - stacks[1].y[0]) > 0.1, "the loop would notice another segment"


def test_causes_and_their_sum_are_those_of_the_loop(result):
    figure = ma.render.attention_budget(result, ["slash"])
    question = result["attention_budget"].sel(condition="slash", segment="question")
    layers = question.layer.values
    for cause, words in zip(CAUSES, ("distance", "attention taken", "hidden states"), strict=True):
        (bars,) = traces(figure, words, "bar")
        by_cause = question.by_cause.sel(cause=cause)
        expected = [interval_by_loop(by_cause.sel(layer=layer))[0] for layer in layers]
        assert_allclose(bars.y, expected, rtol=1e-6, atol=1e-8)

    (total,) = traces(figure, "all causes", "scatter")
    intervals = [interval_by_loop(question.change.sel(layer=layer)) for layer in layers]
    middle, low, high = np.transpose(intervals)
    assert_allclose(total.y, middle, rtol=1e-6, atol=1e-8)
    # A spread over prompts keeps fewer digits of float32 than their mean does.
    assert_allclose(total.error_y.array, high - middle, rtol=1e-5)
    assert_allclose(total.error_y.arrayminus, middle - low, rtol=1e-5)
    (marks,) = traces(figure, "slash", "scatter")
    assert_allclose(marks.x, budget_table(result, "slash").change)


def test_a_prompt_without_a_segment_pays_it_nothing(toy):
    """The pattern of the hooked model over two prompts, of which one has no system text."""
    question = "Tom has 3 apples. How many are left?"
    prompts = [ma.Prompt(question, system="Solve it.", id="a"), ma.Prompt(question, id="b")]
    slash = ma.MeaninglessTokens("/", 5)
    result = ma.run(toy, prompts, {"slash": slash}, ma.analyses.AttentionBudget())

    to_system = []
    for prompt in prompts:
        sequence = slash.apply(prompt, toy)
        queries = sequence.of_segment("question")
        keys = sequence.of_segment("system")
        _, cache = toy.run_with_cache(sequence.tokens[None])
        patterns = [cache["pattern", layer][0].double() for layer in range(toy.cfg.n_layers)]
        to_system.append([pattern[:, queries][:, :, keys].sum(-1).mean() for pattern in patterns])
    expected = 100 * np.mean(to_system, axis=0)  # of each layer; the second prompt's are 0

    figure = ma.render.attention_budget(result)
    stacks = [trace for trace in figure.data if trace.legendgroup in PAYERS]
    total = np.sum([stack.y for stack in stacks if stack.xaxis == "x2"], axis=0)
    assert_allclose(total, 100, atol=1e-3)
    system = traces(figure, "system text", "bar")[1]
    assert_allclose(system.y, expected, atol=1e-3)
    table = budget_table(result, "slash").set_index("payer")
    assert table.value["system"] == pytest.approx(expected.mean(), abs=1e-3)
    assert_allclose(table.value.sum(), 100, atol=1e-3)


@pytest.mark.parametrize("layer", [None, 2])
def test_the_tidy_table_has_a_row_a_payer_and_cause(result, layer):
    table = result.attention_budget("sentence", layer)
    assert list(table) == ["payer", "cause", "change", "change_low", "change_high"]
    dataset = result["attention_budget"].sel(condition="sentence")
    if layer is not None:
        dataset = dataset.sel(layer=layer)
    payers = list(table.payer.unique())
    assert payers == [name for name in PAYERS if name in payers]
    for row in table.itertuples():
        values = dataset.change
        if row.cause != "all":
            values = dataset.by_cause.sel(cause=row.cause)
        expected = interval_by_loop(values.sel(segment=row.payer))
        got = [row.change, row.change_low, row.change_high]
        assert_allclose(got, expected, rtol=1e-5, atol=1e-8)

    other = result.attention_budget("slash", layer)
    assert abs(other.change - table.change).max() > 0.1, "the loop would notice another condition"
    assert table.attrs["units"] == "points of 100"


def test_a_page_has_the_budget_as_a_table(result):
    words = page_table(result, ["slash"])
    assert words.columns[:2] == ["condition", "payer"]
    table = budget_table(result, "slash")
    assert all(len(row) == len(words.columns) for row in words.rows)
    change = f"{table.change[0]:+.1f} [{table.change_low[0]:+.1f}, {table.change_high[0]:+.1f}]"
    column = words.columns.index("change (points of 100)")
    assert words.rows[0][column] == change.replace("-", "−")
    drawn = drawn_section(ma.render.attention_budget, result, {"conditions": ["slash"]})
    assert drawn.table == words


def test_the_sentence_has_the_numbers_of_the_table(result):
    words = ma.render.attention_budget(result, ["slash"]).layout.meta["says"]
    table = budget_table(result, "slash").set_index("payer")
    layer = busiest_layer(result, "slash")
    most = budget_table(result, "slash", layer).set_index("payer").value["inserted"]
    taken = table.value["inserted"]
    assert f"the inserted tokens take {taken:.1f} [" in words
    assert f"({most:.1f} in layer {layer}, where attention moves most)" in words
    system = f"{table.change['system']:+.1f}".replace("-", "−")
    assert f"system text {system} [" in words


def test_one_cause_where_positions_cannot_be_moved(result):
    dataset = result["attention_budget"].copy(deep=True)
    dataset.by_cause.loc[{"cause": "distance"}] = np.nan
    dataset.attrs["one_cause"] = "positions are learned"
    changed = replace(result, datasets=dict(result.datasets) | {"attention_budget": dataset})
    figure = ma.render.attention_budget(changed, ["slash"])
    assert not traces(figure, "distance", "bar")
    assert traces(figure, "distance and hidden states", "bar")
    assert "since positions are learned" in figure.layout.title.text.replace("<br>", " ")
    dataset.by_cause[:] = np.nan
    words = ma.render.attention_budget(changed, ["slash"]).layout.meta["says"]
    assert words.endswith("points."), "its own change is said without causes too"


def test_two_prompts_have_no_intervals(result):
    few = result.sel(prompt=result["sequences"].prompt.values[:2])
    words = ma.render.attention_budget(few, ["slash"]).layout.meta["says"]
    assert "nan" not in words
    assert "[" not in words
