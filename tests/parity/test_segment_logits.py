"""`SegmentLogits` against plain transformers in float64, key by key, and its sum against `DirectLogits`."""

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.axes import SEGMENTS
from mechattn.errors import ModelError
from tests.parity.plain import models, passed

SLASH = ma.MeaninglessTokens("/", 20)


@pytest.mark.parametrize("name", ["toy:llama", "toy:falcon"])
def test_each_head_reads_key_by_key(name, prompts, monkeypatch):
    plain, hooked = models(name)
    result = ma.run(
        hooked, prompts[:1], {"slash": SLASH}, ma.analyses.SegmentLogits(), keep="prompts"
    )
    got = result["segment_logits"].sel(condition="slash").isel(prompt=0)
    sequence = SLASH.apply(prompts[0], hooked)
    ids = sequence.tokens.tolist()
    codes = sequence.segment.tolist()
    made = passed(plain, ids, monkeypatch)
    norm = next(
        m for n, m in plain.named_modules() if n.rpartition(".")[2] in ("norm", "ln_f", "norm_f")
    )
    w_u = plain.get_output_embeddings().weight.detach().numpy()
    w_u = w_u - w_u.mean(0)
    stream = made.resid[-1]
    centres = type(norm).__name__ == "LayerNorm"
    eps = norm.eps if centres else norm.variance_epsilon
    scale = np.sqrt(stream.var(-1) + eps) if centres else np.sqrt((stream**2).mean(-1) + eps)
    direction = norm.weight.detach().numpy() * w_u[[*ids[1:], 0]]
    direction = direction - direction.mean(-1, keepdims=True) if centres else direction
    for layer, head in ((0, 1), (2, 3)):
        read = np.zeros((len(ids), len(SEGMENTS)))
        seen = np.zeros_like(read)
        for q in range(len(ids) - 1):
            for k in range(q + 1):
                given = made.v[layer][head, k] @ made.w_o[layer][head] @ direction[q] / scale[q]
                read[q, codes[k]] += made.pattern[layer][head, q, k] * given
                seen[q, codes[k]] += 1
        for s, segment in enumerate(SEGMENTS):
            queries = [q for q in range(len(ids) - 1) if codes[q] == s]
            for t, other in enumerate(SEGMENTS):
                at = {"layer": layer, "head": head, "segment": segment, "to_segment": other}
                mine = {
                    name: float(got[f"next_token_logit_{name}"].sel(at))
                    for name in ("from", "per_key")
                }
                those = [q for q in queries if seen[q, t]]
                if not those:
                    assert all(np.isnan(value) for value in mine.values())
                    continue
                assert mine["from"] == pytest.approx(
                    np.mean([read[q, t] for q in queries]), abs=2e-4, rel=1e-3
                )
                expected = np.mean([read[q, t] / seen[q, t] for q in those])
                assert mine["per_key"] == pytest.approx(expected, abs=2e-4, rel=1e-3)
    other = float(
        got.next_token_logit_from.sel(layer=2, head=3, segment="question", to_segment="inserted")
    )
    wrong = float(
        got.next_token_logit_from.sel(layer=2, head=2, segment="question", to_segment="inserted")
    )
    assert abs(other - wrong) > 1e-3, "the loops would notice another head"


@pytest.mark.parametrize("engine", ["streaming", "hooks"])
@pytest.mark.parametrize(
    "name",
    ["toy:gemma3", "toy:falcon", "GPT-2", "DeepSeek-V3 (latent attention)"],
)
def test_over_all_segments_it_is_the_direct_logit(name, engine, prompts, shared):
    """With norms after attention, biases, grouped heads, ALiBi, windows and latent attention."""
    conditions = (
        {"slash": SLASH, "masked": SLASH.masked()} if engine == "streaming" else {"slash": SLASH}
    )
    analyses = [ma.analyses.SegmentLogits(), ma.analyses.DirectLogits()]
    result = ma.run(shared(name), prompts[:2], conditions, analyses, keep="prompts", engine=engine)
    summed = result["segment_logits"].next_token_logit_from.sum("to_segment", skipna=True)
    whole = result["direct_logits"].next_token_logit
    for condition in ("baseline", *conditions):
        got, expected = (each.sel(condition=condition).values for each in (summed, whole))
        there = ~np.isnan(expected)
        scale = np.sqrt(np.mean(expected[there] ** 2))
        np.testing.assert_allclose(got[there], expected[there], atol=2e-5 * scale, rtol=1e-4)
        part = result["segment_logits"].next_token_logit_from.sel(
            condition=condition, to_segment="question"
        )
        assert np.nanmax(abs(part.values[there] - expected[there])) > 0.01 * scale, (
            "one segment alone is not the sum"
        )


def test_what_a_gate_lets_through(shared, monkeypatch):
    """Qwen3-Next opens each channel of the mix; with a gate that is always open the sum would be another."""
    model = shared("Qwen3-Next (hybrid)")
    prompts = ma.load_prompts("word-problems", limit=1)

    def both():
        result = ma.run(
            model,
            prompts,
            {"slash": SLASH},
            [ma.analyses.SegmentLogits(), ma.analyses.DirectLogits()],
        )
        read = result["segment_logits"].next_token_logit_from.sum("to_segment", skipna=True).values
        return read, result["direct_logits"].next_token_logit.values

    got, expected = both()
    there = ~np.isnan(expected)
    scale = np.sqrt(np.mean(expected[there] ** 2))
    np.testing.assert_allclose(got[there], expected[there], atol=2e-5 * scale, rtol=1e-4)
    monkeypatch.setattr("mechattn.analysis.direct_logits.gate_of", lambda model: torch.ones_like)
    ungated, _ = both()
    assert np.nanmax(abs(ungated[there] - expected[there])) > 0.1 * scale


def test_a_norm_after_the_mix_is_refused(shared, monkeypatch):
    model = shared("Qwen3-Next (hybrid)")
    monkeypatch.setattr("mechattn.analysis.direct_logits.gate_of", lambda model: None)
    with pytest.raises(ModelError, match=r"a key's share of a head's update is not"):
        ma.run(model, "Tom has 3 apples.", analyses=ma.analyses.SegmentLogits())
