"""Evaluations whose answers are written by hand."""

from mechattn.evaluation.answer_file import GradedAnswer
from mechattn.evaluation.evaluation import Evaluation


def answer(prompt, condition="baseline", right=True, **fields):
    """A graded answer; what is not given says nothing."""
    usual = {"sample": 0, "text": "", "tokens": (5,), "answer": None, "solution": "1"}
    fields = usual | {"finished": True, "logprob": 0.0} | fields
    return GradedAnswer(prompt=str(prompt), condition=condition, right=bool(right), **fields)


def evaluation(provenance=None, **right_by_condition):
    """One answer to each of some problems under each condition, right or wrong."""
    answers = []
    for condition, right in right_by_condition.items():
        answers += [answer(number, condition, is_right) for number, is_right in enumerate(right)]
    return Evaluation(tuple(answers), provenance or {})
