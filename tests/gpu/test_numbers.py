"""Numbers of a device against the same weights in float64 on the CPU: toys, families, every engine and analysis."""

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.analysis import ANALYSES
from mechattn.model import hooks
from tests.gpu.conftest import FILLED, PROBLEMS, hooked, plain
from tests.tiny_families import FAMILIES

TOYS = ["toy:llama", "toy:qwen2", "toy:gemma3", "toy:falcon"]
NUMBERS = ["received_per_prompt", "received_by_segment"]
# Root mean squares of differences of probabilities. Seen on a CPU, in families with halved weights: bfloat16 2e-3.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 4e-3}
DTYPES = list(TOLERANCE)
OTHER = {"slash": ma.MeaninglessTokens(".", 9)}


def received(model, conditions=FILLED, **options):
    made = ma.run(model, PROBLEMS, conditions, keep="prompts", **options)
    assert options.get("engine") in (None, made.provenance["engine"])
    return made["received_attention"]


def apart(one, other):
    return max(
        float(np.sqrt(np.nanmean((one[name].values - other[name].values) ** 2))) for name in NUMBERS
    )


def kernels_disagree(family, device):
    """Whether transformers' own SDPA is another model than its eager attention, as where it ignores Gemma 2's soft
    cap on a card."""
    model = plain(family, torch.float32).to(device).eval()
    if not model._supports_sdpa:
        return False
    tokens = torch.arange(5, 29, device=device)[None]
    logits = []
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            logits.append(model(tokens).logits[0])
    return float((logits[0] - logits[1]).abs().max() / logits[1].square().mean().sqrt()) > 1e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*TOYS, *FAMILIES])
def test_received_attention(name, dtype, device):
    is_toy = name in TOYS
    scale = 0.5 if dtype is torch.bfloat16 and not is_toy else 1.0
    if dtype is torch.float32 and not is_toy and kernels_disagree(name, device):
        with pytest.raises(ma.errors.ModelError, match="is not the model itself"):
            hooked(name, dtype, device, scale=scale)
        return
    model, exact = hooked(name, dtype, device, scale=scale)
    if not hooks.attention_layers(model):
        pytest.skip(f"{name} has no attention")

    runs = [{"engine": "hooks"}, {"engine": "streaming"}]
    if is_toy and device != "mps":
        runs.append({"engine": "fused"})
    if dtype is torch.bfloat16 and not is_toy:
        runs[1] = {}  # a mixture may send a token to another expert, and then is not streamed
    expected = received(exact, engine="hooks")
    for options in runs:
        assert apart(received(model, **options), expected) < TOLERANCE[dtype], options
    other = apart(received(model, OTHER), expected)
    assert other > TOLERANCE[dtype], "another filler would be noticed"


# Counts, and positions of a maximum: rounding moves one from a bin, or a tie, to the next.
COUNTED = ("_counts", "histogram", "sinks", "first_sink", "strongest_position")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_analysis(dtype, device):
    """In one pass; the root mean square of each quantity's differences, in that of the quantity."""
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 0.15}[dtype]
    model, exact = hooked("toy:llama", dtype, device)
    analyses = [
        make() for make in ANALYSES if make is not ma.analyses.ScoreDecomposition
    ]  # undefined under RoPE
    found, expected, other = (
        ma.run(one, PROBLEMS, conditions, analyses, layers=[3])
        for one, conditions in ((model, FILLED), (exact, FILLED), (model, OTHER))
    )
    noticed = 0
    for name, dataset in expected.datasets.items():
        for variable in dataset:
            theirs = dataset[variable].values
            if theirs.dtype.kind != "f" or str(variable).endswith(COUNTED):
                continue
            # What is 0 by definition has the size of its rounding.
            size = max(np.sqrt(np.nanmean(theirs**2)), 1e-2)
            ours, others = (
                np.sqrt(np.nanmean((each[name][variable].values - theirs) ** 2))
                for each in (found, other)
            )
            assert not ours > tolerance * size, (name, variable)
            noticed += bool(others > tolerance * size)
    assert noticed > 40, "another filler would be noticed"
