"""The word, the interval and the exact test of a cell, beside what scipy computes."""

import math

import numpy as np
import pytest
from scipy import stats

from mechattn.published.comparison import (
    AS_PUBLISHED,
    NOT_MEASURABLE,
    OPPOSITE,
    UNCLEAR,
    Cell,
    accuracy_cell,
    measured_cell,
    rule_words,
    word_of,
)
from mechattn.published.statements import read_statements
from tests.evaluation import by_hand

STATEMENTS = {statement.key: statement for statement in read_statements().statements}


@pytest.mark.parametrize(
    ("low", "high", "below", "above"),
    [
        (-5.0, -2.1, AS_PUBLISHED, OPPOSITE),
        (-5.0, -1.9, UNCLEAR, UNCLEAR),
        (2.1, 5.0, OPPOSITE, AS_PUBLISHED),
        (math.nan, math.nan, UNCLEAR, UNCLEAR),
    ],
)
def test_the_word_can_be_found_with_a_pencil(low, high, below, above):
    assert word_of(STATEMENTS["attention_falls"], low, high) == below
    assert word_of(STATEMENTS["attention_rises"], low, high) == above


def test_the_rule_in_words():
    words = rule_words(STATEMENTS["attention_falls"])
    assert words == "as published below −2.0 %, opposite above +2.0 %"
    assert rule_words(STATEMENTS["tokens_help"]).endswith("opposite below +0.0 points")


def test_the_interval_is_students_and_untrained_weights_are_a_range():
    logs = np.random.default_rng(0).normal(-0.2, 0.1, 12)
    cell = measured_cell(STATEMENTS["attention_falls"], logs.tolist(), [-0.1, -0.3, -0.2])
    ends = stats.t.interval(0.95, 11, logs.mean(), stats.sem(logs))
    expected = [100 * math.expm1(end) for end in (logs.mean(), *ends)]
    np.testing.assert_allclose([cell.value, cell.low, cell.high], expected)
    assert (cell.n, cell.word) == (12, AS_PUBLISHED)
    lowest, highest = 100 * math.expm1(-0.3), 100 * math.expm1(-0.1)
    assert cell.untrained_words == f"untrained {lowest:.1f} to {highest:.1f} %".replace("-", "−")


def test_a_cell_in_words():
    cell = Cell(AS_PUBLISHED, "change", -18.21, -19.0, -17.44, 64, (-12.1, -9.3))
    said = "as published: −18.2 % [−19.0, −17.4], untrained −12.1 to −9.3 %, n = 64"
    assert str(cell) == said
    nowhere = Cell(NOT_MEASURABLE, "share", note="it has one layer")
    assert str(nowhere) == "not measurable here: it has one layer"
    assert Cell(UNCLEAR, "points", -0.01, -1.0, 1.0, 9).value_words == "+0.0 points [−1.0, +1.0]"


def graded(outcomes):
    """An evaluation of one problem per pair (right in the baseline, right with “/”)."""
    baseline, slash = zip(*outcomes, strict=True)
    return by_hand.evaluation({"conditions": ["baseline", "slash"]}, baseline=baseline, slash=slash)


def test_an_accuracy_has_the_exact_test_and_its_power():
    gained, lost = [(False, True)] * 9, [(True, False)] * 1
    outcomes = gained + lost + [(True, True)] * 20 + [(False, False)] * 10
    cell = accuracy_cell(STATEMENTS["tokens_help"], graded(outcomes))
    p = 2 * sum(math.comb(10, k) for k in (0, 1)) / 2**10
    assert cell.value == pytest.approx(100 * 8 / 40)
    assert (cell.n, cell.word) == (40, AS_PUBLISHED)
    assert "52.5 → 72.5 %; 9 problems gained, 1 lost" in cell.note
    assert f"exact McNemar p = {p:.2g}" in cell.note
    assert "80 % power" in cell.note

    swapped = [(after, before) for before, after in outcomes]
    assert accuracy_cell(STATEMENTS["tokens_help"], graded(swapped)).word == OPPOSITE
    same = accuracy_cell(STATEMENTS["tokens_help"], graded([(True, True), (False, False)] * 5))
    assert (same.word, "exact McNemar p = 1;" in same.note) == (UNCLEAR, True)
