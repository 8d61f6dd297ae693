"""Duplicate-token and induction mass against TransformerLens's head detector, loops, and blocks of rows."""

import pytest
import torch
from torch.testing import assert_close
from transformer_lens import head_detector

from mechattn.functional.focus import has_repeat, looked_up_mass, repeats_of

LENGTH = 23
HEADS = 3
PATTERNS = {
    0: head_detector.get_duplicate_token_head_detection_pattern,
    1: head_detector.get_induction_head_detection_pattern,
}


@pytest.fixture
def tokens():
    drawn = torch.randint(0, 6, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    assert (drawn[:, 1:] == drawn[:, :-1]).any(), "the same token twice in a row is among them"
    return drawn


@pytest.fixture
def pattern(random_pattern):
    return torch.stack([random_pattern(heads=HEADS, length=LENGTH, seed=seed) for seed in (1, 2)])


def repeated_mass(pattern, tokens, after, first_query=0, first_key=0):
    queries = slice(first_query, first_query + pattern.shape[2])
    keys = slice(first_key, first_key + pattern.shape[3])
    repeats = repeats_of(tokens, after, queries, keys)
    return looked_up_mass(pattern, repeats.nonzero(as_tuple=True))


def test_many_small_masses_in_half_precision():
    """Added up in float16 itself, what comes after the first half would be lost."""
    pattern = torch.full((1, 1, 1, 4096), 2.0**-12, dtype=torch.float16)
    tokens = torch.zeros(1, 4097, dtype=torch.long)
    assert repeated_mass(pattern, tokens, 0, first_query=4096).item() == 1
    lossy = torch.zeros(1, dtype=torch.float16).index_put_(
        (torch.zeros(4096, dtype=torch.long),), pattern.flatten(), accumulate=True
    )
    assert lossy.item() < 1, "control"


@pytest.mark.parametrize("after", PATTERNS)
def test_the_places_are_those_of_transformer_lens(tokens, pattern, after):
    for row in range(2):
        places = PATTERNS[after](tokens[row : row + 1]).double()
        places.fill_diagonal_(0)  # a query itself is none of its earlier places
        expected = (pattern[row] * places).sum(-1)
        got = repeated_mass(pattern, tokens, after)[row]
        assert_close(got, expected, rtol=1e-12, atol=1e-14)
        assert_close(has_repeat(tokens, after)[row], places.any(-1))
        other_places = PATTERNS[1 - after](tokens[row : row + 1])
        assert not torch.allclose(got, (pattern[row] * other_places).sum(-1)), "control"


@pytest.mark.parametrize("after", [0, 1])
def test_blocks_of_rows_are_the_whole(tokens, pattern, after):
    for first_query, first_key, stop in ((0, 0, 7), (7, 0, 16), (16, 5, 23)):
        seen = pattern.clone()
        seen[..., :first_key] = 0  # what lies before a window gets nothing
        block = seen[:, :, first_query:stop, first_key:stop]
        got = repeated_mass(block, tokens, after, first_query, first_key)
        expected = repeated_mass(seen, tokens, after)
        assert_close(got, expected[..., first_query:stop])
        elsewhere = repeated_mass(block, tokens, after)
        assert not first_query or not torch.allclose(elsewhere, got), "negative control"
