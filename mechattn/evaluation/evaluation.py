"""Evaluations: accuracy with intervals, paired comparisons, pass@k, diversity, mediation."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from mechattn.axes import BASELINE
from mechattn.errors import OptionError, OutputError, check_counts
from mechattn.evaluation.answer_units import compared, follows, mediation, units_of
from mechattn.evaluation.graded_answers import GradedAnswer, as_lines, cautions, is_replaceable
from mechattn.prompts.prompt import Prompt
from mechattn.stats.accuracy import best_of_k, distinct_ngrams, pass_at_k, share_interval
from mechattn.stats.paired import false_discovery
from mechattn.stats.units import Unit, Units
from mechattn.store.atomic_writes import check_writable, write_whole


@dataclass(frozen=True, repr=False)
class Evaluation:
    """All answers of a run, with their provenance."""

    answers: tuple[GradedAnswer, ...]
    provenance: Mapping[str, Any]

    def __repr__(self) -> str:
        right = ", ".join(
            f"{name} {100 * self.right(name).mean():.1f} %" for name in self.conditions
        )
        problems = len({answer.prompt for answer in self.answers})
        line = (
            f"Evaluation({problems} problems × {len(self.conditions)} conditions; right: {right})"
        )
        return "\n".join([line, *self.cautions])

    @property
    def conditions(self) -> list[str]:
        """The conditions in the order of the run, the baseline first."""
        answered = dict.fromkeys(answer.condition for answer in self.answers)
        recorded = self.provenance.get("conditions", ())
        in_order = [name for name in recorded if name in answered]
        return list(dict.fromkeys([*in_order, *answered]))

    @property
    def cautions(self) -> list[str]:
        """Sentences to read before the accuracies; none where nothing is the matter.

        They name the conditions where more than a tenth of the answers were cut off, or cannot be
        read, and a baseline that cannot fall or cannot rise.
        """
        return cautions({name: self._under(name) for name in self.conditions})

    @property
    def samples(self) -> int:
        """The number of answers to each question."""
        return max(a.sample for a in self.answers) + 1

    def right(self, condition: str) -> np.ndarray:
        """Whether each answer is right [problem, sample], in the order of the prompts.

        Raises:
            OptionError: There is no such condition, or some of its answers are missing.
        """
        if condition not in self.conditions:
            have = ", ".join(map(repr, self.conditions))
            raise OptionError(f"there is no condition {condition!r}; the evaluation has {have}")
        return self._each(condition, lambda answer: answer.right).astype(bool)

    def accuracy(self, level: float = 0.95, *, unit: Unit = "auto") -> pd.DataFrame:
        """Accuracy of each condition with Wilson's interval; for several samples, a score interval
        over problems.

        If prompts share groups (``Prompt.group``; more than about one in twenty), the accuracy is
        the mean over groups of each group's accuracy, with a score interval over groups;
        ``unit="prompt"`` uses single problems. The score interval doesn't shrink to a point where
        all are right. ``table.attrs["unit"]`` names the unit of n.

        Columns: condition, accuracy, low, high, n (problems), unread (answers without a final
            answer), unfinished
        (answers that hit the limit), tokens (mean length). ``table.attrs["cautions"]`` says what to
        know before reading it.
        """
        units = units_of(self, unit)
        names = self.conditions
        table = self._intervals(
            [({"condition": name}, self.right(name).mean(1)) for name in names], level, unit
        )
        table = table.rename(columns={"estimate": "accuracy"})
        answers = [self._under(name) for name in names]
        table["n"] = units.n
        table["unread"] = [sum(a.answer is None for a in rows) for rows in answers]
        table["unfinished"] = [sum(not a.finished for a in rows) for rows in answers]
        table["tokens"] = [float(np.mean([len(a.tokens) for a in rows])) for rows in answers]
        table.attrs = {"unit": units.unit, "cautions": self.cautions}
        return table

    def compare(
        self,
        condition: str,
        to: str = BASELINE,
        *,
        other: Evaluation | None = None,
        unit: Unit = "auto",
    ) -> dict[str, float]:
        """Compare the accuracy of two conditions on the same problems, as a difference.

        With one answer per problem: Newcombe's interval, the mid-p McNemar test and the smallest
        detectable difference. With several: each problem's fraction of right answers, with a t
        interval (wider where few problems differ, so that it doesn't shrink to a point) and a
        sign-flip test over problems. With groups of prompts: the same for the groups' means, since
        McNemar's test assumes independent problems. Then n counts groups.

        Args:
            condition: A condition.
            to: The condition to compare with.
            other: The evaluation that contains ``to``; this one by default.
            unit: "auto" uses groups of prompts as units if there are any; "prompt" uses single
                problems.

        Raises:
            OptionError: There is no such condition, the problems differ, or there are too few
                groups.
        """
        return compared(self, condition, to, other or self, unit)

    def comparisons(self, to: str = BASELINE, *, unit: Unit = "auto") -> pd.DataFrame:
        """Compare every other condition with one, as one family of tests: the rows of
        :meth:`compare`, and q over them.

        If the best of several conditions is what you look for, each is a chance to find it.
        ``ma.adjust`` takes these tables too, for a family over several evaluations.

        Args:
            to: The condition to compare with.
            unit: As for :meth:`compare`.

        Raises:
            OptionError: As for :meth:`compare`, or there is no other condition.

        Source: Benjamini and Hochberg 1995.
        """
        names = [name for name in self.conditions if name != to]
        if not names:
            raise OptionError(f"there is no condition other than {to!r} to compare with it")
        rows = [
            {"condition": name, "to": to, **self.compare(name, to, unit=unit)} for name in names
        ]
        table = pd.DataFrame(rows)
        table.insert(table.columns.get_loc("p") + 1, "q", false_discovery(table.p.to_numpy()))
        return table

    def best(self, conditions: Sequence[str] | None = None) -> dict[str, Any]:
        """Select the best condition on one half of the problems, and compare it with the baseline
        on the other half.

        The accuracy of the best of many conditions is too high on the problems used for selection,
        even if none has an effect. The split depends only on the ids of the problems, and never
        divides a group of prompts.

        Args:
            conditions: The candidates; all but the baseline by default.

        Returns:
            What :meth:`compare` gives on the other half; "condition", and "chosen_on", its accuracy
            on the first half.

        Raises:
            OptionError: There are fewer than two problems, or no condition other than the baseline.
        """
        names = [name for name in conditions or self.conditions if name != BASELINE]
        groups = self.provenance.get("groups", {})
        group_of = {prompt: groups.get(prompt, prompt) for prompt in self._problems()}
        problems = sorted(group_of, key=lambda prompt: _hash(group_of[prompt]))
        units = Units.grouped([group_of[prompt] for prompt in problems])
        if not names or units.n < 2:
            raise OptionError(
                "best needs at least one condition other than the baseline, and at least two"
                " problems"
            )
        choosing_places, reported_places = units.halves()
        choosing = self._of([problems[place] for place in choosing_places])
        reported = self._of([problems[place] for place in reported_places])
        chosen = max(sorted(names), key=lambda name: choosing.right(name).mean())
        return {
            "condition": chosen,
            "chosen_on": float(choosing.right(chosen).mean()),
            "accuracy": float(reported.right(chosen).mean()),
            "baseline": float(reported.right(BASELINE).mean()),
            **reported.compare(chosen),
        }

    def pass_at_k(
        self, k: int | Sequence[int], level: float = 0.95, *, unit: Unit = "auto"
    ) -> pd.DataFrame:
        """The probability that one of k answers is right, by condition and k, with an interval over
        problems.

        ``unit`` as for :meth:`accuracy`.

        Raises:
            OptionError: k is larger than the number of samples.
        """
        return self._by_samples(
            k, lambda name, k: pass_at_k(self.right(name).sum(1), self.samples, k), level, unit
        )

    def best_of(
        self, k: int | Sequence[int], level: float = 0.95, *, unit: Unit = "auto"
    ) -> pd.DataFrame:
        """The probability that the likeliest of k answers is right, by condition and k, with an
        interval.

        The likeliest answer has the highest mean log-probability of its tokens
        (``GradedAnswer.logprob``), which needs no reference; ``pass_at_k`` is the same with a
        perfect judge. ``unit`` as for :meth:`accuracy`.

        Raises:
            OptionError: k is larger than the number of samples, or the answers have no
                log-probabilities.
        """

        def values(name: str, k: int) -> np.ndarray:
            score = self._each(name, lambda answer: answer.logprob)
            if np.isnan(score).any():
                raise OptionError(
                    "some answers have no log-probabilities: they come from a server that reports"
                    " none"
                )
            return best_of_k(self.right(name), score, k)

        return self._by_samples(k, values, level, unit)

    def diversity(self, n: int = 2, level: float = 0.95, *, unit: Unit = "auto") -> pd.DataFrame:
        """The fraction of distinct n-grams among all n-grams of a question's answers, with an
        interval over questions.

        ``unit`` as for :meth:`accuracy`.
        """
        check_counts(n=n)
        rows = []
        for name in self.conditions:
            tokens_by_prompt: dict[str, list[tuple[int, ...]]] = {}
            for answer in self._under(name):
                tokens_by_prompt.setdefault(answer.prompt, []).append(answer.tokens)
            shares = [
                distinct_ngrams(tokens_by_prompt[prompt], n)
                for prompt in self._problems()
                if prompt in tokens_by_prompt
            ]
            rows.append(({"condition": name, "n": n}, np.array(shares)))
        return self._intervals(rows, level, unit)

    def _each(self, condition: str, value: Callable[[GradedAnswer], float]) -> np.ndarray:
        """Apply a function to each answer of a condition [problem, sample]."""
        values = {(a.prompt, a.sample): value(a) for a in self._under(condition)}
        rows = []
        missing = 0
        for prompt in self._problems():
            row = [values.get((prompt, sample)) for sample in range(self.samples)]
            missing += row.count(None)
            rows.append(row)
        if missing:
            raise OptionError(
                f"{missing} answers of {condition!r} are missing, as after an interrupted run, or one of"
                " fewer problems: call evaluate with out=… and all its problems and conditions"
            )
        return np.array(rows, dtype=float)

    def _by_samples(
        self,
        k: int | Sequence[int],
        values: Callable[[str, int], np.ndarray],
        level: float,
        unit: Unit,
    ) -> pd.DataFrame:
        counts: list[Any] = [k] if isinstance(k, (int, float, str)) else list(k)
        for count in counts:
            check_counts(k=count)
        rows = []
        for name in self.conditions:
            for count in counts:
                rows.append(({"condition": name, "k": count}, values(name, count)))
        return self._intervals(rows, level, unit)

    def _intervals(
        self, rows: Iterable[tuple[dict[str, Any], np.ndarray]], level: float, unit: Unit
    ) -> pd.DataFrame:
        """A row for each array of values over problems, with an interval within 0 and 1."""
        units = units_of(self, unit)
        table = []
        for labels, values in rows:
            interval = share_interval(units.means(values), level)._asdict()
            ends = {name: float(value) for name, value in interval.items()}
            table.append({**labels, **ends})
        return pd.DataFrame(table)

    def mediation(
        self,
        total: str,
        through: Mapping[str, str],
        *,
        resamples: int = 9999,
        seed: int = 0,
        level: float = 0.95,
        unit: Unit = "auto",
    ) -> pd.DataFrame:
        """The fraction of a condition's change in accuracy that other conditions produce without
        it.

        ``share = (accuracy[part] − accuracy[baseline]) / (accuracy[total] − accuracy[baseline])``,
        with percentile bootstrap intervals over problems. Shares need not add up to 1. They are NaN
        if the interval of the total change contains 0, since the ratio is then undefined. Intervals
        of changes are those of :meth:`compare`.

        Args:
            total: The condition whose change is explained, such as "slash".
            through: For each path, a condition that uses only this path, such as {"scale": "scale
                alone"}.
            resamples: The number of bootstrap samples.
            seed: The seed of the bootstrap.
            level: The level of the intervals.
            unit: As for :meth:`compare`.
        """
        return mediation(self, total, through, resamples, seed, level, unit)

    def follows(
        self,
        condition: str,
        sources: Mapping[str, str],
        without: str,
        *,
        level: float = 0.95,
        unit: Unit = "auto",
    ) -> dict[str, Any]:
        """The fraction of problems that, with a transplant, get their source's answer instead of
        their own.

        Problems whose own and source's answers are equal or unreadable are left out (counted as
        ``alike``).

        Args:
            condition: The condition with the :class:`~mechattn.interventions.recorded.KVPatch`.
            sources: The source of each problem's keys and values: ``KeysValues.sources``.
            without: The same condition without the transplant, which gives both reference answers.
            level: The level of the interval.
            unit: As for :meth:`accuracy`.

        Returns:
            "followed" with "low" and "high" (a score interval); "kept", the fraction that kept
            their own answer;
            "by_chance", how often the answer is that of an unrelated prompt; "n"; "alike".

        Raises:
            OptionError: There is no such condition, there are several answers per problem, or a
                source has no answer.
        """
        return follows(self, condition, sources, without, level, unit)

    def answered(
        self, prompts: Sequence[Prompt], condition: str = BASELINE, sample: int = 0
    ) -> list[Prompt]:
        """The prompts with the token ids of their generated answers in the segment "answer", for
        analysis in one pass.

        All conditions of such a run read the same answer, so differences are due to attention and
        not to the text.
        """
        answers = {
            answer.prompt: answer
            for answer in self._under(condition)
            if answer.sample == sample and answer.tokens
        }
        missing = [prompt.id for prompt in prompts if prompt.id not in answers]
        if missing:
            raise OptionError(f"prompt {missing[0]} has no answer under {condition!r}; omit it")
        answered = []
        for prompt in prompts:
            answer = answers[prompt.id]
            answered.append(replace(prompt, answer=answer.text, answer_tokens=answer.tokens))
        return answered

    def to_dataframe(self) -> pd.DataFrame:
        """Return a table with one row per answer."""
        return pd.DataFrame([asdict(a) for a in self.answers])

    def save(self, path: str | Path) -> None:
        """Save as JSON lines, provenance first, then the answers; the file is written completely or
        not at all.

        Raises:
            OutputError: The path cannot be written to, or an existing file is not an evaluation.
        """
        path = Path(path)
        check_writable(path)
        if not is_replaceable(path):
            raise OutputError(
                f"{path} exists and is not an evaluation; give another name, or move the file"
            )
        text = as_lines([{"provenance": self.provenance}, *map(asdict, self.answers)])
        write_whole(path, lambda new: new.write_text(text, encoding="utf-8"))

    def _of(self, problems: Sequence[str]) -> Evaluation:
        """The evaluation of some problems only, in their order."""
        places = {prompt: place for place, prompt in enumerate(problems)}
        answers = [answer for answer in self.answers if answer.prompt in places]
        answers.sort(key=lambda answer: places[answer.prompt])
        return Evaluation(tuple(answers), self.provenance)

    def _under(self, condition: str) -> list[GradedAnswer]:
        return [answer for answer in self.answers if answer.condition == condition]

    def _problems(self) -> dict[str, str]:
        return {a.prompt: a.solution for a in self.answers}


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "replace")).digest()
