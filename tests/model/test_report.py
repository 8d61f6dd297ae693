"""What a report shows: the same on every CPU where a check passes, the worst place where it fails."""

import math

import torch

from mechattn.model.verify.verification import Report, compare, compare_positions


def rows_of(*checks):
    return Report("m", "a", "float32", "v", checks)._rows


def test_a_passed_check_prints_the_same_whatever_the_rounding():
    """Ten CPUs: differences vary, what is printed does not."""
    expected = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    printed = []
    differences = set()
    for seed in range(10):
        noise = torch.rand(expected.shape, generator=torch.Generator().manual_seed(seed))
        hooked = expected * (1 + 1e-6 * noise)
        pairs = {layer: (hooked[layer], expected[layer]) for layer in range(2)}
        values = compare("values", pairs, 2e-4, "", "")
        logits = compare_positions("logits", hooked[1], expected[1], 1e-3, "", "")
        assert values.outcome == logits.outcome == "passed"
        printed.append(rows_of(values, logits))
        differences.add((values.difference, logits.difference))
    assert all(rows == printed[0] for rows in printed)
    assert [row[2] for row in printed[0]] == ["within", "within"]
    assert len(differences) == 10, "negative control: the differences are rounding"


def test_a_figure_that_is_no_number_fails():
    expected = torch.ones(2, 3)
    hooked = expected.clone()
    hooked[0, 1] = torch.nan
    for check in (
        compare("values", {0: (hooked, expected)}, 1e-3, "", ""),
        compare_positions("logits", hooked, torch.arange(6.0).view(2, 3), 1e-3, "", ""),
    ):
        assert check.outcome == "failed"
        assert check.difference == math.inf
        assert math.isnan(check.hooked)
