"""Norms by QR against the whole update; counts in bins against numpy."""

import numpy as np
import torch

from mechattn.functional import head_outputs as fn
from mechattn.functional.received import massive


def ill_conditioned(heads=3, width=16, model=48):
    """W_O with singular values from 1 to 1e-4, and z along the small ones."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    u = torch.linalg.qr(drawn(heads, width, width)).Q
    v = torch.linalg.qr(drawn(heads, model, width)).Q
    s = torch.logspace(0, -4, width, dtype=torch.float64)
    z = torch.einsum("bphe,hde->bphd", drawn(2, 5, heads, 2), u[..., -2:])
    return (u * s) @ v.transpose(1, 2), z


def test_the_factor_is_more_precise_than_a_gram_matrix():
    w_o, z = ill_conditioned()
    exact = torch.einsum("bphd,hdm->bhpm", z, w_o).norm(dim=-1)
    mine = fn.update_norm(z.float(), fn.output_factor(w_o.float()))
    np.testing.assert_allclose(mine, exact, rtol=3e-3)
    gram = w_o.float() @ w_o.float().transpose(1, 2)
    by_gram = torch.einsum("bphd,hde,bphe->bhp", z.float(), gram, z.float()).clamp(min=0).sqrt()
    assert (by_gram / exact - 1).abs().max() > 0.02, "this is why QR"


def test_counts_in_pairs_of_bins():
    generator = torch.Generator().manual_seed(0)
    one, other = torch.rand(2, 2, 3, 40, generator=generator)
    one[0, 0, 0] = torch.nan
    counted = torch.rand(2, 40, generator=generator) < 0.7
    edges = torch.tensor([0.2, 0.5, 0.9]), torch.tensor([0.3, 0.6])
    both = fn.counts_in_pairs_of_bins(one, other, *edges, counted)
    bins = [[-9, *values.tolist(), 9] for values in edges]
    for row, tokens in enumerate(counted):
        is_kept = tokens & ~one[row].isnan()
        pairs = one[row][is_kept].numpy(), other[row][is_kept].numpy()
        np.testing.assert_array_equal(both[row], np.histogram2d(*pairs, bins)[0])


def test_massive_activations():
    stream = torch.randn(2, 10, 50, generator=torch.Generator().manual_seed(0))
    real = torch.ones(2, 10, dtype=torch.bool)
    real[1, 6:] = False
    stream[0, 3, 7], stream[1, 8, 8] = 5000.0, 9e9  # the second is padding
    found = massive(stream, real, 100.0, 1000.0)
    assert found["massive_count"].tolist() == [1, 0]
    assert found["massive_position"][0] == 3
    assert found["massive_ratio"][1] < 20
