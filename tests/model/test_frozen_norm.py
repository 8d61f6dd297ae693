"""A norm with its scale held is linear: what it makes of parts adds up to what it makes of their sum."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mechattn.errors import ModelError
from mechattn.model.unembedding import frozen_norm

WIDTH = 12


class _Model(nn.Module):
    """As much of a hooked model as is read here."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.cfg, self.tokenizer = (
            SimpleNamespace(d_model=width, eps=1e-5, model_name="a model"),
            None,
        )

    def run_with_hooks(self, *inputs, fwd_hooks, **options):
        raise AssertionError("the model ran")


def norm_of(kind, width, eps=0.3):
    norm = (nn.LayerNorm if kind == "LayerNorm" else nn.RMSNorm)(
        width, eps=eps, dtype=torch.float64
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 1.0, 0.5, generator=generator)
    return norm


@pytest.mark.parametrize("width", [WIDTH, 33])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_parts_add_up(kind, width):
    """⟨norm(Σ Δ), d⟩ = Σ ⟨Δ, toward(d)⟩ / σ + ⟨b, d⟩, part by part and number by number."""
    norm = norm_of(kind, width)
    found = frozen_norm(_Model(width), norm, "it")
    parts, d = (
        torch.randn(5, 3, width, generator=torch.Generator().manual_seed(1)).double(),
        torch.arange(float(width)).double(),
    )
    bias = getattr(norm, "bias", None)
    for token in range(3):
        whole = sum(parts[:, token])
        expected = float(norm(whole).detach() @ d) - (
            0.0 if bias is None else float(bias.detach() @ d)
        )
        got = sum(float(part @ found.toward(d) / found.scale(whole)) for part in parts[:, token])
        assert got == pytest.approx(expected, rel=1e-6)
        alone = sum(float(part @ found.toward(d) / found.scale(part)) for part in parts[:, token])
        assert alone != pytest.approx(expected, rel=0.05), (
            "negative control: the scale of each part by itself"
        )


@pytest.mark.parametrize("module", [nn.Tanh(), nn.Softmax(-1)])
def test_what_is_no_norm_over_the_width_is_refused(module):
    with pytest.raises(ModelError, match="a model: it is not a norm of the form"):
        frozen_norm(_Model(), module, "it")


def test_a_model_without_norms_has_the_scale_1():
    found = frozen_norm(_Model(), nn.Identity(), "it")
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    assert found.scale(x).tolist() == [1.0, 1.0, 1.0]
    assert found.toward(x).equal(x)
