"""`AffineShift` of grouped heads and windows against loops over queries of plain transformers in float64."""

from itertools import product

import numpy as np
import pytest

import mechattn as ma
from mechattn.axes import SEGMENTS
from tests.analysis.plain import SHORT, models, passed


def one_query(row, v, row_with, v_with, place, question):
    """The numbers of one query, from its rows of attention and the values, without and with inserted tokens."""
    is_inserted = np.ones(len(v_with), bool)
    is_inserted[place] = False
    out = row @ v
    out_with = row_with @ v_with
    scale = 1 - row_with[is_inserted].sum()
    shift = row_with[is_inserted] @ v_with[is_inserted]
    kept = row_with[place]
    parts = {
        "dilution": (scale - 1) * out,
        "shift": shift,
        "rerouting": (kept - scale * row) @ v,
        "new_values": kept @ (v_with[place] - v),
    }
    change = out_with - out
    np.testing.assert_allclose(sum(parts.values()), change, atol=1e-12)
    size = np.linalg.norm(out_with)
    numbers = {
        "scale": scale,
        "question_ratio": kept[question].sum() / row[question].sum(),
        "total_variation": abs(kept / scale - row).sum() / 2,
        "relative_error": np.linalg.norm(out_with - scale * out - shift) / size,
        "output_norm": size,
        "shift_norm": np.linalg.norm(shift),
        "shift_share": np.linalg.norm(shift) / size,
    }
    if scale < 1:
        for name, part in parts.items():
            numbers[f"change_by_{name}"] = part @ change / (change @ change)
    return numbers, shift


def oracle(plain, baseline, sequence, layer_head):
    """Means over the question's queries by layer and head, and singular values of the shifts after the insertion."""
    before = passed(plain, baseline.tokens.tolist())
    after = passed(plain, sequence.tokens.tolist())
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
                before.pattern[layer][head][query],
                before.v[layer][head],
                after.pattern[layer][head][at],
                after.v[layer][head],
                place,
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


def measured(result, layer, head, name):
    cell = result["affine_shift"][name].isel(prompt=0, condition=1, layer=layer, head=head)
    return float(cell.sel(segment="question") if "segment" in cell.dims else cell)


def test_affine_shift_equals_the_oracle(prompts):
    plain, hooked = models("toy:gemma3")
    slash = ma.MeaninglessTokens("/", 60)  # so that windows end within them
    some = [SHORT, prompts[0]]
    results = [
        ma.run(hooked, some, {"slash": slash}, ma.analyses.AffineShift(), engine=engine)
        for engine in ("streaming", "hooks")
    ]
    baseline = ma.Baseline().apply(SHORT, hooked)
    sequence = slash.apply(SHORT, hooked)
    cells = list(product(range(hooked.cfg.n_layers), (0, hooked.cfg.n_heads - 1)))
    for (layer, head), expected in oracle(plain, baseline, sequence, cells):
        for result in results:
            for quantity, number in expected.items():
                got = measured(result, layer, head, quantity)
                where = f"layer {layer}, head {head}, {quantity}"
                # Shares of a small change are small differences of large numbers.
                tolerance = 2e-4 if "change_by" in quantity else 2e-5
                assert got == pytest.approx(number, abs=tolerance), where
    assert len(sequence) > plain.config.sliding_window == 64


def test_the_oracle_would_notice_a_token_out_of_place():
    """Filler that is said to begin one token early gives other numbers."""
    plain, toy = models("toy:llama")
    slash = ma.MeaninglessTokens("/", 20)
    baseline = ma.Baseline().apply(SHORT, toy)
    sequence = slash.apply(SHORT, toy)
    right = dict(oracle(plain, baseline, sequence, [(1, 0)]))[1, 0]
    origin = sequence.origin.clone()
    first, *_, last = sequence.inserted.nonzero().flatten().tolist()
    origin[last] = origin[first - 1]
    origin[first - 1] = -1
    early = ma.conditions.TokenSequence(sequence.tokens, origin, sequence.segment)
    wrong = dict(oracle(plain, baseline, early, [(1, 0)]))[1, 0]
    assert abs(right["scale"] - wrong["scale"]) > 1e-3
