"""Updates of heads after the norm that follows attention, against plain transformers in float64."""

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.analysis.updates import BEFORE_NORM
from tests.analysis.plain import SHORT, blocks_of, passed, rms, updates_of, weight_of
from tests.tiny_families import bridge_of, tiny_model

SLASH = ma.MeaninglessTokens("/", 20)
ANALYSES = [
    ma.analyses.HeadUpdates(per_query=True),
    ma.analyses.TopTargetUpdates(),
    ma.analyses.BlockUpdates(per_query=True),
]
# Gemma stores γ less 1; OLMo 2 may have b_O.
SETTINGS = {"Gemma 3": {}, "OLMo 2": {"attention_bias": True}}


@pytest.fixture(scope="module", params=SETTINGS)
def measured(request, prompts):
    """The result in float64, the sequence with filler, and of plain transformers the run and its blocks."""
    settings = SETTINGS[request.param]
    plain, same = (tiny_model(request.param, **settings).double() for _ in range(2))
    plain.set_attn_implementation("eager")
    model = bridge_of(same, dtype=torch.float64, verify=False)
    some = [SHORT, prompts[0]]
    result = ma.run(model, some, {"slash": SLASH}, ANALYSES, keep="prompts")
    sequence = SLASH.apply(SHORT, model)
    return result, sequence, passed(plain, sequence.tokens.tolist()), blocks_of(plain)


def of_tokens(result, dataset, name, layer, length):
    array = result[dataset][f"{name}_per_prompt"].sel(condition="slash", layer=layer)
    return array.isel(prompt=0).values[..., :length]


def close(got, expected):
    return np.allclose(got, expected, rtol=1e-5, atol=1e-6 * abs(expected).max())


def test_heads_add_up_to_what_reaches_the_residual_stream(measured):
    """Along the stream: ``Σ_h ⟨r, Δ_h⟩ + ⟨r, bias part⟩ = ⟨r, resid_mid − resid_pre⟩``."""
    result, sequence, run, blocks = measured
    length = len(sequence)
    for n, block in enumerate(blocks):
        magnitude = of_tokens(result, "head_updates", "magnitude_at", n, length)
        orientation = of_tokens(result, "head_updates", "orientation_at", n, length)
        heads = (magnitude * orientation).sum(0)
        stream = run.resid[n]
        squared = (stream**2).sum(-1)
        out = block.self_attn.o_proj
        bias = 0.0 if out.bias is None else out.bias.detach().numpy() * run.gain[n]
        along_bias = (stream * bias).sum(-1) / squared
        of_block, turned = (
            of_tokens(result, "block_updates", f"block_{name}_at", n, length)[0]
            for name in ("magnitude", "orientation")
        )
        expected = (stream * run.attention[n]).sum(-1) / squared
        np.testing.assert_allclose(of_block * turned, expected, atol=1e-5)
        np.testing.assert_allclose(heads + along_bias, expected, atol=1e-5)
        without_a_head = heads - (magnitude * orientation)[0] + along_bias
        assert abs(without_a_head - expected).max() > 1e-2, "negative control"


def test_each_head_after_the_norm(measured):
    result, sequence, run, blocks = measured
    question = sequence.of_segment("question").numpy()
    for n, block in enumerate(blocks):
        size = np.linalg.norm(run.resid[n], axis=-1)[:, None]

        def magnitude(delta, size=size):
            return (np.linalg.norm(delta, axis=-1) / size).T

        got = of_tokens(result, "head_updates", "magnitude_at", n, len(sequence))
        assert close(got, magnitude(updates_of(run, n)))
        norm = block.post_attention_layernorm
        heads = np.einsum("phd,hdm->phm", run.z[n], run.w_o[n])
        alone = weight_of(norm) * heads / rms(heads, norm)
        assert not close(got, magnitude(alone)), "negative control: each head normed alone"
        assert not close(got, magnitude(heads)), "negative control: before the norm"
        before = result["head_updates"][f"magnitude{BEFORE_NORM}"].isel(prompt=0)
        mean = before.sel(condition="slash", layer=n, segment="question")
        assert close(mean.values, magnitude(heads)[:, question].mean(1))


def test_captions_say_which_one_it_is(measured):
    result = measured[0]
    for dataset, prefix in (("head_updates", ""), ("top_target_updates", "top_target_")):
        data = result[dataset]
        assert "after the norm" in data[f"{prefix}magnitude"].attrs["description"]
        before = data[f"{prefix}magnitude{BEFORE_NORM}"].attrs["description"]
        assert "before the norm" in before


def test_one_quantity_where_no_norm_follows(toy, prompts):
    data = ma.run(toy, prompts[:1], analyses=ma.analyses.HeadUpdates())["head_updates"]
    assert not [name for name in data.data_vars if BEFORE_NORM in name]
    assert "norm that follows" not in data["magnitude"].attrs["description"]
