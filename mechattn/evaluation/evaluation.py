"""Evaluations: accuracy with intervals, paired comparisons, pass@k, and the effect of a transplant
on answers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mechattn.axes import BASELINE
from mechattn.errors import OptionError, check_choice, check_counts
from mechattn.evaluation.answer_file import GradedAnswer, read_answers, write_answers
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.results.provenance import digest
from mechattn.stats.accuracy import (
    paired_accuracy,
    pass_at_k,
    share_deviation,
    share_difference,
    share_interval,
)
from mechattn.stats.intervals import FEWEST
from mechattn.stats.paired import false_discovery, paired
from mechattn.stats.units import Unit, Units, detectable_size

# The fraction of answers above which those that were cut off, or that end without a final answer,
# are mentioned.
_MANY = 0.1
_NEGLIGIBLE = 1.1  # a factor of a variance: the width of an interval then changes by 5 % at most


@dataclass(frozen=True, repr=False)
class Evaluation:
    """All answers of a run, with their provenance."""

    answers: tuple[GradedAnswer, ...]
    provenance: Mapping[str, Any]

    def __repr__(self) -> str:
        accuracies = []
        for name in self.conditions:
            accuracy = np.mean([answer.right for answer in self._answers_under(name)])
            accuracies.append(f"{name} {100 * accuracy:.1f} %")

        line = (
            f"Evaluation({len(self._problems())} problems × {len(accuracies)} conditions; right:"
            f" {', '.join(accuracies)})"
        )
        return "\n".join([line, *self.cautions])

    @property
    def conditions(self) -> list[str]:
        """The conditions in the order of the run, the baseline first."""
        names_in_answers = dict.fromkeys(answer.condition for answer in self.answers)
        recorded_names = self.provenance.get("conditions", ())
        all_names = dict.fromkeys([*recorded_names, *names_in_answers])
        return [name for name in all_names if name in names_in_answers]

    @property
    def cautions(self) -> list[str]:
        """Sentences to read before the accuracies; an empty list if there is nothing to say.

        They name the conditions under which answers are missing, or under which more than a tenth
        of the answers were cut off, or ended by themselves without a final answer. They also say
        if the baseline has several answers and all are right, or all are wrong.
        """
        expected_count = len(self._problems()) * self.samples
        missing_shares = []
        cut_off_shares = []
        unread_shares = []
        # A condition may have no answers at all if it was added by a run that was interrupted.
        for name in dict.fromkeys([*self.conditions, *self.provenance.get("conditions", ())]):
            answers = self._answers_under(name)
            count = len(answers)
            cut_off_count = sum(not answer.finished for answer in answers)
            # An answer that was cut off may have been about to give its final answer.
            unread_count = sum(answer.finished and answer.answer is None for answer in answers)
            if count < expected_count:
                missing_count = expected_count - count
                missing_shares.append(f"{missing_count} of {expected_count} under {name!r}")
            if cut_off_count > _MANY * count:
                cut_off_shares.append(f"{cut_off_count} of {count} under {name!r}")
            if unread_count > _MANY * count:
                unread_shares.append(f"{unread_count} of {count} under {name!r}")

        cautions = []
        if missing_shares:
            cautions.append(
                f"answers are missing ({', '.join(missing_shares)}), as after an interrupted run."
            )
        if cut_off_shares:
            cautions.append(
                f"many answers were cut off and count as wrong ({', '.join(cut_off_shares)}). Allow"
                " more new_tokens before you compare."
            )
        if unread_shares:
            cautions.append(
                f"many answers end without a final answer ({', '.join(unread_shares)}). Does the"
                " prompt ask for a mark, such as \\boxed{…}?"
            )

        is_right = [answer.right for answer in self._answers_under(BASELINE)]
        if len(is_right) > 1 and all(is_right):
            cautions.append("every answer of the baseline is right, so accuracy can only fall.")
        if len(is_right) > 1 and not any(is_right):
            cautions.append("no answer of the baseline is right, so accuracy can only rise.")
        return [f"Careful: {caution}" for caution in cautions]

    @property
    def samples(self) -> int:
        """The number of answers to each problem under each condition; 0 if there are none."""
        last_sample = max((answer.sample for answer in self.answers), default=-1)
        return last_sample + 1

    def right(self, condition: str) -> np.ndarray:
        """Whether each answer is right [problem, sample], in the order of the prompts.

        Raises:
            OptionError: There is no such condition, or some of its answers are missing.
        """
        check_choice(self.conditions, condition=condition)
        is_right_by_key = {
            (answer.prompt, answer.sample): answer.right
            for answer in self._answers_under(condition)
        }
        is_right = [
            is_right_by_key.get(key) for key in product(self._problems(), range(self.samples))
        ]
        missing_count = is_right.count(None)
        if missing_count:
            raise OptionError(
                f"{missing_count} answers under {condition!r} are missing, as after an interrupted"
                " run or one with fewer problems: call evaluate with out=… and all problems and"
                " conditions"
            )

        return np.array(is_right, dtype=bool).reshape(-1, self.samples)

    def accuracy(self, level: float = 0.95, *, unit: Unit = "auto") -> pd.DataFrame:
        """The accuracy of each condition with its interval.

        This is Wilson's interval, or with several samples a score interval over problems. If
        prompts share groups (``Prompt.group``), the accuracy is the mean over groups of each
        group's accuracy, with a score interval over groups. Groups that could change the width of
        an interval by no more than 5 % are ignored. The score interval doesn't shrink to a point
        if all answers are right.

        Args:
            level: The level of the intervals.
            unit: "auto" uses groups of prompts as units if there are any; "prompt" uses single
                problems.

        Returns:
            A row for each condition: condition, accuracy, low, high, n (problems or their groups),
            unread (answers without a final answer, whether the model ended them or not), unfinished
            (answers that reached the limit), tokens (the mean length). ``table.attrs["unit"]``
            names the unit of n, and ``table.attrs["cautions"]`` holds :attr:`cautions`.

        Raises:
            OptionError: Some answers are missing, there are too few groups, or the level is not
                between 0.5 and 1.
        """
        units = self._units(unit)
        rows = []
        for name in self.conditions:
            answers = self._answers_under(name)
            interval = share_interval(units.means(self.right(name).mean(1)), level)
            rows.append(
                {
                    "condition": name,
                    "accuracy": interval.estimate,
                    "low": interval.low,
                    "high": interval.high,
                    "n": units.n,
                    "unread": sum(answer.answer is None for answer in answers),
                    "unfinished": sum(not answer.finished for answer in answers),
                    "tokens": np.mean([len(answer.tokens) for answer in answers]),
                }
            )

        table = pd.DataFrame(rows)
        table.attrs = {"unit": units.unit, "cautions": self.cautions}
        return table

    def compare(
        self,
        condition: str,
        to: str = BASELINE,
        *,
        other: Evaluation | None = None,
        unit: Unit = "auto",
    ) -> dict[str, Any]:
        """The difference between the accuracies of two conditions on the same problems.

        With one answer per problem it has Newcombe's interval and the mid-p McNemar test. With
        several answers, the fraction of right answers to each problem is compared, with a t
        interval and a sign-flip test over problems. The interval is widened if few problems differ,
        so that it doesn't shrink to a point. With groups of prompts the same is done with the means
        of groups, since McNemar's test assumes independent problems.

        Args:
            condition: The condition whose accuracy is the first term of the difference.
            to: The condition to compare with.
            other: The evaluation that contains ``to``; this one by default.
            unit: "auto" uses groups of prompts as units if there are any; "prompt" uses single
                problems.

        Returns:
            "difference", from -1 to 1, with "low" and "high" at 95 %; "p", and "test", which is
            "mcnemar" or "sign_flip"; "n", the number of problems or of their groups;
            "detectable", the smallest difference that would be found with 80 % power, NaN if there
            is none; and with one answer per problem "only_first" and "only_second", the numbers of
            problems that are right under only one of the two.

        Raises:
            OptionError: There is no such condition, some answers are missing, the problems differ,
                or there are too few problems or groups.
        """
        if other is None:
            other = self
        if self._problems() != other._problems():
            raise OptionError(
                "the two evaluations have different problems, but a comparison is by problem"
            )

        first = self.right(condition)
        # The other evaluation may have the problems in another order.
        second = other._restricted_to(list(self._problems())).right(to)

        units = self._units(unit)
        only_one_right = {}
        if first.shape[1] == second.shape[1] == 1:  # one answer to each problem
            mcnemar = paired_accuracy(first[:, 0], second[:, 0])
            if units.group_of_prompt is None:
                return asdict(mcnemar) | {"test": "mcnemar"}
            # Of McNemar's figures only the counts hold for problems that share groups.
            only_one_right = {
                "only_first": mcnemar.only_first,
                "only_second": mcnemar.only_second,
            }

        differences = units.means(first.mean(1) - second.mean(1))
        interval = share_difference(differences)
        return {
            "difference": interval.estimate,
            "low": interval.low,
            "high": interval.high,
            "p": float(paired(differences, bootstrap_ends=False).p_flip),
            **only_one_right,
            "n": units.n,
            "detectable": share_deviation(differences) * detectable_size(units.n),
            "test": "sign_flip",
        }

    def comparisons(self, to: str = BASELINE, *, unit: Unit = "auto") -> pd.DataFrame:
        """Compare every other condition with one, as one family of tests.

        The more conditions are compared, the more likely one of them differs by chance; q takes
        this into account. ``ma.adjust`` takes these tables too, for a family over several
        evaluations.

        Args:
            to: The condition to compare with.
            unit: As for :meth:`compare`.

        Returns:
            A row for each other condition: condition, to, and what :meth:`compare` gives. The
            column q, next to p, is computed over all rows.

        Raises:
            OptionError: As for :meth:`compare`, or there is no other condition.

        Source:
            Benjamini and Hochberg 1995.
        """
        names = [name for name in self.conditions if name != to]
        if not names:
            raise OptionError(f"there is no condition other than {to!r} to compare with it")
        rows = [
            {"condition": name, "to": to, **self.compare(name, to, unit=unit)} for name in names
        ]
        table = pd.DataFrame(rows)

        q = false_discovery(table.p.to_numpy())
        table.insert(table.columns.get_loc("p") + 1, "q", q)
        table.attrs = {
            "models": self.provenance.get("model", ""),
            "to": to,
            "answers": digest(self.answers),
        }
        return table

    def best(self, conditions: Sequence[str] | None = None) -> dict[str, Any]:
        """Choose the best condition on one half of the problems, and compare it with the baseline
        on the other half.

        The accuracy of the best of many conditions is too high on the problems by which it was
        chosen, even if no condition has an effect. The halves depend only on the ids and groups of
        the problems, and no group is divided.

        Args:
            conditions: The candidates; all but the baseline by default.

        Returns:
            What :meth:`compare` gives on the second half; "condition", the name of the best one;
            "accuracy" and "baseline", its accuracy and the baseline's on the second half, as in
            :meth:`accuracy`; and "chosen_on", its accuracy on the first half.

        Raises:
            OptionError: There is no condition other than the baseline, a candidate was not
                evaluated, or a half has too few problems (or groups of them) for :meth:`compare`.
        """
        if conditions is None:
            conditions = self.conditions
        candidates = [name for name in conditions if name != BASELINE]
        group_of = self._groups()

        def arbitrary_key(problem: str) -> bytes:
            # Sorts groups in an arbitrary order that is the same on every machine.
            return hashlib.sha256(group_of[problem].encode("utf-8", "replace")).digest()

        problems = sorted(group_of, key=arbitrary_key)
        units = Units.grouped([group_of[problem] for problem in problems])
        if not candidates or units.n < 2:
            raise OptionError(
                "best needs at least one condition other than the baseline, and at least two"
                " problems (or groups of problems)"
            )

        first_indices, second_indices = units.halves()
        first_half = self._restricted_to([problems[index] for index in first_indices])
        second_half = self._restricted_to([problems[index] for index in second_indices])

        # The first by name of equally good ones, whatever the order of the run.
        best_name = max(sorted(candidates), key=first_half._accuracy)
        return {
            "condition": best_name,
            "chosen_on": first_half._accuracy(best_name),
            "accuracy": second_half._accuracy(best_name),
            "baseline": second_half._accuracy(BASELINE),
            **second_half.compare(best_name),
        }

    def pass_at_k(
        self, k: int | Sequence[int], level: float = 0.95, *, unit: Unit = "auto"
    ) -> pd.DataFrame:
        """The probability that at least one of k answers is right, with an interval over problems.

        Args:
            k: One number of answers, or several.
            level: The level of the intervals.
            unit: As for :meth:`accuracy`.

        Returns:
            A row for each condition and k: condition, k, estimate, low, high.

        Raises:
            OptionError: No k is given, k is below 1 or above the number of samples, or as for
                :meth:`accuracy`.
        """
        draw_counts = np.atleast_1d(k).tolist()
        if not draw_counts:
            raise OptionError(f"k={k!r}: give at least one number of answers")
        for draw_count in draw_counts:
            check_counts(k=draw_count)

        units = self._units(unit)
        rows = []
        for name in self.conditions:
            right_counts = self.right(name).sum(1)
            for draw_count in draw_counts:
                probabilities = pass_at_k(right_counts, self.samples, draw_count)
                interval = share_interval(units.means(probabilities), level)
                rows.append({"condition": name, "k": draw_count, **interval._asdict()})

        return pd.DataFrame(rows)

    def follows(
        self,
        condition: str,
        sources: Mapping[str, str],
        without: str,
        *,
        level: float = 0.95,
        unit: Unit = "auto",
    ) -> dict[str, Any]:
        """The fraction of problems that get their source's answer instead of their own after a
        transplant.

        A problem is left out, and counted as "alike", if its own answer and its source's are equal
        or one of them cannot be read.

        Args:
            condition: The condition with the :class:`~mechattn.interventions.recorded.KVPatch`.
            sources: The source of each problem's keys and values: ``KeysValues.sources``.
            without: The same condition without the transplant, which gives both reference answers.
            level: The level of the interval.
            unit: As for :meth:`accuracy`.

        Returns:
            "condition"; "followed" with "low" and "high" (a score interval); "kept", the fraction
            that kept their own answer; "by_chance", how often the answer is that of an unrelated
            prompt; "n", the number of problems or of their groups, over which all fractions are
            means; "alike".

        Raises:
            OptionError: There is no such condition, some answers are missing, there are several
                answers per problem, a source has no answer, no answer differs from its source's,
                or there are too few groups.
        """
        if self.samples > 1:
            raise OptionError(
                f"{self.samples} answers per problem: follows needs one answer per problem"
                " (samples=1)"
            )

        own_answers = self._final_answers(without)
        answers = self._final_answers(condition)
        distinct_problems = _with_distinct_sources(own_answers, sources)
        if not distinct_problems:
            raise OptionError(
                f"under {without!r} no prompt's answer differs from its source's, so they cannot be"
                " distinguished"
            )

        readable_answers = pd.Series(own_answers).dropna()
        rows = []
        for problem in distinct_problems:
            answer = answers[problem]
            source = sources[problem]
            unrelated_answers = readable_answers.drop([problem, source])
            rows.append(
                {
                    "followed": answer == own_answers[source],
                    "kept": answer == own_answers[problem],
                    # NaN if there is no unrelated prompt.
                    "by_chance": (unrelated_answers == answer).mean(),
                }
            )

        table = pd.DataFrame(rows, dtype=float)
        units = self._restricted_to(distinct_problems)._units(unit)
        shares = pd.DataFrame(units.means(table.to_numpy()), columns=table.columns)
        interval = share_interval(shares.followed.to_numpy(), level)
        return {
            "condition": condition,
            "followed": interval.estimate,
            "low": interval.low,
            "high": interval.high,
            "kept": float(shares.kept.mean()),
            "by_chance": float(shares.by_chance.mean()),
            "n": units.n,
            "alike": len(own_answers) - len(distinct_problems),
        }

    def answered(
        self, prompts: Sequence[Prompt], condition: str = BASELINE, sample: int = 0
    ) -> list[Prompt]:
        """The prompts with their generated answers, for a run that reads both in one pass.

        The answers are token ids in the segment "answer". All conditions of such a run read the
        same answer, so differences between them are not due to its text.

        Args:
            prompts: The evaluated prompts, or some of them.
            condition: The condition under which the answers were generated.
            sample: Which of several answers, from 0.

        Raises:
            OptionError: There is no such condition or sample, a prompt has no answer or an empty
                one, or the problem that was evaluated under a prompt's id has another solution.
        """
        check_choice(self.conditions, condition=condition)
        if not 0 <= sample < self.samples:
            raise OptionError(
                f"sample={sample}: the evaluation has {self.samples} answers to each problem,"
                " counted from 0"
            )
        answers = self._answers_by_problem(condition, sample)
        answered_prompts = []
        for prompt in as_prompts(prompts):
            answer = answers.get(prompt.id)
            if answer is None or not answer.tokens:
                raise OptionError(f"prompt {prompt.id} has no answer under {condition!r}; omit it")
            if prompt.solution != answer.solution:
                raise OptionError(
                    f"prompt {prompt.id} has another solution than the problem that was evaluated"
                    " under this id, or none; give the prompts as they were evaluated, with their"
                    " ids"
                )
            answered_prompt = replace(prompt, answer=answer.text, answer_tokens=answer.tokens)
            answered_prompts.append(answered_prompt)

        return answered_prompts

    def to_dataframe(self) -> pd.DataFrame:
        """Return a table with one row per answer."""
        return pd.DataFrame([asdict(answer) for answer in self.answers])

    def save(self, path: str | Path) -> None:
        """Save as JSON lines: the provenance, then a line for each answer.

        The file is written completely or not at all.

        Raises:
            OutputError: The path cannot be written to, or an existing file is not an evaluation.
        """
        write_answers(Path(path), self.provenance, self.answers)

    def _answers_under(self, condition: str) -> list[GradedAnswer]:
        """The answers under a condition."""
        return [answer for answer in self.answers if answer.condition == condition]

    def _problems(self) -> dict[str, str]:
        """The reference of each problem by its id, in the order of the answers."""
        return {answer.prompt: answer.solution for answer in self.answers}

    def _units(self, unit: Unit) -> Units:
        """The problems, or their groups, in the order of ``right``.

        Raises:
            OptionError: There are no answers, or too few groups.
        """
        check_choice(Unit, unit=unit)
        group_of = self._groups()
        if not group_of:
            raise OptionError(
                "the evaluation has no answers, as after an interrupted run: call evaluate with"
                " out=… again"
            )
        units = Units.grouped(list(group_of.values()))
        if unit == "prompt" or units.inflation <= _NEGLIGIBLE:
            return Units(len(group_of))
        units.refuse_below(FEWEST)
        return units

    def _groups(self) -> dict[str, str]:
        """The group of each problem by its id; a problem without one is a group of its own."""
        groups = self.provenance.get("groups", {})
        return {problem: groups.get(problem, problem) for problem in self._problems()}

    def _restricted_to(self, problems: Sequence[str]) -> Evaluation:
        """The evaluation of some problems only, in their order."""
        index_of = {problem: index for index, problem in enumerate(problems)}
        answers = [answer for answer in self.answers if answer.prompt in index_of]
        answers.sort(key=lambda answer: index_of[answer.prompt])
        return Evaluation(tuple(answers), self.provenance)

    def _accuracy(self, condition: str) -> float:
        """The accuracy of a condition, as in :meth:`accuracy`."""
        problem_accuracies = self.right(condition).mean(1)
        return float(self._units("auto").means(problem_accuracies).mean())

    def _final_answers(self, condition: str) -> dict[str, str | None]:
        """The final answer to each problem under a condition.

        Raises:
            OptionError: There is no such condition, or some of its answers are missing.
        """
        self.right(condition)  # refuses missing answers
        answers = self._answers_by_problem(condition)
        return {problem: answers[problem].answer for problem in self._problems()}

    def _answers_by_problem(self, condition: str, sample: int = 0) -> dict[str, GradedAnswer]:
        """One of the answers to each problem under a condition, by the problem's id."""
        answers = [answer for answer in self._answers_under(condition) if answer.sample == sample]
        return {answer.prompt: answer for answer in answers}


def load_evaluation(path: str | Path) -> Evaluation:
    """Load an evaluation written by ``Evaluation.save`` or ``evaluate(out=…)``.

    Raises:
        OutputError: The file is not an evaluation.
    """
    provenance, answers = read_answers(Path(path))
    return Evaluation(tuple(answers.values()), provenance)


def _with_distinct_sources(
    own_answers: Mapping[str, str | None], sources: Mapping[str, str]
) -> list[str]:
    """The problems whose own answer differs from their source's, if both can be read.

    Args:
        own_answers: The answer to each problem without a transplant; None if it cannot be read.
        sources: The source of each problem's keys and values.

    Raises:
        OptionError: A source has no answer.
    """
    distinct_problems = []
    for problem, own_answer in own_answers.items():
        source = sources.get(problem, problem)
        if source not in own_answers:
            raise OptionError(
                f"the source of prompt {problem} is not among the answered problems; give"
                " KeysValues.from_other_prompts().sources of the same prompts"
            )
        source_answer = own_answers[source]
        if None not in (own_answer, source_answer) and own_answer != source_answer:
            distinct_problems.append(problem)
    return distinct_problems
