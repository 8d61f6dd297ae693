"""One object for every comparison of two conditions: it carries the question, and answers it in
several forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd

from mechattn.contrast import stability, table
from mechattn.contrast.differences import (
    aligned,
    check_cells,
    in_blocks,
    layers_of,
)
from mechattn.contrast.quantities import Null, check_measured, variable_of
from mechattn.contrast.question import Question, first_token_words
from mechattn.contrast.table import Columns, Ranking
from mechattn.contrast.tested import several_tested
from mechattn.errors import OptionError, check_choice, check_counts
from mechattn.results.result import Result, by_head, head_named, units_of
from mechattn.stats.intervals import FEWEST, Interval, ratio, relative_change
from mechattn.stats.paired import false_discovery
from mechattn.stats.random_effects import FEWEST_DRAWS, crossed
from mechattn.stats.units import Resolution, random_words, resolution

# With fewer, the interval is that of a t distribution with 4 degrees of freedom or less.
FEWEST_CONDITIONS = 6


@dataclass(frozen=True, eq=False)
class Verdict:
    """The change of a quantity between two conditions, over prompts and over all layers and heads.

    ``change`` and ``null`` are fractions (−0.2 is a fifth less): the change of each prompt's mean
    over layers and heads (geometric mean over prompts), so that heads count by how much they
    receive; the mean of ``compare``'s column ``change`` counts each head alike. ``null_kind`` names
    the null. ``beyond`` marks the heads whose change is below the null's, ``above`` those above it
    (q_beyond < 0.05, two-sided tests), ``rises`` and ``falls`` those in which the quantity itself
    does (q_difference < 0.05), whatever the null does, and ``marked`` those of them that change by
    more than ``margin``, or 5 % without one. With a margin, ``same`` marks the heads whose change
    is the null's to within ± margin (``q_same`` < 0.05). ``n`` counts what ``unit`` names: prompts,
    or groups of them.
    """

    change: Interval
    null: Interval
    beyond: np.ndarray
    above: np.ndarray
    rises: np.ndarray
    falls: np.ndarray
    marked: np.ndarray
    n: int
    unit: str
    margin: float | None
    same: np.ndarray | None
    null_kind: Null

    @property
    def findable(self) -> bool:
        """Whether any head could pass q < 0.05, whatever it does, with this number of prompts or
        groups.
        """
        return resolution(self.n, self.above.size).together is not None

    def __repr__(self) -> str:
        """The changes and counts of heads, without the mask of each head."""
        change = "{:.3f} [{:.3f}, {:.3f}]".format(*self.change)
        null = "{:.3f} [{:.3f}, {:.3f}]".format(*self.null)
        below = f"{int(self.beyond.sum())} of {self.beyond.size} heads below the null"
        above = f"{int(self.above.sum())} above it"
        units = f"{self.n} {self.unit}"
        if not self.findable:
            units += ", too few to mark any"
        return f"Verdict(change={change}, null={null}, {below}, {above}, {units})"


@dataclass(frozen=True)
class Contrast(Question):
    """A quantity in one condition, compared with another condition, prompt by prompt.

    ``result.compare("slash")`` makes one and returns its table. Keep the object to ask more of the
    same comparison. The arguments are those of :class:`mechattn.contrast.question.Question`.

    Raises:
        OptionError: An argument is unknown; the methods raise it where the result has no such
            condition, quantity or segment, the prompts differ, or there are fewer than 3 (or
            groups).
    """

    def table(
        self,
        *,
        select: Literal["half"] | None = None,
        top: int | None = None,
        by: Ranking | None = None,
        random: Sequence[Result] | None = None,
        margin: float | None = None,
        columns: Columns = "main",
    ) -> pd.DataFrame:
        """One row for each layer and head; see :meth:`mechattn.Result.compare`, which explains the
        options.

        Raises:
            OptionError: There is nothing to compare, or too few prompts; a layer doesn't fit in
                memory.
        """
        check_choice(Columns, columns=columns)
        selection = table.Selection(select, top, by)
        heads = table.table(self, selection, random, margin)
        sentence = first_token_words(self.result, self.condition)
        if sentence:
            heads.attrs["first_token"] = sentence
        if columns == "all":
            return heads
        return table.main_columns(heads)

    def across(self, conditions: Sequence[str]) -> pd.DataFrame:
        """The mean change over several conditions, such as fillers, as a sample of others; see
        ``Result.across``.

        Args:
            conditions: At least six conditions; :attr:`condition` is not used.

        Raises:
            OptionError: As for :meth:`table`, or there are too few conditions.
        """
        names = [self.result.condition(name) for name in sampled_conditions(conditions)]
        tested, present = several_tested(self, names)
        units = tested[0].units
        units.refuse_below(FEWEST)
        condition_values = [numbers.values[:, present] for numbers in tested]
        effects = np.stack(condition_values, axis=1)  # [unit, condition, cell]
        estimates = crossed(effects, self.level)
        labels = tested[0].labels[present].reset_index(drop=True)
        heads = labels.assign(**estimates._asdict())
        after_p = heads.columns.get_loc("p") + 1
        heads.insert(after_p, "q", false_discovery(estimates.p))
        heads = by_head(heads.assign(n=units.n, conditions=len(names)))
        heads.attrs = {
            "conditions": names,
            "quantity": self.quantity,
            "segment": self.segment or "all",
            "unit": units.unit,
            "null": tested[0].null,
            "level": self.level,
            "family": f"{int(present.sum())} tests",
        }
        return heads

    def by_prompt(self, head: str) -> pd.DataFrame:
        """One row for each prompt: what one head does in it, the largest difference from the null
        first.

        Columns: prompt (its id), value, reference, difference and, where a null is known, beyond.

        Args:
            head: A head such as "L1H2".

        Raises:
            OptionError: There is no such head, or no number for each head.
        """
        if head_named(head) is None:
            raise OptionError(f'head={head!r}: give a head such as "L1H2"')
        self.check_alike()
        contrast = self.of_parts(lambda result: result.sel(head=head))
        (head_differences,) = layers_of(contrast)
        if head_differences.ours.ndim > 3:
            raise OptionError(
                f"{self.quantity!r} has more than one number for each head and prompt"
            )
        check_cells(
            self, head_differences.scale, head_differences.cells.size, head_differences.left_out
        )
        columns = {
            "prompt": head_differences.ours.prompt.values,
            "value": head_differences.ours.values.reshape(-1),
            "reference": head_differences.theirs.values.reshape(-1),
            "difference": head_differences.difference.values.reshape(-1),
        }
        prompts = pd.DataFrame(columns)
        ranked_by = "difference"
        if head_differences.expected is not None:
            prompts["beyond"] = prompts.difference - head_differences.expected.reshape(-1)
            ranked_by = "beyond"
        return prompts.sort_values(
            ranked_by, key=abs, ascending=False, kind="stable", ignore_index=True
        )

    def overall(self, layer: int | None = None) -> tuple[Interval, Interval | None]:
        """The relative change of each prompt's mean over layers and heads, and the same under the
        null.

        A head counts by how much it receives, unlike in the mean of the table's ``change``, where
        all count alike.

        Args:
            layer: One layer; by default all.

        Raises:
            OptionError: A value is not positive, so there is no ratio, or there are too few
                prompts.
        """
        self.check_alike()
        quantity = self.quantity
        variable = variable_of(self.result, quantity)
        contrast = self.at_layer(layer)
        if variable.attrs.get("compared") == "difference":
            raise OptionError(
                f"{quantity!r} may be 0 in the baseline, so it has no relative change"
            )

        means = _means(contrast)
        is_positive = (means["ours"] > 0) & (means["theirs"] > 0)
        if not is_positive.all():
            for side in contrast.sides:
                check_measured(side, quantity, self.segment)
            raise OptionError(
                f"{quantity!r} is not positive in every prompt, so it has no relative change"
            )

        units = units_of(self.result, self.unit)
        units.refuse_below(FEWEST)
        change = relative_change(means["ours"], means["theirs"], units)
        if "null" not in means or "their_null" not in means:
            return change, None
        return change, relative_change(means["null"], means["their_null"], units)

    def verdict(self, *, margin: float | None = None) -> Verdict:
        """The overall change beside its null, and the heads that the table marks (q < 0.05).

        Args:
            margin: The largest change that counts as none, as for :meth:`table`.

        Raises:
            OptionError: As for :meth:`table` and :meth:`overall`, or the quantity has no null.
        """
        change, null = self.overall()
        if null is None:
            raise OptionError(
                f"{self.quantity!r} has no null in this result, and a verdict compares with it"
            )
        heads = table.table(self, margin=margin, bootstrap_ends=False)
        variable = variable_of(self.result, self.quantity)
        shape = (variable.sizes["layer"], variable.sizes["head"])
        layer_index = variable.indexes["layer"].get_indexer(heads["layer"])
        head_index = variable.indexes["head"].get_indexer(heads["head"])

        def mask(rows: np.ndarray) -> np.ndarray:
            """The rows of the table as [layer, head]."""
            by_layer = np.zeros(shape, dtype=bool)
            by_layer[layer_index, head_index] = rows
            return by_layer

        differs = heads.q_beyond < 0.05
        changes = heads.q_difference < 0.05
        same = None
        if margin is not None:
            same = mask(heads.q_same < 0.05)
        return Verdict(
            change=change,
            null=null,
            beyond=mask(differs & (heads.beyond < 0)),
            above=mask(differs & (heads.beyond > 0)),
            rises=mask(changes & (heads.difference > 0)),
            falls=mask(changes & (heads.difference < 0)),
            n=int(heads.n.iloc[0]),
            unit=heads.attrs["unit"],
            margin=margin,
            same=same,
            null_kind=self.null_used,
            marked=mask(table.marked(heads, margin)),
        )

    def resolution(
        self, *, select: Literal["half"] | None = None, draws: int | None = None, q: float = 0.05
    ) -> Resolution:
        """What the table can detect with these prompts; see :meth:`mechattn.Result.resolution` for
        the options.

        Raises:
            OptionError: As for :meth:`table`, or q is not a probability.
        """
        check_choice(("half", None), select=select)
        cells = 0
        left_out: list[str] = []
        for block in layers_of(self):
            cells += block.cells.size
            left_out += block.left_out
            scale = block.scale  # the same in every block
        check_cells(self, scale, cells, left_out)
        units = units_of(self.result, self.unit)
        n = units.n
        if select is not None:
            n = (n + 1) // 2
        tests = cells - len(left_out)
        detectable = resolution(n, tests, q, self.resamples, units.kind)
        if draws is None:
            return detectable
        check_counts(FEWEST_DRAWS, draws=draws)
        return replace(detectable, random=random_words(draws, tests, draws * tests, q))

    def stability(
        self,
        *,
        top: int | None = 10,
        by: Ranking | None = None,
        layer: int | None = None,
        over: Sequence[str] | None = None,
        splits: int = 200,
        patterns: int = 999,
    ) -> pd.DataFrame:
        """How much selections of heads overlap on random disjoint halves; see
        :meth:`mechattn.Result.stability`.
        """
        return stability.stability(self, top, by, layer, over, splits, patterns)


def sampled_conditions(conditions: Sequence[str]) -> list[str]:
    """The names of conditions that are a sample of others.

    Raises:
        OptionError: There are too few, or one is there twice.
    """
    names = list(conditions)
    has_repeats = len(set(names)) < len(names)
    if isinstance(conditions, str) or has_repeats or len(names) < FEWEST_CONDITIONS:
        raise OptionError(
            f"conditions={conditions!r}: name at least {FEWEST_CONDITIONS} different ones. They"
            " are the sample, and from fewer nothing can be said about others; ma.sweep makes"
            " them"
        )
    return names


def _means(contrast: Contrast) -> dict[str, np.ndarray]:
    """Each prompt's mean over layers and heads, of both conditions and of their nulls [prompt];
    some layers are read at a time.
    """
    contrasts, labels = in_blocks(contrast)
    sums: dict[str, np.ndarray] = {}
    counts: dict[str, np.ndarray] = {}
    for block_contrast in contrasts:
        sides = aligned(block_contrast, labels)
        if {"segment", "to_segment"}.intersection(map(str, sides.ours.dims)):
            raise OptionError(
                f"{contrast.quantity!r} has more than one number per head, so a mean over heads has"
                " no meaning"
            )
        for name, values in sides._asdict().items():
            if values is not None:
                cell_dims = [dim for dim in values.dims if dim != "prompt"]
                sums[name] = sums.get(name, 0.0) + values.sum(cell_dims).values
                counts[name] = counts.get(name, 0) + values.count(cell_dims).values
    return {name: ratio(total, counts[name]) for name, total in sums.items()}
