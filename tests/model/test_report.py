"""What a report shows: the same on every CPU where a check passes, the worst place where it fails."""

import math

import torch

from mechattn.model.verify.verification import compare, compare_positions


def test_a_figure_that_is_no_number_fails():
    expected = torch.ones(2, 3)
    hooked = expected.clone()
    hooked[0, 1] = torch.nan
    for check in (
        compare("values", {0: (hooked, expected)}, 1e-3, ""),
        compare_positions("logits", hooked, torch.arange(6.0).view(2, 3), 1e-3, ""),
    ):
        assert check.outcome == "failed"
        assert check.difference == math.inf
        assert math.isnan(check.hooked)
