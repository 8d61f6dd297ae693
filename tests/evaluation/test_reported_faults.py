r"""Answers as models write them: read to their end, from the strongest mark, or counted as unread."""

import json
from fractions import Fraction

import pytest

from mechattn.evaluation.grader import final_answer, grade, grader_for, number_in
from tests.conftest import SHARED, need


def read(text):
    answer = final_answer(text)
    return None if answer is None else number_in(answer)


# A number is read to its end.


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("2 1/2", Fraction(5, 2)),
        (r"$2\frac{1}{2}$", Fraction(5, 2)),
        ("-2 1/2", Fraction(-5, 2)),
        ("10^3", 1000),
        ("10^{3}", 1000),
        ("10**3", 1000),
        ("1e3", 1000),
        ("2.5E-1", Fraction(1, 4)),
        (r"1.2 \times 10^6", 1_200_000),
        ("1.2 million", 1_200_000),
        ("3 dozen eggs", 36),
        (r"\frac43", Fraction(4, 3)),
        (r"11,\! 111,\! 100", 11_111_100),
        (r"\$32,\!348", 32_348),
        (r"90^\circ", 90),
        ("50%", 50),
        ("18 dollars", 18),
        ("$18 a day", 18),
        ("18 - that is, all of them", 18),
        ("18kg", 18),
        ("18!", 18),
        ("12-inch boards", 12),
        ("16/day", 16),
    ],
)
def test_a_number_is_read_to_its_end(written, value):
    assert read(f"The answer is {written}") == value


@pytest.mark.parametrize(
    "written",
    [
        "2 and a half",
        "3 or 4",
        "3, 5, 7",
        "5-6",
        "8:30",
        "5 feet 3 inches",
        "10 000",
        "2x",
        r"3\sqrt{13}",
        r"2\pi",
        r"(3, \frac{\pi}{2})",
        "52_8",
        "x - 5",
        "2 + 3",
        r"4 \cdot x",
        "3(4)",
        "1.2.3",
        "3k",
        r"x \le 5",
        "x <= 5",
        "x != 5",
        "n ≥ 5",
        "five",
        "9" * 5000,
    ],
)
def test_what_is_more_than_a_number_is_unread(written):
    assert read(f"The answer is {written}") is None


LONG = "1" * 4301  # more digits than Python turns into a number, or a number into


@pytest.mark.parametrize(
    "written",
    [
        "99999999999^{400}",
        f"10^{LONG}",
        f"2^{LONG}",
        f"1e{LONG}",
        f"\\frac{{{LONG}}}{{2}}",
        f"1 1/{LONG}",
    ],
)
@pytest.mark.parametrize("grader", ["number", "auto"])
def test_a_number_too_long_to_write_is_unread(written, grader):
    pytest.importorskip("math_verify")
    assert not grade(f"\\boxed{{{written}}}", "5", grader).right


# Which number counts: the table of docs/concepts/evaluation.

RULE = [
    # a box beats every other mark, and the last box counts
    (r"The answer is 4. \boxed{18} To check the answer, we verify 9 * 2", 18),
    (r"\boxed{5}, no: \boxed{18}", 18),
    (r"\boxed{9 \times 2 = 18}", 18),
    (r"\boxed{\text{18 dollars}}", 18),
    (r"\fbox{18}", 18),
    (r"\boxed{1", None),
    # "####" with a value on its line: the first
    ("#### 18\n\nTom has 3 apples.\n#### 5", 18),
    ("The answer is 4.\n#### 18", 18),
    ("#### Step 1: 9 * 2 = 18 dollars.", 18),
    # "answer is" or "answer:", on its line or the next with something in it: the last with a value
    ("Final answer:\n\n42", 42),
    ("### Answer:\n\n**18**", 18),
    ("**Answer:** 18", 18),
    ("Answer: 5. No, wait. Answer: 6", 6),
    ("The answer to the question is 18.", 18),
    # within it, the value after the last "="
    ("The answer is 3 * 4 = 12.", 12),
    ("The answer is 2 + 3 = 5", 5),
    ("Answer: x = 7", 7),
    # one number among words; of several none is chosen
    ("Answer: she makes $18 every day", 18),
    ("Answer: she sells 9 eggs and makes 18", None),
    ("The answer is 5 apples and 3 pears.", 5),
    # without a mark, the value after the last "="
    ("So she makes 9 * 2 = $18 every day.", 18),
    ("So she makes 18 dollars.", None),
    ("So x <= 5", None),
    ("So she makes 18, and x >= 5.", None),
    # as models write a thousand in LaTeX
    (r"The answer is $14{,}916$.", 14916),
    (r"The answer is $14 {, }916$.", 14916),
    # as reported: lm-evaluation-harness 3254 and 2552, omlx 3484, Math-Verify 44
    ("The answer is $29.00.", 29),
    (r"Thus the answer is \[ \boxed{42} \]", 42),
    ("The answer is 72 clips, altogether.", 72),
    ("\\boxed{840}., but let me explain.\n\n**Final Answer**\n\\boxed{840}", 840),
    # a new problem ends the text
    ("The answer is 18.\n\nQuestion: Tom has 3. The answer is 3.", 18),
    (r"\boxed{18}" + "\nQ: What is 2 + 3?\n" + r"\boxed{5}", 18),
]


@pytest.mark.parametrize(("text", "value"), RULE)
def test_which_number_counts(text, value):
    assert read(text) == value


@pytest.mark.parametrize(
    "solutions",
    [
        r"x=3 \text{ or } x=7",
        "x = 3, x = 7",
        "x=3; y=7",
        r"x_1 = -\frac{1}{2}, \quad x_{2} = 7",
        r"x = 3 \quad\text{and}\quad y = 7",
        r"f(1) = 3, f(2) = 7",
    ],
)
def test_several_solutions_are_no_number(solutions):
    assert number_in(solutions) is None
    assert grader_for(f"\\boxed{{{solutions}}}") == "math"


@pytest.mark.parametrize(
    "steps",
    ["1,000 + 5 = 1,005", "3 * 4 = 12, 12 + 993 = 1,005", "If x = 5, then 201x = 1,005"],
)
def test_steps_before_the_last_value_are_no_solutions(steps):
    assert number_in(steps) == 1005


# A text that was cut off has no answer, unless a new problem had begun.


@pytest.mark.parametrize("text", ["The answer is 1", r"\boxed{18}, since", "9 * 2 = 1", "#### 1"])
@pytest.mark.parametrize("grader", ["number", "math", "auto"])
def test_a_text_that_was_cut_off_has_no_answer(text, grader):
    assert grade(text, "18", grader, finished=False).answer is None


def test_an_answer_before_a_new_problem_is_whole():
    text = "#### 18\n\nQuestion: Tom has 3 app"
    assert grade(text, "18", finished=False).right


def test_a_restated_problem_is_not_a_new_one():
    text = (
        "I restate it.\n\n**Problem:** find x.\n\n\\boxed{5}\n\n**Problem:** find y.\n\n\\boxed{6}"
    )
    assert final_answer(text) == "5"
    assert final_answer("I restate it.\n\n**Problem:** find x, the", finished=False) is None
    # The first "=", too, stands in an answer: what follows is a new problem.
    assert final_answer("3 * 4 = 12\n\nQuestion: Tom has 5.\n#### 5") == "12"


# "number" only where reference and answer are numbers.


@pytest.mark.parametrize(
    ("solution", "kind"),
    [
        (r"3\sqrt{13}", "math"),
        (r"\frac43", "number"),
        (r"(3, \pi/2)", "math"),
        ("52_8", "math"),
        ("1,-2", "math"),
        (r"10,\!080", "number"),
        (r"5.4 \text{ cents}", "math"),
        (r"so it is $\boxed{3\sqrt{2}}$.", "math"),
        ("48 / 2 = 24\n#### 72", "number"),
    ],
)
def test_kinds_of_references(solution, kind):
    assert grader_for(solution) == kind


@pytest.mark.parametrize(
    ("text", "solution", "right"),
    [
        (r"\boxed{2\sqrt{4}}", "4", True),
        (r"\boxed{\sqrt{16}}", "5", False),
        (r"\boxed{3}", r"3\sqrt{13}", False),
        (r"\boxed{43}", r"\frac43", False),
        (r"\boxed{3}", r"(3, \pi/2)", False),
        ("The answer is Evelyn.", r"\text{Evelyn}", True),
        ("The answer is Evan.", r"\text{Evelyn}", False),
        (r"\boxed{x = 5}", "x=5", True),
        (r"Answer: $\frac{14}{3}$", r"\frac{14}{3}", True),
        # lm-evaluation-harness, tests of minerva_math
        (r"\boxed{\sqrt[3]2}", r"\sqrt[3]{2}", True),
        (r"\boxed{\sqrt8}", r"2\sqrt{2}", True),
        (r"\boxed{\sqrt[4]{16}}", "2", True),
        (r"\boxed{(0,1)}", "0, 1", True),
        (r"\boxed{(4,2)}", "(2,4)", False),
        (r"\boxed{[2,6)}", "[2,5)", False),
        (r"\boxed{12,34}", "1234", False),
        (r"\boxed{\text{west}}", r"\text{east}", False),
        (r"\boxed{\text{}}", r"\text{}", False),
    ],
)
def test_answers_beside_expressions(text, solution, right):
    pytest.importorskip("math_verify")
    assert grade(text, solution).right == right


def test_references_of_math_and_gsm8k_beside_themselves():
    pytest.importorskip("math_verify")
    math, gsm8k = (SHARED / "data" / f"{name}_test.jsonl" for name in ("math500", "gsm8k"))
    need("questions", math.exists() and gsm8k.exists(), f"there is no {math}")
    worked = [json.loads(line)["answer"] for line in gsm8k.read_text("utf-8").splitlines()]
    assert all(grader_for(solution) == "number" for solution in worked)
    assert all(grade(solution, solution).right for solution in worked)
    others = [worked[-1], *worked[:-1]]
    assert sum(grade(text, solution).right for text, solution in zip(worked, others)) < 50
    answers = [json.loads(line)["answer"] for line in math.read_text("utf-8").splitlines()]
    wrong = [answer for answer in answers if not grade(f"\\boxed{{{answer}}}", answer).right]
    assert wrong == []
