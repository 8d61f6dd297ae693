"""The parts of scores against the weights of plain transformers in float64, by hand."""

from importlib import import_module

import numpy as np
import pytest
import torch

import mechattn as ma
from tests.analysis.plain import SHORT, blocks_of, models, passed

SLASH = ma.MeaninglessTokens("/", 20)
ULP = 2.0**-24  # a float32 number is rounded by so much of itself

# Each has its biases elsewhere, or an ALiBi of its own.
SPLIT = {"toy:falcon": 0, "BLOOM": 2, "MPT": 0, "GPT-2": 2, "OPT": 0}


@pytest.mark.parametrize(("name", "rank"), SPLIT.items())
def test_the_parts_of_scores(name, rank, prompts):
    """softmax(content + bias + ALiBi) = pattern, and each target's centred parts, from the weights by hand."""
    plain, hooked = models(name)
    analysis = ma.analyses.ScoreDecomposition(rank=rank, per_query=True)
    some = [SHORT, prompts[0]]
    result = ma.run(hooked, some, {"slash": SLASH}, analysis, keep="prompts")
    sequence = SLASH.apply(SHORT, hooked)
    length = len(sequence)
    made = passed(plain, sequence.tokens.tolist())
    data = result["score_decomposition"].sel(condition="slash").isel(prompt=0)
    for layer, pattern in enumerate(made.pattern):
        q = made.q[layer]
        k = made.k[layer]
        heads = len(q)
        width = q.shape[-1]
        b_q, b_k = biases(plain, layer, heads, width)
        content = np.einsum("hqd,hkd->hqk", q - b_q[:, None], k - b_k[:, None]) / width**0.5
        bias = np.einsum("hd,hkd->hk", b_q, k - b_k[:, None])[:, None] / width**0.5 + 0 * content
        alibi = slopes(plain, heads, length)[:, None] + 0 * content
        visible = np.tril(np.ones((length, length), bool))
        total = np.where(visible, content + bias + alibi, -np.inf)
        own = np.exp(total - total.max(-1, keepdims=True))
        rounding = ULP * (
            abs(total[..., visible]).max() + 8
        )  # BLOOM and MPT round scores to float32 even here
        np.testing.assert_allclose(own / own.sum(-1, keepdims=True), pattern, atol=rounding)
        of_layer = data.sel(layer=layer)
        target = np.argsort(-total, axis=-1, kind="stable")[..., rank]
        is_same = of_layer.ranked_target_at_per_prompt.values[:, :length] == target
        assert is_same[:, rank + 1 :].mean() >= 0.998, "a tie may turn"
        is_same[:, : rank + 1] = False
        tolerance = 2e-4 * max(1, abs(content).max())
        for part, value in {"content": content, "bias": bias, "alibi": alibi}.items():
            mean = np.where(visible, value, 0).sum(-1) / visible.sum(-1)
            centred = np.take_along_axis(value, target[..., None], -1)[..., 0] - mean
            mine = of_layer[f"{part}_at_per_prompt"].values[:, :length]
            assert abs(mine - centred)[is_same].max() < tolerance, part


def biases(plain, layer, heads, width):
    found = dict(blocks_of(plain)[layer].named_parameters())
    for name, value in found.items():
        if name.endswith(("query_key_value.bias", "Wqkv.bias")):
            return value.detach().view(heads, 3, width).permute(1, 0, 2)[:2].numpy()
        if name.endswith("c_attn.bias"):
            return value.detach().view(3, heads, width)[:2].numpy()
    of_parts = {name[-11:-10]: value for name, value in found.items() if name[-10:] == "_proj.bias"}
    if "q" not in of_parts:
        return np.zeros((2, heads, width))
    return [of_parts[part].detach().view(heads, width).numpy() for part in "qk"]


def slopes(plain, heads, length):
    """What transformers itself adds, by its own functions [head key]."""
    kind = plain.config.model_type
    if kind not in ("falcon", "bloom", "mpt"):
        return np.zeros((heads, length))
    modeling = import_module(f"transformers.models.{kind}.modeling_{kind}")
    if kind == "mpt":
        alibi = modeling.build_mpt_alibi_tensor(heads, length)
    else:
        mask = torch.ones(1, length, dtype=torch.long)
        alibi = modeling.build_alibi_tensor(mask, heads, torch.float64)
    scale = (plain.config.hidden_size // heads) ** -0.5 if kind == "falcon" else 1.0
    return scale * alibi.view(heads, length).double().numpy()
