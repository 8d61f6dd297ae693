"""Fused kernels of a device: column sums of each of them against whole matrices in float64 on the CPU."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import mechattn as ma
from mechattn.functional.fused import fused_attention
from tests.functional.test_fused import KINDS, by_squares, made

DTYPES = {torch.float32: 2e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}
BACKENDS = ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"]


def moved(attention, *where):
    parts = {name: getattr(attention, name) for name in ("q", "k", "v", "bias", "sinks")}
    return replace(
        attention,
        **{name: part if part is None else part.to(*where) for name, part in parts.items()},
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [17, 300, 1025])
def test_column_sums(kind, dtype, length, device):
    if device == "mps":
        pytest.skip("torch has no kernel for Apple's device that gives the log-sum-exp")
    attention, weights = made(kind, length, dtype)
    _, expected, _ = by_squares(attention, weights)
    got = fused_attention(moved(attention, device)).column_sums(weights.to(device)).double().cpu()
    size = float(expected.max())
    assert float((got - expected).abs().max()) < DTYPES[dtype] * size
    assert float((got - expected.roll(1, 2)).abs().max()) > 10 * DTYPES[dtype] * size, (
        "a shifted key would be noticed"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_is_verified_whichever_kernel_it_runs(backend, dtype, device):
    """The pattern of the model's own kernel, read with identity values, against that of the hooks."""
    with sdpa_kernel(getattr(SDPBackend, backend)):
        try:
            q = torch.ones(1, 2, 8, 8, device=device, dtype=dtype)
            k = q[:, :1]  # heads are grouped, as in the toy
            torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
        except RuntimeError as error:
            pytest.skip(f"{backend} of {device} takes no {dtype}: {str(error).splitlines()[0]}")
        report = ma.verify_model(
            ma.load_model("toy:llama", dtype=dtype, device=device, verify=False)
        )
    assert report.passed, str(report)
    kernel = next(check for check in report.checks if check.name == "kernel")
    assert "SDPA with identity values" in kernel.detail, "it is the kernel's own pattern"
