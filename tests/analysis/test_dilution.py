"""The dilution null is that of slow loops over queries and keys in float64, from the patterns of both conditions."""

import numpy as np
import pytest

import mechattn as ma
from mechattn.axes import SEGMENTS
from mechattn.errors import OptionError
from mechattn.model.hooks import attention_window

PROMPTS = [
    ma.Prompt("Tom has 3 apples and gives 2 to Mia. How many?", system="Think.", id="a"),
    ma.Prompt("Add 2 and 5.", system="Think.", id="b"),
]
CONDITIONS = {
    "slash": ma.MeaninglessTokens("/", 20),
    "masked": ma.MeaninglessTokens("/", 20).masked(),
    "unshifted": ma.MeaninglessTokens("/", 7).unshifted(),
    "random": ma.MeaninglessTokens("/", 5, place="random"),
}
NAMES = ("received_by_segment", "mass_by_segment")


def diluted_row(pattern, baseline, origin, query):
    """``(1 − M[q]) A[q, k]`` by the keys of the baseline, as a loop."""
    inserted = sum(pattern[query, key] for key in range(query + 1) if origin[key] == -1)
    own = int(origin[query])
    return [(1 - inserted) * baseline[own, key] for key in range(own + 1)]


def slow_dilution(pattern, baseline, origin, segment_index, counted, window=None):
    """Both quantities by segment, from patterns [query, key] of one head; segments are those of the baseline's tokens.

    Received attention is averaged over the queries that see a key in the baseline, then over the keys.
    """
    pattern = pattern.astype(np.float64)
    baseline = baseline.astype(np.float64)
    keys = len(segment_index)
    rows = {int(origin[q]): diluted_row(pattern, baseline, origin, q) for q in counted}
    window = window or keys + 1
    received = np.full(len(SEGMENTS), np.nan)
    mass = np.full(len(SEGMENTS), np.nan)
    for segment in range(len(SEGMENTS)):
        members = [key for key in range(keys) if segment_index[key] == segment]
        if not members:
            continue
        by_key = []
        for key in members:
            seen = [row[key] for own, row in rows.items() if 0 < own - key < window]
            if seen:
                by_key.append(np.mean(seen))
        if by_key:
            received[segment] = np.mean(by_key)
        mass[segment] = np.mean(
            [sum(row[key] for key in members if key < len(row)) for row in rows.values()]
        )
    return received, mass


def parts_of(result, prompt, condition):
    """The patterns [layer, head, query, key] of a prompt, and the origin and segment of each position."""
    sequences = result["sequences"].isel(prompt=prompt).sel(condition=condition)
    length = int((sequences.origin > -2).sum())
    patterns = result["attention_map"].pattern.isel(prompt=prompt).sel(condition=condition)
    return (
        patterns.values[..., :length, :length],
        sequences.origin.values[:length],
        sequences.segment_index.values[:length],
    )


# Plain, with windows, with sinks.
@pytest.mark.parametrize(
    ("name", "queries"),
    [("toy:llama", "question"), ("Mistral", "original"), ("GPT-OSS", "original")],
)
def test_the_dilution_null_is_that_of_loops(name, queries, shared):
    model = shared(name)
    analyses = [ma.ReceivedAttention(queries), ma.analyses.AttentionMap()]
    result = ma.run(model, PROMPTS, CONDITIONS, analyses, layers=[0, 1])
    dataset = result["received_attention"]
    question = SEGMENTS.index("question")
    from_null = 0.0
    from_undiluted = 0.0
    for prompt in range(len(PROMPTS)):
        baseline, _, segments = parts_of(result, prompt, "baseline")
        for condition in CONDITIONS:
            patterns, origin, own_segments = parts_of(result, prompt, condition)
            counted = np.flatnonzero(origin >= 0)
            if queries == "question":
                counted = np.flatnonzero(own_segments == question)
            for layer, head in np.ndindex(2, 2):
                window = attention_window(model, layer)
                expected = slow_dilution(
                    patterns[layer, head], baseline[layer, head], origin, segments, counted, window
                )
                at = dict(prompt=prompt, layer=layer, head=head)
                measured = dataset.isel(at).sel(condition=condition)
                for quantity, values in zip(NAMES, expected, strict=True):
                    null = measured[f"{quantity}_dilution"].values
                    np.testing.assert_allclose(null, values, atol=2e-6, err_msg=quantity)
                    undiluted = dataset.isel(at).sel(condition="baseline")[quantity].values
                    from_null = max(from_null, abs(measured[quantity].values - null)[question])
                    from_undiluted = max(from_undiluted, abs(undiluted - null)[question])
    assert from_null > 1e-4, "the null is another number than what was measured"
    assert from_undiluted > 1e-3, "negative control: without M the loops would give another number"


def test_a_sequence_with_changed_tokens_has_no_dilution_null(shared):
    prompts = [
        ma.Prompt(
            "Tom has 3 apples. How many?", counterpart="Tom has 4 apples. How many?", id=str(i)
        )
        for i in range(3)
    ]
    conditions = {"other": ma.conditions.Counterpart(), "slash": ma.MeaninglessTokens("/", 5)}
    result = ma.run(shared("toy:llama"), prompts, conditions)
    null = result["received_attention"].received_by_segment_dilution.sel(segment="question")
    assert null.sel(condition="other").isnull().all()
    assert null.sel(condition="slash").notnull().all()
    assert result.compare("other").attrs["null"] == "uniform attention"
    assert result.compare("slash", null="dilution").attrs["null"].startswith("dilution")
    with pytest.raises(OptionError, match=r"has no null=.dilution. with .other..*change no token"):
        result.compare("other", null="dilution")


def test_where_inserted_queries_count_there_is_no_dilution_null(shared):
    result = ma.run(shared("toy:llama"), PROMPTS[1], CONDITIONS, ma.ReceivedAttention("all"))
    assert not [name for name in result["received_attention"] if name.endswith("_dilution")]
