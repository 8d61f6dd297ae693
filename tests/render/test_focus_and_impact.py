"""What heads write by their attention to the first token: the table against loops in float64, and its figure."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

import mechattn as ma
from mechattn.axes import SEGMENTS
from mechattn.contrast.focus_and_impact import (
    BIN_EDGES,
    focus_and_impact,
    layer_groups,
)
from mechattn.errors import OptionError
from tests.render.by_hand import t_interval

ANALYSES = [
    ma.analyses.AttentionFocus(per_query=True),
    ma.analyses.HeadUpdates(per_query=True),
]


@pytest.fixture(scope="module")
def result(measured):
    few = measured["sequences"].prompt.values[:4]
    return measured.sel(condition=["baseline", "slash"], prompt=few)


def impacts_by_loops(result, condition, segment, layers):
    """(prompt, attention to the first token, update over the mean of its layer), one for each head and query."""
    axes = ("prompt", "layer", "head", "key")
    focus = result["attention_focus"].first_mass_at_per_prompt.sel(condition=condition)
    sizes = result["head_updates"].magnitude_at_per_prompt.sel(condition=condition)
    texts = result["sequences"].segment_index.sel(condition=condition)
    rows = []
    for prompt, codes in enumerate(texts.values):
        is_counted = codes == SEGMENTS.index(segment)
        for layer in layers:
            mass, size = (
                values.transpose(*axes)[prompt].sel(layer=layer).values[:, is_counted].ravel()
                for values in (focus, sizes)
            )
            known = [pair for pair in zip(mass, size, strict=True) if not np.isnan(pair[0])]
            mean = sum(update for _, update in known) / len(known)
            rows += [(prompt, float(share), update / mean) for share, update in known]
    return rows


@pytest.mark.parametrize(
    ("condition", "segment"), [("baseline", "question"), ("slash", "inserted")]
)
def test_the_table_equals_loops(result, condition, segment):
    table = focus_and_impact(result, condition, segment)
    layers = result["head_updates"].layer.values.tolist()
    assert table.layers.unique().tolist() == [words for words, _ in layer_groups(layers)]
    for words, group in layer_groups(layers):
        rows = impacts_by_loops(result, condition, segment, group)
        of_group = table[table.layers == words]
        assert of_group.queries.sum() == len(rows)
        for row in of_group.itertuples():
            inside = [
                (prompt, impact)
                for prompt, share, impact in rows
                if row.above < share <= row.up_to or (row.above == 0 and share == 0)
            ]
            assert row.queries == len(inside)
            assert row.share == pytest.approx(len(inside) / len(rows))
            if not inside:
                assert np.isnan(row.mean)
                continue
            impacts = pd.DataFrame(inside).set_index(0)[1]
            assert row.median == pytest.approx(np.median(impacts), rel=1e-6)
            assert row.quartile_low == pytest.approx(np.percentile(impacts, 25), rel=1e-6)
            by_prompt = impacts.groupby(level=0).mean()
            assert row.mean == pytest.approx(by_prompt.mean(), rel=1e-6)


def test_the_loops_would_notice_another_heads_updates(result):
    updates = result["head_updates"]
    other = updates.assign(
        magnitude_at_per_prompt=updates.magnitude_at_per_prompt.roll(head=1, roll_coords=False)
    )
    changed = replace(result, datasets={**result.datasets, "head_updates": other})
    mine = focus_and_impact(result)
    theirs = focus_and_impact(changed)
    assert (mine.queries == theirs.queries).all()
    assert abs(mine["median"] - theirs["median"]).max() > 0.05


def test_an_interval_is_over_groups_where_prompts_have_them(toy, prompts):
    grouped = [replace(prompt, group=f"g{index % 3}") for index, prompt in enumerate(prompts[:6])]
    result = ma.run(toy, grouped, analyses=ANALYSES, keep="prompts")
    table = focus_and_impact(result)
    layers = result["head_updates"].layer.values.tolist()
    rows = impacts_by_loops(result, "baseline", "question", layers)

    # The bin that most queries are in has some of each prompt.
    row = table.loc[table.queries.idxmax()]
    impacts = {number: [] for number in range(6)}
    for prompt, share, impact in rows:
        if row.above < share <= row.up_to:
            impacts[prompt].append(impact)
    of_prompts = np.array([np.mean(impacts[number]) for number in range(6)])
    of_groups = (of_prompts[:3] + of_prompts[3:]) / 2

    assert_allclose([row.low, row.high], t_interval(of_groups)[1:], rtol=1e-6)
    assert not np.allclose([row.low, row.high], t_interval(of_prompts)[1:], rtol=1e-3)


def test_groups_of_layers():
    groups = layer_groups(list(range(9)))
    assert [words for words, _ in groups] == ["layers 0 to 3", "layers 4 to 6", "layers 7 to 8"]
    assert layer_groups([7]) == [("layer 7", [7])]


def test_the_figure_shows_the_table(result):
    figure = ma.render.focus_and_impact(result)
    table = focus_and_impact(result)
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert_allclose(np.concatenate([bar.y for bar in bars]), 100 * table.share)
    points = [trace for trace in figure.data if trace.name == "mean"]
    expected = table["mean"][table.queries > 0]
    assert_allclose(np.concatenate([trace.y for trace in points]), expected)
    assert len(bars[0].x) == len(BIN_EDGES) - 1
    words = ma.render.caption(figure)
    assert "attention that question queries give to the first token" in words
    assert "No impact would be 0" in words


def test_what_is_missing_is_said(toy, prompts, result):
    without = ma.run(toy, prompts[:1], analyses=ANALYSES)
    for call, message in (
        (lambda: ma.render.focus_and_impact(without), 'keep="prompts"'),
        (lambda: ma.render.focus_and_impact(result, segment="inserted"), "no prompt has tokens"),
    ):
        with pytest.raises(OptionError, match=message):
            call()
