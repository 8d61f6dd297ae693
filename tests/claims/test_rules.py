"""The rules, by hand and by simulation."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from mechattn.claims.rules import (
    Chance,
    Estimate,
    Outcome,
    Rule,
    beside_chance,
    decide,
    estimated,
    family,
    together,
)

BELOW = Rule("below", -0.02, 0.02, -0.02)
ABOVE = Rule("above", 0.02, 0.02, 0.02)
HALF = [-1, 1]


def at(value, half=0.01, **more):
    return Estimate(value, value - half, value + half, 20, 1.4 * half, **more)


def chance(apart, spread=0.01, half=0.001):
    """Twenty draws whose further one lies within ``spread`` of their mean with 95 %; the mean is the number less ``apart``."""
    s = spread / stats.t.ppf(0.975, 19) / math.sqrt(1 + 1 / 20)
    draws = np.resize(HALF, 20) * s * math.sqrt(19 / 20)
    return lambda found: Chance(at(apart, half), tuple(found.value - apart + draws))


@pytest.mark.parametrize(
    ("value", "half", "word"),
    [
        (-0.1, 0.01, "supported"),
        (-0.1, 0.2, "cannot be told"),
        (-0.03, 0.01, "cannot be told"),  # it ends on the line
        (-0.01, 0.005, "contradicted"),  # a fall, too small to matter
        (0.1, 0.01, "contradicted"),  # the opposite
    ],
)
def test_where_the_interval_lies(value, half, word):
    assert decide(BELOW, at(value, half)).word == word
    assert decide(ABOVE, at(-value, half)).word == word


@pytest.mark.parametrize(
    ("apart", "spread", "half", "beyond"),
    [
        (-0.05, 0.01, 0.001, True),
        (-0.015, 0.01, 0.001, False),  # nearer than the margin
        (-0.05, 0.06, 0.001, False),  # a further draw may come as far
        (-0.03, 0.01, 0.02, False),  # the interval of the difference reaches over the margin
        (0.05, 0.01, 0.001, False),  # random weights do it more
    ],
)
def test_both_verdicts_take_more_than_random_weights_do(apart, spread, half, beyond):
    supports, against = at(-0.1), at(0.1)
    assert decide(BELOW, supports, chance(apart, spread, half)(supports)).word == (
        "supported" if beyond else "no more than untrained"
    )
    assert decide(BELOW, against, chance(-apart, spread, half)(against)).word == (
        "contradicted" if beyond else "no more than untrained"
    )
    mirrored = decide(ABOVE, at(0.1), chance(-apart, spread, half)(at(0.1)))
    assert mirrored.word == ("supported" if beyond else "no more than untrained")


def test_the_line_of_contradiction_may_be_another():
    gain = Rule("above", 0.0, 0.0, 0.02)
    for value, word in ((0.03, "supported"), (0.001, "contradicted"), (-0.1, "contradicted")):
        assert decide(gain, at(value, 0.004)).word == word
    assert decide(gain, at(0.01, 0.02)).word == "cannot be told", (
        "no gain, and the published one, are in the interval"
    )
    small = decide(gain, at(0.01, 0.004))
    assert small.word == "supported", "a gain is a gain"
    assert "short of what was published" in small.why
    assert "short" not in decide(gain, at(0.03, 0.004)).why


def test_an_exact_test_has_to_agree():
    gain = Rule("above", 0.0, 0.0, 0.0)
    assert decide(gain, at(0.1, 0.05, exact=0.01)).word == "supported"
    assert decide(gain, at(0.1, 0.05, exact=0.2)).word == "cannot be told"
    assert decide(gain, at(-0.1, 0.05, exact=0.01)).word == "contradicted"


@pytest.mark.parametrize(
    ("rule", "attainable", "random", "why"),
    [
        (
            Rule("above", 0.2, 0.1, 0.2),
            (-0.086, 0.086),
            None,
            "out of reach",
        ),  # a cosine confined to some entries
        (
            Rule("below", 0.1, 0.1, 0.1),
            (0.0, math.inf),
            0.003,
            "random weights reach as far",
        ),  # a spread
        (
            Rule("above", 0.0, 0.0, 0.0),
            (0.0, 1.0),
            None,
            "out of reach",
        ),  # it solves nothing, so it loses nothing
        (Rule("above", 0.0, 0.0, 0.002), (-1.0, 0.0), None, "out of reach"),  # it solves all
    ],
)
def test_a_rule_that_a_model_cannot_satisfy_or_break_is_not_tested(rule, attainable, random, why):
    value = min(max(0.0, attainable[0]), attainable[1]) + 1e-9
    draws = (
        None
        if random is None
        else Chance(at(value - random, 1e-6), tuple(random + 1e-5 * np.resize(HALF, 20)))
    )
    found = decide(rule, at(value, 1e-6), draws, attainable)
    assert found.word == "not testable here"
    assert why in found.why
    assert found.p is None, "so it is no test of the family"
    assert decide(rule, at(value, 1e-6), draws).word != "not testable here", (
        "without a bound it would be tested"
    )


def test_too_few_values_that_can_differ():
    gain = Rule("above", 0.0, 0.0, 0.0)
    at_99 = at(0.01, 0.02, exact=0.5, floor=0.075)
    assert "too few values can differ" in decide(gain, at_99, None, (-0.99, 0.01)).why
    assert decide(gain, at_99, None, (-0.7, 0.3)).word == "cannot be told"


def test_what_is_no_number_cannot_be_told():
    for values, why in (
        ([], "takes 3"),
        ([0.1, 0.2], "takes 3"),
        ([0.1, 0.2, math.nan], "no numbers"),
    ):
        found = decide(BELOW, estimated(np.array(values)))
        assert (found.word, found.p) == ("cannot be told", None)
        assert why in found.why


def test_all_parts_have_to_hold():
    yes, no, maybe = (
        Outcome("supported", "", 0.001),
        Outcome("contradicted", "", 0.01),
        Outcome("cannot be told", "", 0.4),
    )
    alike, never = Outcome("no more than untrained", "", 0.9), Outcome("not testable here", "")
    assert together([yes, yes]) == yes
    assert together([yes, maybe]).word == "cannot be told"
    assert together([yes, alike]).word == "no more than untrained"
    assert (together([maybe, no, yes]).word, together([maybe, no, yes]).p) == ("contradicted", 0.03)
    assert together([maybe, Outcome("contradicted", "", 0.04)]).word == "cannot be told", (
        "two chances to be contradicted"
    )
    assert together([yes, never, no]).word == "not testable here"


def test_three_parts_on_the_line_are_seldom_contradicted():
    """Normal values of 12 prompts whose mean is on the line: 2.5 % of claims, and more if each part counts by itself."""
    values = np.random.default_rng(0).normal(0.02, 0.1, (1500, 3, 12))
    parts = [[decide(ABOVE, estimated(part)) for part in claim] for claim in values]
    assert np.mean([together(some).word == "contradicted" for some in parts]) < 0.035
    apart = np.mean([any(part.word == "contradicted" for part in some) for some in parts])
    assert apart > 0.05, "negative control"


def test_the_family_is_benjamini_hochberg():
    p = [0.01, None, 0.04, 0.03]
    assert family(p) == [pytest.approx(0.03), None, pytest.approx(0.04), pytest.approx(0.04)]
    assert family([None]) == [None]


def test_what_is_detectable_is_detected_four_times_in_five():
    """A truth that is as far off as ``told`` says is told in about 80 % of samples, random weights included."""
    rng, n = np.random.default_rng(0), 30
    rule = Rule("above", 0.0, 0.1, 0.0)
    draws = [rng.normal(0.0, 0.2) + rng.normal(0, 1, n) * 0.01 for _ in range(20)]
    told = np.median([_outcome(rng, rule, 0.6, n, draws).told[0] for _ in range(60)])
    words = [_outcome(rng, rule, told, n, draws).word for _ in range(300)]
    assert 0.72 < np.mean([word == "supported" for word in words]) < 0.9


def _outcome(rng, rule, truth, n, draws):
    values = rng.normal(truth, 0.5, n)
    return decide(rule, estimated(values), beside_chance(values, draws))


def test_a_model_that_is_one_more_draw_is_seldom_told_from_them():
    """Under no effect a cell says either word in at most 5 %, and a page of 40 cells any in few, on the line or beyond it."""
    rng = np.random.default_rng(1)
    rules = [Rule("above", line, 0.0, line) for line in (0.0, -5.0)]
    p = np.empty((len(rules), 60, 40))
    for page, cell in np.ndindex(60, 40):
        truths = rng.normal(0, 0.1, 21)
        values = rng.normal(truths[0], 0.2, 12)
        found = (
            estimated(values),
            beside_chance(values, rng.normal(truths[1:, None], 0.2, (20, 12))),
        )
        p[:, page, cell] = [decide(rule, *found).p for rule in rules]
    assert ((p <= 0.05).mean((1, 2)) < 0.06).all()
    pages = np.mean([[min(family(page.tolist())) <= 0.05 for page in pages] for pages in p], axis=1)
    assert (pages < 0.12).all(), "the family: 5 % of pages, give or take what 60 of them show"


def test_the_interval_is_students():
    values = np.random.default_rng(0).normal(0.3, 2.0, 17)
    found = estimated(values)
    low, high = stats.t.interval(0.95, 16, values.mean(), stats.sem(values))
    assert np.allclose([found.value, found.low, found.high], [values.mean(), low, high], atol=1e-12)
    even = np.concatenate([values, 0.6 - values])  # without skewness
    assert (
        abs(
            estimated(even).beyond(0.0, 1)
            - stats.ttest_1samp(even, 0.0, alternative="greater").pvalue
        )
        < 1e-12
    )
    assert (
        abs(
            estimated(even).beyond(0.5, -1)
            - stats.ttest_1samp(even, 0.5, alternative="less").pvalue
        )
        < 1e-12
    )
    alike = estimated(np.zeros(17), least=0.2)
    assert (alike.low, alike.high, alike.detectable) == (-0.2, 0.2, 0.2)


def test_fewer_than_three_draws_are_no_null():
    assert beside_chance(np.zeros(5), [np.zeros(5)] * 2) is None
    assert beside_chance(np.zeros(5), [np.zeros(5)] * 2 + [np.full(5, np.nan)]) is None


def test_skewed_values_contradict_too_often_less_with_halls_t():
    """Three parts on the line, of lognormal values; and the negative control, by Student's t alone."""
    ours, students = [], []
    for seed in range(300):
        values = np.exp(np.random.default_rng(seed).normal(size=(3, 24))) - math.exp(0.5)
        parts = [estimated(part) for part in values]
        for words, some in (
            (ours, parts),
            (students, [replace(part, skewness=0.0) for part in parts]),
        ):
            words.append(
                together([decide(Rule("above", 0.0, 0.0, 0.0), part) for part in some]).word
            )
    assert ours.count("contradicted") / 300 < 0.15
    assert students.count("contradicted") / 300 > 0.17


def test_halls_t_by_its_formula():
    values = np.random.default_rng(0).lognormal(size=12)
    t = (values.mean() - 2.0) / (values.std(ddof=1) / math.sqrt(12))
    third = ((values - values.mean()) ** 3).mean() / values.std() ** 3
    hall = t + third / (6 * math.sqrt(12)) * (2 * t**2 + 1) + third**2 * t**3 / (27 * 12)
    assert t < 0
    assert estimated(values).beyond(2.0, -1) == pytest.approx(
        stats.t.cdf(max(t, hall), 11), rel=1e-9
    )
    assert estimated(values).beyond(2.0, 1) == pytest.approx(stats.t.sf(min(t, hall), 11), rel=1e-9)
    assert estimated(-values).beyond(-2.0, 1) == pytest.approx(
        estimated(values).beyond(2.0, -1), rel=1e-9
    )
