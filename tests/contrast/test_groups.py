"""Groups of prompts from the prompt to every statistic: stored, merged, and taken as the unit."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose
from pandas.testing import assert_frame_equal

import mechattn as ma
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.question import first_token
from mechattn.errors import OptionError, PromptError
from mechattn.prompts.prompt import as_prompts
from mechattn.results.result import Result, part_of
from mechattn.stats.intervals import t_interval
from mechattn.stats.paired import paired
from tests.conftest import run_part

GROUPS = [f"template {i % 6}" for i in range(18)]
LAYERS = [0, 1]


@pytest.fixture(scope="module")
def prompts():
    made = ma.load_prompts("word-problems", limit=18)
    return [replace(prompt, group=group) for prompt, group in zip(made, GROUPS, strict=True)]


@pytest.fixture(scope="module")
def result(toy, prompts):
    conditions = {"slash": ma.MeaninglessTokens("/", 20), "dots": ma.MeaninglessTokens("?", 20)}
    activations = ma.analyses.MlpActivations("absolute", 0.01)
    analyses = [ma.ReceivedAttention(), ma.analyses.AttentionFocus(), activations]
    return ma.run(toy, prompts, conditions, analyses, layers=LAYERS, keep="prompts")


@pytest.fixture(scope="module")
def ungrouped(result):
    """As it was stored before there were groups."""
    return Result(
        dict(result.datasets) | {"sequences": result["sequences"].drop_vars("group")},
        result.provenance,
    )


def by_group(values):
    """Means of the rows of each group, by a loop."""
    return np.array([np.mean(values[group::6], axis=0) for group in range(6)])


def test_the_table_is_that_of_group_means(result):
    table = result.compare("slash", null="uniform", columns="all")
    assert set(table.n) == {6}
    assert table.attrs["unit"] == "groups (6 of 18 prompts)"
    names = ["received_by_segment", "received_by_segment_uniform"]
    at = result["received_attention"][names].sel(segment="question").astype(float)
    at = at.transpose("prompt", "condition", "layer", ...)
    ratio = np.log(at.sel(condition="slash") / at.sel(condition="baseline"))
    d = ratio.received_by_segment.values.reshape(18, -1)
    null = np.repeat(ratio.received_by_segment_uniform.values, 8, axis=1)
    expected = paired(by_group(d), by_group(null))
    fields = {"difference": "difference", "low": "difference_low", "null": "null"}
    fields |= {"beyond_low": "beyond_low", "effect_size": "effect_size", "q": "q_beyond"}
    for field, column in fields.items():
        expected_column = getattr(expected, field)
        assert_allclose(table[column], expected_column, rtol=1e-5, atol=1e-9)
    value = at.received_by_segment.sel(condition="slash").values.reshape(18, -1)
    assert_allclose(table.value, by_group(value).mean(0), rtol=1e-6)


def test_without_groups_and_with_unit_prompt_nothing_changes(result, ungrouped):
    by_prompt = result.compare("slash", unit="prompt", columns="all")
    without_groups = ungrouped.compare("slash", columns="all")
    assert by_prompt.attrs["unit"] == "prompts"
    assert set(by_prompt.n) == {18}
    assert_frame_equal(by_prompt, without_groups, check_exact=True)
    by_group = result.compare("slash", columns="all")
    assert not np.allclose(by_group.difference_low, by_prompt.difference_low), "negative control"
    verdict = result.verdict("slash", unit="prompt")
    assert repr(verdict) == repr(ungrouped.verdict("slash"))


def test_verdicts_heads_agreement_and_changes_are_of_groups(result):
    verdict = result.verdict("slash")
    assert "6 groups (6 of 18 prompts))" in repr(verdict)
    at = result["received_attention"].received_by_segment.sel(segment="question").astype(float)
    each = at.mean(["layer", "head"])
    ratio = np.log(each.sel(condition="slash") / each.sel(condition="baseline")).values
    expected = np.expm1(np.array(t_interval(by_group(ratio))))
    assert_allclose(verdict.change, expected)
    assert_allclose(Contrast(result, "slash").overall()[0], expected)
    heads = result.heads("entropy", top=None)
    focus = result["attention_focus"].entropy.sel(condition="baseline", segment="question")
    for row in heads.itertuples():
        values = focus.sel(layer=row.layer, head=row.head).values.astype(float)
        got = [row.entropy, row.low, row.high]
        assert_allclose(got, t_interval(by_group(values)), rtol=1e-9)
    part = part_of(result, "prompt", slice(8))
    received = part["received_attention"].received_per_prompt.sel(condition="slash", key=0).values
    attention = first_token(part, "slash").new_first_attention
    assert_allclose(attention, by_group(received).mean(), rtol=1e-6)
    assert not np.isclose(attention, received.mean()), "negative control"
    assert (heads.attrs["unit"], set(heads.n)) == ("groups (6 of 18 prompts)", {6})
    alike = result.agreement("slash", "dots")
    assert set(alike.n) == {6}
    assert set(result.agreement("slash", "dots", unit="prompt").n) == {18}


def test_halves_never_share_a_group(result, ungrouped):
    half = result.heads("entropy", select="half")
    assert set(half.n) == {3}
    with pytest.raises(
        OptionError, match="6 groups of 18 prompts; give prompts of at least 12 groups"
    ):
        result.compare("slash", select="half", columns="all")
    title = ma.render.received_attention(result, 0, top=2).layout.title.text
    assert "pointwise 95 % bands, which treat prompts as independent" in title
    figure = ma.render.received_by_model([ungrouped, result], 0, 0, ("slash", "dots"))
    assert "prompts as independent" in figure.layout.title.text.replace("<br>", " ")


def test_merged_parts_have_the_groups_of_the_whole(toy, prompts, result):
    conditions = {"slash": ma.MeaninglessTokens("/", 20)}
    parts = [
        run_part(toy, prompts[at], conditions, keep="prompts", layers=LAYERS, places=range(18)[at])
        for at in (slice(12, 18), slice(0, 5), slice(5, 12))
    ]
    whole = ma.merge_results(parts)
    assert whole["sequences"].group.values.tolist() == GROUPS
    got, expected = (
        each.compare("slash", columns="all")[["difference_low", "q_beyond"]]
        for each in (whole, result)
    )
    assert_allclose(got, expected, rtol=1e-4)
    bare = parts[1]["sequences"].drop_vars("group")
    without = Result(dict(parts[1].datasets) | {"sequences": bare}, parts[1].provenance)
    with pytest.raises(OptionError, match=r"sequences\.group is None in one"):
        ma.merge_results([parts[0], without])


def test_other_groups_in_the_other_result(result, ungrouped):
    with pytest.raises(OptionError, match=r'different groups in the two results.*unit="prompt"'):
        result.compare("slash", other=ungrouped, columns="all")
    assert set(result.compare("slash", other=ungrouped, unit="prompt", columns="all").n) == {18}
    with pytest.raises(OptionError, match="different groups in the two results"):
        Contrast(result, "slash", other=ungrouped).overall()


def test_a_quantity_without_numbers_for_heads_is_refused(result):
    with pytest.raises(OptionError, match=r"per head, but one for each layer$"):
        Contrast(result, "slash", quantity="gini").by_prompt("L1H2")
    with pytest.raises(OptionError, match=r"more than one number for each head \(bin\)"):
        Contrast(result, "slash", quantity="histogram").overall()


def test_a_prompt_without_a_group_is_its_own_unit():
    given = [
        ma.Prompt("One.", id="a", group="x"),
        ma.Prompt("Two.", id="b"),
        ma.Prompt("Three.", id="c", group="x"),
    ]
    assert [prompt.group for prompt in as_prompts(given)] == ["x", "prompt b alone", "x"]
    assert as_prompts(given[1:2]) == given[1:2], "where none has one, none gets one"


def test_groups_of_files_and_jobs(tmp_path):
    from mechattn.jobs.job import Job

    rows = [{"question": f"What is {i} + {i}?", "template": i % 2, "none": None} for i in range(4)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    ungrouped = ma.load_prompts(path)
    assert [prompt.group for prompt in ungrouped] == [None] * 4
    grouped = ma.load_prompts(path, group="template")
    assert [prompt.group for prompt in grouped] == ["0", "1", "0", "1"]
    with pytest.raises(PromptError, match=r"no field 'kind'; its fields are .*group=…"):
        ma.load_prompts(path, group="kind")
    with pytest.raises(PromptError, match="no group in field"):
        ma.load_prompts(path, group="none")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jobs = [Job("toy:llama", prompts) for prompts in (grouped, ungrouped)]
    assert jobs[0].fingerprint != jobs[1].fingerprint, "a chunk keeps its groups"
