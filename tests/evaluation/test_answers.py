"""Final answers that people and models write, read by hand."""

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

from mechattn.errors import OptionError
from mechattn.evaluation.grader import check_grader, final_answer, grade, number_in

F = Fraction
NUMBERS = [
    ("3 + 4 = 7. Answer: 7", 7),
    ("ANSWER 7", 7),
    ("Answer: .5", F(1, 2)),
    ("Answer: −4", -4),
    ("Answer: 3 / 4 of the cake", F(3, 4)),
    ("Answer: 50%", 50),
    (r"\boxed{-\frac{3}{4}}", F(-3, 4)),
    (r"\boxed{\left(3\right)}", 3),
    (r"\boxed{(3,000)}", None),
    ("Answer: 7. The answer is in apples.", 7),
    ("Answer: 2^3", 8),
    ("Answer: 8:30", None),
    ("", None),
    ("I don't know.", None),
    ("Answer:", None),
    ("Answer: seven", None),
    ("Answer: 1/0", None),
    (r"\boxed{}", None),
]


@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_final_number(text, number):
    answer = final_answer(text)
    assert (answer and number_in(answer)) == number


@pytest.mark.parametrize(
    ("text", "is_right"),
    [(r"$\boxed{2\sqrt{3}}$", True), (r"$\boxed{2\sqrt{5}}$", False)],
)
def test_expressions(text, is_right):
    assert grade(text, r"\sqrt{12}", "math").right == is_right


def test_two_hundred_real_answers_are_graded_as_by_hand():
    """Forty of Qwen2.5-Coder-0.5B's a condition, drawn from experiments/real/2026-11-26-accuracy.md.

    Two readers wrote down each final value, without the grader's; null where there is no single one.
    """
    lines = (Path(__file__).parent / "qwen_answers.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line) for line in lines]
    assert len(answers) == 200
    differs_from_last_number = 0
    for answer in answers:
        by_hand = answer["by_hand"] and F(answer["by_hand"])
        graded = grade(answer["text"], answer["reference"], "number", finished=answer["finished"])
        assert (graded.answer and F(graded.answer)) == by_hand, answer["text"]
        assert graded.right == (by_hand == F(answer["reference"].replace(",", "")))
        last_number = re.findall(r"\d[\d,]*\.?\d*", answer["text"])[-1]
        differs_from_last_number += F(last_number.replace(",", "").rstrip(".")) != by_hand
    assert differs_from_last_number > 10  # a reader of the last number would be noticed


def test_bad_input():
    with pytest.raises(OptionError, match="grader='exact': choose one of"):
        check_grader("exact")
    with pytest.raises(OptionError, match="does not end in a number"):
        grade("Answer: 7", "x + 1", "number")
