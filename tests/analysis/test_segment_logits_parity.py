"""`SegmentLogits` against plain transformers in float64, key by key, and its sum against `DirectLogits`."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import mechattn as ma
from mechattn.axes import SEGMENTS
from mechattn.errors import ModelError
from tests.analysis.plain import SHORT, models, passed, read

SLASH = ma.MeaninglessTokens("/", 20)
LOGITS = [ma.analyses.SegmentLogits(), ma.analyses.DirectLogits()]


@pytest.mark.filterwarnings("ignore:.*(empty slice|invalid value|divide)")
def test_each_head_reads_key_by_key():
    plain, hooked = models("toy:falcon")
    result = ma.run(hooked, SHORT, {"slash": SLASH}, ma.analyses.SegmentLogits(), keep="prompts")
    got = result["segment_logits"].sel(condition="slash").isel(prompt=0)
    sequence = SLASH.apply(SHORT, hooked)
    ids = sequence.tokens.tolist()
    codes = sequence.segment.numpy()
    of_segment = (codes[:, None] == np.arange(len(SEGMENTS))).astype(float)  # key segment
    made = passed(plain, ids)
    for layer, head in ((0, 1), (2, 3)):
        written = made.v[layer][head] @ made.w_o[layer][head]
        delta = made.pattern[layer][head][..., None] * written  # query key d_model
        by_key = read(plain, delta, made.resid[-1], ids)
        by_segment = by_key @ of_segment  # query, key segment
        visible = np.tril(np.ones_like(by_key)) @ of_segment
        of_head = got.sel(layer=layer, head=head)
        for code, segment in enumerate(SEGMENTS):
            read_from = by_segment[codes[:-1] == code]
            seen = visible[codes[:-1] == code]
            per_key = np.where(seen > 0, read_from / seen, np.nan)
            whole = np.where((seen > 0).any(0), read_from.mean(0), np.nan)
            mine = of_head.sel(segment=segment)
            for name, expected in (("from", whole), ("per_key", np.nanmean(per_key, 0))):
                values = mine[f"next_token_logit_{name}"].sel(to_segment=list(SEGMENTS)).values
                assert_allclose(values, expected, atol=2e-4, rtol=1e-3)
    to_inserted = got.next_token_logit_from.sel(layer=2, segment="question", to_segment="inserted")
    difference = float(to_inserted.sel(head=3) - to_inserted.sel(head=2))
    assert abs(difference) > 1e-3, "the loops would notice another head"


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("toy:gemma3", "streaming"),
        ("GPT-2", "hooks"),
        ("DeepSeek-V3 (latent attention)", "streaming"),
        ("DeepSeek-V3 (latent attention)", "hooks"),
    ],
)
def test_over_all_segments_it_is_the_direct_logit(name, engine, prompts, shared):
    """With norms after attention, biases, grouped heads, windows and latent attention."""
    conditions = {"slash": SLASH}
    if engine == "streaming":
        conditions["masked"] = SLASH.masked()
    some = [SHORT, prompts[0]]
    result = ma.run(shared(name), some, conditions, LOGITS, keep="prompts", engine=engine)
    read_from = result["segment_logits"].next_token_logit_from
    summed = read_from.sum("to_segment", skipna=True)
    whole = result["direct_logits"].next_token_logit
    for condition in ("baseline", *conditions):
        got, expected = (each.sel(condition=condition).values for each in (summed, whole))
        there = ~np.isnan(expected)
        scale = np.sqrt(np.mean(expected[there] ** 2))
        assert_allclose(got[there], expected[there], atol=2e-5 * scale, rtol=1e-4)
        part = read_from.sel(condition=condition, to_segment="question").values[there]
        assert np.nanmax(abs(part - expected[there])) > 0.01 * scale, "one segment is not the sum"


def test_what_a_gate_lets_through(shared, monkeypatch):
    """Qwen3-Next opens each channel of the mix; with a gate that is always open the sum would be another."""
    model = shared("Qwen3-Next (hybrid)")

    def both():
        result = ma.run(model, SHORT, {"slash": SLASH}, LOGITS)
        read = result["segment_logits"].next_token_logit_from.sum("to_segment", skipna=True).values
        return read, result["direct_logits"].next_token_logit.values

    got, expected = both()
    there = ~np.isnan(expected)
    scale = np.sqrt(np.mean(expected[there] ** 2))
    assert_allclose(got[there], expected[there], atol=2e-5 * scale, rtol=1e-4)
    monkeypatch.setattr("mechattn.analysis.direct_logits.gate_of", lambda model: torch.ones_like)
    ungated, _ = both()
    assert np.nanmax(abs(ungated[there] - expected[there])) > 0.1 * scale


def test_a_norm_after_the_mix_is_refused(shared, monkeypatch):
    model = shared("Qwen3-Next (hybrid)")
    monkeypatch.setattr("mechattn.analysis.direct_logits.gate_of", lambda model: None)
    with pytest.raises(ModelError, match=r"a key's share of a head's update is not"):
        ma.run(model, "Tom has 3 apples.", analyses=ma.analyses.SegmentLogits())
