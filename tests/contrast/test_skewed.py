"""A table of skewed differences says where its q is not controlled; one of symmetric differences says nothing."""

import numpy as np
from scipy import stats

from mechattn.stats.paired import paired


def tables(kind, n, count=40):
    """Of 24 heads without an effect: normal, or with a rare value far out on one side, as sinks have; or three with one."""
    for seed in range(count):
        generator = np.random.default_rng([seed, n])
        d = generator.normal(size=(n, 24))
        if kind != "normal":
            d = 0.3 * d + 9 * ((generator.random((n, 24)) < 0.1) - 0.1) * (
                np.arange(24) >= 3 * (kind == "mixed")
            )
        if kind == "mixed":
            d[:, :3] += 0.4
        yield paired(d, resamples=499)


def test_few_skewed_differences_warn_of_false_findings():
    false = [made for made in tables("rare", 12) if (made.q < 0.05).any()]
    assert len(false) > 4, "negative control: q is not controlled here"
    assert all("with 12 units q is not controlled" in made.skewed for made in false)


def test_where_sign_flips_alone_would_find_more_it_is_said():
    """By a count of the tests in which the two disagree."""
    counts = []
    for table in tables("mixed", 12):
        by_flips = stats.false_discovery_control(table.p_flip)
        counts.append(int(((table.q >= 0.05) & (by_flips < 0.05)).sum()))
        said = f"in {counts[-1]} of 24 tests sign flips alone would say" in table.skewed
        assert said == (counts[-1] > 0)
    assert any(counts)


def test_of_symmetric_differences_and_of_many_nothing_is_said():
    assert not any("not controlled" in made.skewed for made in tables("normal", 12))
    assert not any("not controlled" in made.skewed for made in tables("rare", 96, 5))
