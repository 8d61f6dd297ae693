"""What blocks of rows need beside the loops over single rows in tests/analysis/test_focus_parity.py."""

import torch

from mechattn.functional import focus as fn


def test_a_block_with_keys_cut_off_on_the_left(random_pattern):
    pattern = random_pattern(heads=2, length=12, window=4)[None]
    whole = fn.mean_distance(pattern)[..., 8:]
    torch.testing.assert_close(fn.mean_distance(pattern[..., 8:, 5:], 8, first_key=5), whole)
    assert (fn.mean_distance(pattern[..., 8:, 5:], 8) - whole).abs().min() > 1, (
        "the loop would notice"
    )
