"""Updates of heads after the norm that follows attention, against plain transformers in float64."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.analysis.updates import BEFORE_NORM
from mechattn.model.checkpoint import load_tokenizer
from tests.parity.plain import SHORT, seen_in, weight_of
from tests.tiny_families import tiny_model

SLASH = ma.MeaninglessTokens("/", 20)
ANALYSES = [
    ma.analyses.HeadUpdates(per_query=True),
    ma.analyses.TopTargetUpdates(),
    ma.analyses.BlockUpdates(per_query=True),
]
# Gemma stores γ less 1; OLMo 2 may have b_O.
SETTINGS = {"Gemma 3": {}, "OLMo 2": {"attention_bias": True}}


@dataclass
class Written:
    """What one layer of plain transformers writes; a vector of d_model for each token."""

    stream: np.ndarray  # before the block
    heads: np.ndarray  # pos head d_model, before the norm
    bias: np.ndarray
    gamma: np.ndarray
    scale: np.ndarray  # of the whole output, pos 1
    added: np.ndarray  # what is added to the residual stream

    @property
    def after(self):
        """Each head's share of the norm's output."""
        return self.gamma * self.heads / self.scale[:, None]


def written_by(plain, ids):
    """One ``Written`` for each layer, from hooks of torch on the model's own modules."""
    into = {}
    out_of = {}
    for n, layer in enumerate(plain.model.layers):
        into |= {(n, "stream"): layer, (n, "z"): layer.self_attn.o_proj}
        out_of[n, "added"] = layer.post_attention_layernorm
    seen, _ = seen_in(plain, ids, into, out_of)

    layers = []
    head_count = plain.config.num_attention_heads
    for n, layer in enumerate(plain.model.layers):
        projection = layer.self_attn.o_proj
        norm = layer.post_attention_layernorm
        w_o = projection.weight.detach().numpy().T.reshape(head_count, -1, 64)
        z = seen[n, "z"].reshape(len(ids), head_count, -1)
        heads = np.einsum("phd,hdm->phm", z, w_o)
        bias = np.zeros(64) if projection.bias is None else projection.bias.detach().numpy()
        eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
        mean_square = ((heads.sum(1) + bias) ** 2).mean(-1, keepdims=True)
        layers.append(
            Written(
                stream=seen[n, "stream"],
                heads=heads,
                bias=bias,
                gamma=weight_of(norm),
                scale=np.sqrt(mean_square + eps),
                added=seen[n, "added"],
            )
        )
    return layers


@pytest.fixture(scope="module", params=SETTINGS)
def measured(request, prompts):
    """The result in float64, the sequence with filler, and what plain transformers writes there."""
    tokenizer = load_tokenizer("toy:llama")
    settings = SETTINGS[request.param]
    plain, same = (tiny_model(request.param, len(tokenizer), **settings).double() for _ in range(2))
    model = ma.load_model(same, tokenizer=tokenizer, dtype=torch.float64, verify=False)
    some = [SHORT, prompts[0]]
    result = ma.run(model, some, {"slash": SLASH}, ANALYSES, keep="prompts")
    sequence = SLASH.apply(SHORT, model)
    return result, sequence, written_by(plain, sequence.tokens.tolist())


def of_tokens(result, dataset, name, layer, length):
    array = result[dataset][f"{name}_per_prompt"].sel(condition="slash", layer=layer)
    return array.isel(prompt=0).values[..., :length]


def close(got, expected):
    return np.allclose(got, expected, rtol=1e-5, atol=1e-6 * abs(expected).max())


def test_the_oracle_adds_up_to_what_the_model_adds(measured):
    _, _, layers = measured
    for layer in layers:
        bias = layer.gamma * layer.bias / layer.scale
        np.testing.assert_allclose(
            layer.after.sum(1) + bias, layer.added, atol=1e-6
        )  # Gemma norms in float32


def test_heads_add_up_to_what_reaches_the_residual_stream(measured):
    """Along the stream: ``Σ_h ⟨r, Δ_h⟩ + ⟨r, bias part⟩ = ⟨r, resid_mid − resid_pre⟩``."""
    result, sequence, layers = measured
    length = len(sequence)
    for n, layer in enumerate(layers):
        magnitude = of_tokens(result, "head_updates", "magnitude_at", n, length)
        orientation = of_tokens(result, "head_updates", "orientation_at", n, length)
        heads = (magnitude * orientation).sum(0)
        squared = (layer.stream**2).sum(-1)
        bias = (layer.stream * layer.gamma * layer.bias / layer.scale).sum(-1) / squared
        block = [
            of_tokens(result, "block_updates", f"block_{name}_at", n, length)[0]
            for name in ("magnitude", "orientation")
        ]
        np.testing.assert_allclose(heads + bias, block[0] * block[1], atol=1e-5)
        expected = (layer.stream * layer.added).sum(-1) / squared
        np.testing.assert_allclose(heads + bias, expected, atol=1e-5)
        assert abs(heads - (magnitude * orientation)[0] + bias - expected).max() > 1e-2, (
            "negative control: a head is left out"
        )


def test_each_head_after_the_norm(measured):
    result, sequence, layers = measured
    for n, layer in enumerate(layers):
        size = np.linalg.norm(layer.stream, axis=-1)[:, None]
        expected = (np.linalg.norm(layer.after, axis=-1) / size).T
        got = of_tokens(result, "head_updates", "magnitude_at", n, len(sequence))
        assert close(got, expected)
        alone = np.sqrt((layer.heads**2).mean(-1, keepdims=True))
        normed_alone = np.linalg.norm(layer.gamma * layer.heads / alone, axis=-1)
        assert not close(got, (normed_alone / size).T), "negative control: each head normed alone"
        before = (np.linalg.norm(layer.heads, axis=-1) / size).T
        assert not close(got, before), "negative control: before the norm"


def test_means_before_and_after_the_norm(measured):
    result, sequence, layers = measured
    question = sequence.of_segment("question").numpy()
    for n, layer in enumerate(layers):
        size = np.linalg.norm(layer.stream, axis=-1)[:, None]
        for suffix, delta in (("", layer.after), (BEFORE_NORM, layer.heads)):
            norm = np.linalg.norm(delta, axis=-1)
            product = np.einsum("pm,phm->ph", layer.stream, delta)
            cosine = product / norm / size
            expected = {
                "update_norm": norm,
                "magnitude": norm / size,
                "orientation": cosine,
                "parallel": product / size**2,
                "orthogonal": norm / size * np.sqrt(1 - cosine**2),
            }
            for name, value in expected.items():
                got = result["head_updates"][name + suffix].sel(
                    condition="slash", layer=n, segment="question"
                )
                assert close(got.isel(prompt=0).values, value[question].mean(0)), name + suffix


def test_captions_say_which_one_it_is(measured):
    result, _, _ = measured
    for dataset, prefix in (("head_updates", ""), ("top_target_updates", "top_target_")):
        data = result[dataset]
        assert "after the norm" in data[f"{prefix}magnitude"].attrs["description"]
        before = data[f"{prefix}magnitude{BEFORE_NORM}"].attrs["description"]
        assert "before the norm" in before


def test_one_quantity_where_no_norm_follows(toy, prompts):
    data = ma.run(toy, prompts[:1], analyses=ma.analyses.HeadUpdates())["head_updates"]
    assert not [name for name in data.data_vars if BEFORE_NORM in name]
    assert "norm that follows" not in data["magnitude"].attrs["description"]
