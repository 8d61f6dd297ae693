"""`AttentionSpread` on toys against loops over queries and keys of plain transformers in float64."""

import numpy as np
import pytest

import mechattn as ma
from mechattn.axes import SEGMENTS
from tests.parity.plain import models, passed

SLASH = ma.MeaninglessTokens("/", 80)
BANDS, SHARES = 8, (0.5, 0.1, 0.01)


def by_loops(pattern, codes, segment, window):
    """Mass by band over the queries that see all of the band, and counts of keys, one query at a time."""
    queries = [q for q in range(len(codes)) if SEGMENTS[codes[q]] == segment]
    firsts = [0, *(2**n for n in range(BANDS - 1))]
    mass, near = np.full(BANDS, np.nan), np.zeros(len(SHARES))
    for n, first in enumerate(firsts):
        last = max(2 * first - 1, 0)
        seeing = [q for q in queries if q >= last and last < window]
        if seeing:
            mass[n] = np.mean(
                [sum(pattern[q, q - d] for d in range(first, last + 1)) for q in seeing]
            )
    for n, share in enumerate(SHARES):
        near[n] = np.mean(
            [sum(pattern[q, k] >= share * max(pattern[q]) for k in range(q + 1)) for q in queries]
        )
    return mass, near


@pytest.mark.parametrize("name", ["toy:llama", "toy:gemma3"])
def test_bands_and_keys_equal_loops(name, prompts, monkeypatch):
    plain, hooked = models(name)
    spread = ma.analyses.AttentionSpread(bands=BANDS, shares=SHARES)
    results = [
        ma.run(hooked, prompts[:1], {"slash": SLASH}, spread, engine=engine)
        for engine in ("streaming", "hooks")
    ]
    sequence = SLASH.apply(prompts[0], hooked)
    codes = sequence.segment.tolist()
    made = passed(plain, sequence.tokens.tolist(), monkeypatch)
    for layer in range(hooked.cfg.n_layers):
        window = 64 if name == "toy:gemma3" and layer % 3 != 2 else 10**9
        for segment in ("inserted", "question"):  # the question last: it sees all bands
            mass, near = by_loops(made.pattern[layer][1], codes, segment, window)
            for result in results:
                got = result["attention_spread"].sel(
                    condition="slash", layer=layer, head=1, segment=segment
                )
                np.testing.assert_allclose(got.band_mass.values[0], mass, atol=5e-6)
                np.testing.assert_allclose(
                    got.near_best.values[0], near, atol=0.11
                )  # a key on the bound may count
        assert np.isnan(mass).any() == (window == 64), (
            "no window of 64 places holds the band of 64 to 127"
        )
    other = (
        results[0]["attention_spread"]
        .sel(condition="slash", layer=1, head=2, segment="question")
        .band_mass
    )
    mine = (
        results[0]["attention_spread"]
        .sel(condition="slash", layer=1, head=1, segment="question")
        .band_mass
    )
    assert np.nanmax(abs(other.values - mine.values)) > 0.01, "another head would be noticed"


def test_a_comparison_takes_the_bands_that_all_prompts_reach(toy, prompts):
    result = ma.run(toy, prompts, {"slash": SLASH}, ma.analyses.AttentionSpread(bands=10))
    table = result.compare("slash", quantity="band_mass")
    shortest = min(len(ma.Baseline().apply(prompt, toy)) for prompt in prompts)
    assert 32 < shortest < 64
    assert sorted(set(table.band)) == [0, 1, 2, 4, 8, 16]
    assert len(table) == 4 * 8 * 6


def test_the_null_is_the_share_of_the_places(toy, prompts):
    """Under uniform attention a query at place q gives each band its size / (q + 1), and all keys are equally good."""
    result = ma.run(toy, prompts[:1], {"slash": SLASH}, ma.analyses.AttentionSpread(bands=6))
    sequence = SLASH.apply(prompts[0], toy)
    queries = sequence.of_segment("question").nonzero()[:, 0].tolist()
    null = result["attention_spread"].sel(condition="slash", segment="question", layer=0)
    for n, size in enumerate([1, 1, 2, 4, 8, 16]):
        expected = np.mean([size / (q + 1) for q in queries])
        assert float(null.band_mass_uniform[0, n]) == pytest.approx(expected, abs=1e-6)
    assert np.allclose(null.near_best_uniform.values, np.mean([q + 1 for q in queries]))
