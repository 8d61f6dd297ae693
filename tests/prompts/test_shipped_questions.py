"""Word problems that come with the package: what the generator gives, deterministic, right, varied, and split so that no test problem is a training problem."""

import re
from itertools import islice
from pathlib import Path

import pytest

import mechattn as ma
from experiments.toys.generated_problems import (
    LARGEST,
    recall_questions,
    word_problems,
)
from mechattn.errors import OptionError
from mechattn.prompts import datasets


def some(split="test", count=300, **options):
    return list(islice(word_problems(split, **options), count))


def test_every_worked_answer_is_right():
    for problem in some("train", 200) + some("test", 200):
        *sums, last = re.split(r"(?<=\.) ", problem.answer)
        value = None
        for line in sums:
            left, operation, total = re.fullmatch(r"(\d+) ([-+*÷] \d+) = (\d+)\.", line).groups()
            assert value in (None, int(left))
            value = eval(left + operation.replace("÷", "/"))
            assert value == int(total)
            assert 0 < value <= LARGEST
        assert last == f"Answer: {int(value)}"
        assert problem.solution == value
        assert len(sums) == problem.steps


def test_no_test_problem_is_a_training_problem():
    train, test = some("train", 1000, steps=(1, 2)), some("test", 400, steps=(1, 2))
    assert not {p.chain for p in train} & {p.chain for p in test}
    assert not {p.question for p in train} & {p.question for p in test}


def test_only_word_problems_bring_a_system_text(tmp_path):
    (tmp_path / "my.jsonl").write_text('{"question": "Why?"}')
    for source, own in (
        ("word-problems", datasets.SYSTEM),
        ("recall", ""),
        (tmp_path / "my.jsonl", ""),
    ):
        for asked, given in ((None, own), ("", ""), ("Be brief.", "Be brief.")):
            assert {prompt.system for prompt in ma.load_prompts(source, limit=2, system=asked)} == {
                given
            }


@pytest.mark.parametrize(("seed", "count"), [(0, 512), (977, 16)])
def test_shipped_word_problems_are_those_of_the_generator(seed, count):
    prompts = ma.load_prompts("word-problems", limit=count, seed=seed, with_answer=True)
    generated = some(seed=seed, count=count)
    assert [prompt.question for prompt in prompts] == [problem.question for problem in generated]
    assert [prompt.answer for prompt in prompts] == [problem.answer for problem in generated]
    assert [prompt.group for prompt in prompts] == [problem.template for problem in generated]
    assert [prompt.solution for prompt in prompts] == [
        str(problem.solution) for problem in generated
    ]


def test_shipped_recall_questions_are_those_of_the_generator():
    prompts = ma.load_prompts("recall", limit=256, with_answer=True)
    generated = list(islice(recall_questions("test"), 256))
    assert [prompt.question for prompt in prompts] == [question.question for question in generated]
    assert [prompt.answer for prompt in prompts] == [question.answer for question in generated]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 11, "limit": 201}, "limit=201: .* 200 'word-problems' questions with seed=11"),
        ({"seed": 7}, "seed=7: .* 'word-problems' questions .* seeds: 0, 1, 11, 977"),
        ({"split": "train"}, "split='train': .* are all of the split .test."),
    ],
)
def test_more_than_the_package_has_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        ma.load_prompts("word-problems", **options)


def test_gsm8k_is_that_of_the_data_set(questions):
    """Beside the file of the whole test split, read as any file of prompts."""
    ours = ma.load_prompts("gsm8k", limit=200)
    assert ours == ma.load_prompts(str(questions), limit=200)
    assert "#### 18" in ours[0].solution


def test_gsm8k_has_its_licence_beside_it():
    notice = Path(datasets.__file__).with_name("gsm8k.LICENSE").read_text()
    assert "Copyright (c) 2021 OpenAI" in notice
    assert "Permission is hereby granted" in notice
