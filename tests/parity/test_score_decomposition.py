"""The parts of scores against the weights of plain transformers in float64, by hand."""

import numpy as np
import pytest
import torch

import mechattn as ma
from tests.parity.plain import SHORT, blocks_of, models, passed

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
        bracket = np.einsum("hqd,hd->hq", q, b_k)[..., None] / width**0.5
        raw = np.einsum("hqd,hkd->hqk", q, k) / width**0.5
        assert abs(content + bias + bracket - raw).max() < 1e-5 * max(1, abs(raw).max())
        visible = np.tril(np.ones((length, length), bool))
        total = np.where(visible, content + bias + alibi, -np.inf)
        own = np.exp(total - total.max(-1, keepdims=True))
        rounding = ULP * (
            abs(total[..., visible]).max() + 8
        )  # BLOOM and MPT round scores to float32 even here
        np.testing.assert_allclose(own / own.sum(-1, keepdims=True), pattern, atol=rounding)
        of_layer = data.sel(layer=layer)
        parts = {"content": content, "bias": bias, "alibi": alibi}
        mine = {
            part: of_layer[f"{part}_at_per_prompt"].values for part in ("ranked_target", *parts)
        }
        wrong = 0
        for head, query in np.ndindex(heads, length):
            if query <= rank:
                continue
            target = np.argsort(-total[head, query], kind="stable")[rank]
            if target != int(mine["ranked_target"][head, query]):
                wrong += 1
                continue
            for part, value in parts.items():
                row = value[head, query, : query + 1]
                difference = float(mine[part][head, query]) - (row[target] - row.mean())
                assert abs(difference) < 2e-4 * max(1, abs(raw).max()), part
        assert wrong <= 0.002 * heads * length


def biases(plain, layer, heads, width):
    found = dict(blocks_of(plain)[layer].named_parameters())
    for name, value in found.items():
        if name.endswith(("query_key_value.bias", "Wqkv.bias")):
            return value.detach().view(heads, 3, width).permute(1, 0, 2)[:2].numpy()
        if name.endswith("c_attn.bias"):
            return value.detach().view(3, heads, width)[:2].numpy()
    named = [
        next((v for n, v in found.items() if n.endswith(f"{part}_proj.bias")), None)
        for part in "qk"
    ]
    return [
        np.zeros((heads, width)) if v is None else v.detach().view(heads, width).numpy()
        for v in named
    ]


def slopes(plain, heads, length):
    """What transformers itself adds, by its own functions [head key]."""
    kind = plain.config.model_type
    if kind == "falcon":
        from transformers.models.falcon.modeling_falcon import build_alibi_tensor

        alibi = build_alibi_tensor(torch.ones(1, length, dtype=torch.long), heads, torch.float64)
        width = plain.config.hidden_size // heads
        return alibi.view(heads, length).double().numpy() / width**0.5
    if kind == "bloom":
        from transformers.models.bloom.modeling_bloom import build_alibi_tensor

        alibi = build_alibi_tensor(torch.ones(1, length), heads, torch.float64)
        return alibi.view(heads, length).numpy()
    if kind == "mpt":
        from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

        return build_mpt_alibi_tensor(heads, length).view(heads, length).double().numpy()
    return np.zeros((heads, length))
