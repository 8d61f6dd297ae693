"""Write the questions that come with the package: python experiments/toys/ship.py"""

import json
from itertools import islice
from pathlib import Path

from generated_problems import recall_questions, word_problems

PROMPTS = Path(__file__).parents[2] / "mechattn" / "prompts"
# How many questions of each seed: 0 is the default, 1 holds others to check a choice of heads,
# 11 those of experiments/accuracy, and 977 those that calibrate thresholds of activations.
WORD_PROBLEMS = {0: 512, 1: 128, 11: 200, 977: 16}
RECALL = {0: 256}


def main() -> None:
    """Both files, one question a line."""
    problems = [
        {
            "seed": seed,
            "question": problem.question,
            "answer": problem.answer,
            "solution": problem.solution,
            "template": problem.template,
        }
        for seed, count in WORD_PROBLEMS.items()
        for problem in islice(word_problems("test", seed=seed), count)
    ]
    questions = [
        {
            "seed": seed,
            "question": question.question,
            "answer": question.answer,
            "solution": question.solution,
        }
        for seed, count in RECALL.items()
        for question in islice(recall_questions("test", seed=seed), count)
    ]
    for name, rows in (("word_problems.jsonl", problems), ("recall.jsonl", questions)):
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (PROMPTS / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
