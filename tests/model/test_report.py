"""What a report shows: the same on every CPU where a check passes, the worst place where it fails."""

import math

import pytest
import torch

from mechattn.model.verify.verification import Check, Report, compare, compare_positions


def as_on_another_cpu(expected, seed, size=1e-6):
    """The same numbers, rounded in another way."""
    noise = (
        torch.rand(
            expected.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        - 0.5
    )
    return (expected.double() * (1 + size * noise)).float()


def figures(seed, scale=1.0, dtype=torch.float32):
    """Two layers, with two entries that are the largest of the last one but for rounding."""
    made = scale * torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(seed))
    made[1, 2, 3] = made[1, 4, 1] = 1.1 * made.abs().max()
    return made.to(dtype)


def rows_of(*checks):
    return [row[:-1] for row in Report("m", "a", "float32", "v", checks)._rows]


def test_a_passed_check_prints_the_same_whatever_the_rounding():
    """Ten CPUs: worst places and differences vary, what is printed does not."""
    expected = figures(0, scale=3.0)
    printed, worst, places = [], set(), set()
    for seed in range(10):
        hooked, other = as_on_another_cpu(expected, seed), as_on_another_cpu(expected, 100 + seed)
        parts = compare("values", {n: (hooked[n], other[n]) for n in range(2)}, 2e-4, "", "")
        logits = compare_positions("logits", hooked[1], other[1], 1e-3, "", "")
        assert parts.outcome == logits.outcome == "passed"
        printed.append(rows_of(parts, logits))
        worst.add((parts.difference, logits.difference))
        places.add(int((hooked - other).abs().argmax()))
    assert all(rows == printed[0] for rows in printed)
    assert [row[5] for row in printed[0]] == ["within", "within"]
    assert printed[0][0][2] == "1", "the last layer"
    assert len(worst) == 10, "negative control: the differences are rounding"
    assert len(places) > 3, "negative control: so is the place that was shown before"


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_the_difference_is_the_largest_over_everything(factor):
    """Of a passed check too; beyond the tolerance its place is shown."""
    expected = torch.ones(2, 3, 4)
    hooked = expected.clone()
    hooked[0, 1, 2] += factor * 1e-3
    check = compare("values", {n: (hooked[n], expected[n]) for n in range(2)}, 1e-3, "", "mend it")
    assert check.difference == pytest.approx(factor * 1e-3, rel=1e-3)
    if factor < 1:
        assert (check.outcome, check.layer, check.hooked, check.remedy) == ("passed", 1, 1.0, "")
        assert str(check).startswith(
            "values passed in layer 1: 1 where 1 is expected, within 0.001."
        )
    else:
        assert (check.outcome, check.layer, check.hooked, check.remedy) == (
            "failed",
            0,
            float(hooked[0, 1, 2]),
            "mend it",
        )
        assert (
            "values failed in layer 0: 1.002 where 1 is expected, 0.002 apart (tolerance 0.001)"
            in str(check)
        )
        assert rows_of(check)[0][5] == "0.002"


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


def test_what_tolerates_nothing_prints_its_difference():
    assert rows_of(Check("bos", "passed", None, 0.0, 0.0, 0.0, 0.0))[0][5] == "0"
    assert rows_of(Check("bos", "not checked"))[0][5] == ""
    assert compare("values", {}, 1e-3, "hooks", "").outcome == "not checked"
