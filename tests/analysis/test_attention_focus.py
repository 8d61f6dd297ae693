"""Blocks, half precision and very short passages in the functions and the analysis of where heads look."""

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.functional import focus as fn


@pytest.mark.parametrize(
    ("first_query", "first_key", "end_key"),
    [(0, 0, 20), (8, 0, 20), (8, 4, 20), (8, 8, 20), (8, 4, 11)],
)
def test_the_token_before_in_a_block(first_query, first_key, end_key, random_pattern):
    """Blocks begin and end anywhere; a key before the block's first, or after its last, is not among its keys."""
    whole = random_pattern(2, 20)[None]
    block = whole[:, :, first_query : first_query + 6, first_key:end_key]
    got = fn.looking_back(block, 1, first_query, first_key)
    for i in range(6):
        q = first_query + i
        expected = torch.zeros(2, dtype=whole.dtype)
        if first_key < q <= end_key:
            expected = whole[0, :, q, q - 1]
        torch.testing.assert_close(got[0, :, i], expected)


def test_distances_and_half_masses_of_half_precision():
    """bfloat16 has no odd number above 256, and a sum of 512 equal shares stops growing in it."""
    pattern = torch.zeros(1, 1, 512, dtype=torch.bfloat16)
    pattern[..., 257] = 1
    assert fn.mean_distance(pattern, first_query=511).item() == 254
    uniform = torch.full((1, 1, 512), 1 / 512, dtype=torch.bfloat16)
    assert fn.half_mass_keys(uniform).item() == 256


def test_identical_tokens_and_very_short_passages(toy):
    """Ties go to the first key; a passage of two tokens has one query that counts."""
    tokens = torch.tensor([[1, *[7] * 29]])
    result = ma.run(toy, tokens, analyses=[ma.analyses.AttentionFocus(), ma.analyses.HeadUpdates()])
    data = result["attention_focus"].sel(segment="question")
    total = data.self_share + data.first_share + data.previous_share
    assert np.isfinite(total).all()
    assert np.isfinite(result["head_updates"].magnitude.sel(segment="question")).all()
    short = ma.run(toy, torch.tensor([[1, 7]]), analyses=ma.analyses.AttentionFocus())
    two = short["attention_focus"].sel(segment="question")
    np.testing.assert_allclose(two.self_mass + two.first_mass, 1, atol=1e-5)
    with pytest.raises(ma.MechattnError, match="is a single token"):
        ma.run(toy, torch.tensor([[1]]), analyses=ma.analyses.AttentionFocus())
