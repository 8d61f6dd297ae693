"""`AffineShift` on every toy against loops over queries of plain transformers in float64."""

import numpy as np
import pytest

import mechattn as ma
from mechattn.axes import SEGMENTS
from tests.parity.plain import MECHANISMS, models, passed
from tests.parity.test_every_toy import windows

PARTS = ("dilution", "shift", "rerouting", "new_values")


def one_query(a, a_with, v, v_with, place, query, place_of_query, question):
    """The numbers of one query, from rows of probabilities and values, key by key."""
    originals = range(len(place))
    inserted = [k for k in range(len(v_with)) if k not in set(place)]
    out = sum(a[query, k] * v[k] for k in originals)
    out_with = sum(a_with[place_of_query, k] * v_with[k] for k in range(len(v_with)))
    scale = 1 - sum(a_with[place_of_query, k] for k in inserted)
    shift = sum((a_with[place_of_query, k] * v_with[k] for k in inserted), np.zeros_like(out))
    kept = [a_with[place_of_query, place[k]] for k in originals]
    parts = {
        "dilution": (scale - 1) * out,
        "shift": shift,
        "rerouting": sum((kept[k] - scale * a[query, k]) * v[k] for k in originals),
        "new_values": sum(kept[k] * (v_with[place[k]] - v[k]) for k in originals),
    }
    change = out_with - out
    np.testing.assert_allclose(sum(parts.values()), change, atol=1e-12)
    missed = np.linalg.norm(out_with - scale * out - shift)
    made = {
        "scale": scale,
        "question_ratio": sum(kept[k] for k in question) / sum(a[query, k] for k in question),
        "total_variation": sum(abs(kept[k] / scale - a[query, k]) for k in originals) / 2,
        "relative_error": missed / np.linalg.norm(out_with),
        "output_norm": np.linalg.norm(out_with),
        "shift_norm": np.linalg.norm(shift),
        "shift_share": np.linalg.norm(shift) / np.linalg.norm(out_with),
    }
    if scale < 1:
        made |= {
            f"change_by_{name}": part @ change / (change @ change) for name, part in parts.items()
        }
    return made, shift


def oracle(plain, baseline, sequence, layer_head, monkeypatch):
    """Means over the question's queries by layer and head, and singular values of the shifts after the insertion."""
    before = passed(plain, baseline.tokens.tolist(), monkeypatch)
    after = passed(plain, sequence.tokens.tolist(), monkeypatch)
    place = [int((sequence.origin == k).nonzero()) for k in range(len(baseline))]
    first = int(sequence.inserted.nonzero()[0])
    question = baseline.of_segment("question").nonzero().flatten().tolist()
    for layer, head in layer_head:
        of_question = []
        shifts = []
        for query, at in enumerate(place):
            if at < first:
                continue
            numbers, shift = one_query(
                before.pattern[layer][head],
                after.pattern[layer][head],
                before.v[layer][head],
                after.v[layer][head],
                place,
                query,
                at,
                question,
            )
            shifts.append(shift)
            if sequence.segment[at] == SEGMENTS.index("question"):
                of_question.append(numbers)
        means = {
            name: np.mean([numbers[name] for numbers in of_question]) for name in of_question[0]
        }
        s = np.linalg.svd(np.array(shifts), compute_uv=False)
        p = s / s.sum()
        means["shift_rank_one_share"] = s[0] ** 2 / (s**2).sum()
        means["shift_effective_rank"] = np.exp(-(p * np.log(p + 1e-300)).sum())
        yield (layer, head), means


def measured(result, index, layer, head, name):
    cell = result["affine_shift"][name].isel(prompt=index, condition=1, layer=layer, head=head)
    return float(cell.sel(segment="question") if "segment" in cell.dims else cell)


@pytest.mark.parametrize("name", MECHANISMS)
def test_affine_shift_equals_the_oracle(name, prompts, monkeypatch):
    plain, hooked = models(name)
    slash = ma.MeaninglessTokens("/", 20)
    some = prompts[:3]
    index = min(range(3), key=lambda i: len(slash.apply(some[i], hooked)))
    results = [
        ma.run(hooked, some, {"slash": slash}, ma.analyses.AffineShift(), engine=engine)
        for engine in ("streaming", "hooks")
    ]
    baseline = ma.Baseline().apply(some[index], hooked)
    sequence = slash.apply(some[index], hooked)
    cells = [
        (layer, head)
        for layer in range(hooked.cfg.n_layers)
        for head in (0, hooked.cfg.n_heads - 1)
    ]
    for (layer, head), expected in oracle(plain, baseline, sequence, cells, monkeypatch):
        for result in results:
            for quantity, number in expected.items():
                got = measured(result, index, layer, head, quantity)
                where = f"{name}, layer {layer}, head {head}, {quantity}"
                # Shares of a small change are small differences of large numbers.
                tolerance = 2e-4 if "change_by" in quantity else 2e-5
                assert got == pytest.approx(number, abs=tolerance), where
    assert {w for w in windows(plain.config) if w < 10**9} == (
        {64} if name == "toy:gemma3" else set()
    )


def test_the_oracle_would_notice_a_token_out_of_place(prompts, monkeypatch):
    """Filler that is said to begin one token early gives other numbers."""
    plain, toy = models("toy:llama")
    slash = ma.MeaninglessTokens("/", 20)
    baseline = ma.Baseline().apply(prompts[0], toy)
    sequence = slash.apply(prompts[0], toy)
    right = dict(oracle(plain, baseline, sequence, [(1, 0)], monkeypatch))[1, 0]
    early = ma.conditions.TokenSequence(
        sequence.tokens, _one_early(sequence.origin), sequence.segment
    )
    wrong = dict(oracle(plain, baseline, early, [(1, 0)], monkeypatch))[1, 0]
    assert abs(right["scale"] - wrong["scale"]) > 1e-3
    assert abs(right["total_variation"] - wrong["total_variation"]) > 1e-3


def _one_early(origin):
    """The origin of a sequence whose inserted run is said to begin a token before it does."""
    moved = origin.clone()
    first = int((origin < 0).nonzero()[0])
    last = int((origin < 0).nonzero()[-1])
    moved[first - 1], moved[last] = -1, origin[first - 1]
    return moved
