"""One object for every comparison of two conditions, which holds the question and answers it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd

from mechattn.contrast.differences import aligned, check_cells, in_blocks, layers_of
from mechattn.contrast.quantities import (
    Null,
    check_at_most_one_number,
    check_measured,
    check_names,
    check_one_number,
    in_segment,
    variable_of,
)
from mechattn.contrast.question import Question, first_token_words
from mechattn.contrast.stability import overlap_table
from mechattn.contrast.table import (
    Columns,
    Ranking,
    Selection,
    comparison_table,
    main_columns,
    marked,
)
from mechattn.contrast.tested import several_tested
from mechattn.errors import OptionError, check_choice, check_counts
from mechattn.results.result import Result, by_head, head_named
from mechattn.stats.intervals import FEWEST, Interval, ratio, relative_change
from mechattn.stats.paired import false_discovery
from mechattn.stats.random_effects import FEWEST_DRAWS, crossed
from mechattn.stats.units import Resolution, halves_of, random_words, resolution

# They are a sample of others. With fewer, the interval uses a t distribution with at most 4 degrees
# of freedom.
FEWEST_CONDITIONS = 6


@dataclass(frozen=True, eq=False)
class Verdict:
    """The change of a quantity between two conditions, over prompts and over all layers and heads.

    Heads are masks [layer, head].

    Args:
        change: The relative change of each prompt's mean over layers and heads, as the geometric
            mean over prompts (−0.2 is a fifth less). Heads count by how much they receive, while
            the mean of ``compare``'s column ``change`` counts all heads alike.
        null: The same under the null.
        below: The heads whose change is below the null's, with q_beyond < 0.05.
        above: The heads whose change is above the null's, with q_beyond < 0.05.
        rises: The heads in which the quantity itself rises, with q_difference < 0.05.
        falls: The heads in which the quantity itself falls, with q_difference < 0.05.
        marked: The heads with q_difference < 0.05 in which the quantity changes by more than
            ``margin``, or by more than the default of
            :func:`mechattn.contrast.table.marked` without one.
        n: The number of prompts or groups.
        unit: The kind of unit: prompts or groups.
        margin: The largest change that counts as none; None if it was not given.
        same: The heads whose change is that of the null to within ± ``margin``, with q_same < 0.05;
            None without a margin.
        null_kind: The kind of null.
    """

    change: Interval
    null: Interval
    below: np.ndarray
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
        """Whether q < 0.05 is possible at all with ``n`` prompts or groups."""
        return resolution(self.n, self.above.size).together is not None

    def __repr__(self) -> str:
        """The changes and the numbers of heads, without the masks."""
        change = "{:.3f} [{:.3f}, {:.3f}]".format(*self.change)
        null = "{:.3f} [{:.3f}, {:.3f}]".format(*self.null)
        below = f"{int(self.below.sum())} of {self.below.size} heads below the null"
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
        OptionError: The null, scale, unit, level, seed or number of resamples is not allowed. The
            methods raise it if the result has no such condition, quantity or segment, if the
            prompts differ, or if there are fewer than 3 prompts or groups.
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
        """A row for each layer and head; :meth:`mechattn.Result.compare` explains the options.

        Raises:
            OptionError: There is nothing to compare, there are too few prompts, or a layer does not
                fit in memory.
        """
        check_choice(Columns, columns=columns)
        table = comparison_table(self, Selection(select, top, by), random, margin)
        sentences = first_token_words(self.result, self.condition)
        if sentences:
            table.attrs["first_token"] = sentences
        if columns == "all":
            return table
        return main_columns(table)

    def across(self, conditions: Sequence[str]) -> pd.DataFrame:
        """The mean change over several conditions, such as fillers, which are a sample of others.

        :meth:`mechattn.Result.across` explains the columns.

        Args:
            conditions: At least six conditions; :attr:`condition` is not used.

        Raises:
            OptionError: As for :meth:`table`, there are too few conditions, or one is named twice.
        """
        check_names("conditions", conditions, FEWEST_CONDITIONS)
        names = [self.result.condition(name) for name in conditions]
        tested = several_tested(self, names)
        units = tested.units
        units.refuse_below(FEWEST)
        estimates = crossed(tested.values, self.level)

        columns = tested.labels.assign(**estimates._asdict())
        after_p = columns.columns.get_loc("p") + 1
        columns.insert(after_p, "q", false_discovery(estimates.p))
        table = by_head(columns.assign(n=units.n, conditions=len(names)))
        table.attrs = {
            "conditions": names,
            "quantity": self.quantity,
            "segment": self.segment_name,
            "unit": units.unit,
            "null": tested.null,
            "level": self.level,
            "family": f"{len(table)} tests",
        }
        return table

    def by_prompt(self, head: str) -> pd.DataFrame:
        """A row for each prompt, with the values of one head.

        The columns are prompt (its id), value, reference, difference and, if a null is known,
        beyond. The largest ``beyond`` comes first, up to sign, or the largest ``difference`` if no
        null is known.

        Args:
            head: A head such as "L1H2".

        Raises:
            OptionError: There is no such head, or the quantity has no single number for each head.
        """
        if head_named(head) is None:
            raise OptionError(f'head={head!r}: give a head such as "L1H2"')
        self.check_alike()
        variable = variable_of(self.result, self.quantity)
        check_one_number(in_segment(variable, self.segment), self.quantity)

        head_contrast = self.of_parts(lambda result: result.sel(head=head))
        (block,) = layers_of(head_contrast)  # a head is in one layer
        check_cells(self, block.has_difference.size, block.left_out)
        columns = {
            "prompt": block.ours.prompt.values,
            "value": block.ours.values.reshape(-1),
            "reference": block.theirs.values.reshape(-1),
            "difference": block.difference.values.reshape(-1),
        }
        table = pd.DataFrame(columns)
        ranked_by = "difference"
        if block.expected is not None:
            table["beyond"] = table.difference - block.expected.reshape(-1)
            ranked_by = "beyond"
        return table.sort_values(
            ranked_by, key=abs, ascending=False, kind="stable", ignore_index=True
        )

    def overall(self, layer: int | None = None) -> tuple[Interval, Interval | None]:
        """The relative change of each prompt's mean over layers and heads, and the same under the
        null.

        A head counts by how much it receives. In the mean of the table's ``change``, all heads
        count alike.

        Args:
            layer: One layer; by default all.

        Returns:
            Both changes with their intervals, as fractions. The second is None if no null is known.

        Raises:
            OptionError: There is more than one number for each head, the quantity may be 0 in the
                baseline or is not positive in some prompt, so that it has no ratio, or there are
                too few prompts.
        """
        self.check_alike()
        quantity = self.quantity
        contrast = self.at_layer(layer)
        variable = variable_of(self.result, quantity)
        check_at_most_one_number(in_segment(variable, self.segment), quantity)
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

        units = self.units
        units.refuse_below(FEWEST)
        change = relative_change(means["ours"], means["theirs"], units)
        if "null" not in means or "their_null" not in means:
            return change, None
        return change, relative_change(means["null"], means["their_null"], units)

    def verdict(self, *, margin: float | None = None) -> Verdict:
        """The overall change beside its null, and the heads with q < 0.05 in the table.

        Args:
            margin: The largest change that counts as none, as for :meth:`table`.

        Raises:
            OptionError: As for :meth:`table` and :meth:`overall`, or the quantity has no null.
        """
        change, null = self.overall()
        if null is None:
            raise OptionError(
                f"{self.quantity!r} has no null in this result, which a verdict compares it with"
            )
        table = comparison_table(self, margin=margin, bootstrap_ends=False)
        variable = variable_of(self.result, self.quantity)
        shape = (variable.sizes["layer"], variable.sizes["head"])
        layer_indices = variable.indexes["layer"].get_indexer(table["layer"])
        head_indices = variable.indexes["head"].get_indexer(table["head"])

        def heads_where(row_mask: np.ndarray) -> np.ndarray:
            """A mask of the table's rows as a mask of heads [layer, head]."""
            head_mask = np.zeros(shape, dtype=bool)
            head_mask[layer_indices, head_indices] = row_mask
            return head_mask

        differs_from_null = table.q_beyond < 0.05
        has_changed = table.q_difference < 0.05
        same = None
        if margin is not None:
            same = heads_where(table.q_same < 0.05)
        return Verdict(
            change=change,
            null=null,
            below=heads_where(differs_from_null & (table.beyond < 0)),
            above=heads_where(differs_from_null & (table.beyond > 0)),
            rises=heads_where(has_changed & (table.difference > 0)),
            falls=heads_where(has_changed & (table.difference < 0)),
            n=int(table.n.iloc[0]),
            unit=table.attrs["unit"],
            marked=heads_where(marked(table, margin)),
            margin=margin,
            same=same,
            null_kind=self.null_used,
        )

    def resolution(
        self, *, select: Literal["half"] | None = None, draws: int | None = None, q: float = 0.05
    ) -> Resolution:
        """What the table can detect with these prompts; :meth:`mechattn.Result.resolution` explains
        the options.

        Raises:
            OptionError: As for :meth:`table`, or q is not a probability.
        """
        check_choice(("half", None), select=select)
        self.check_alike()
        cell_count = 0
        left_out: list[str] = []
        for block in layers_of(self):
            cell_count += block.has_difference.size
            left_out += block.left_out
        check_cells(self, cell_count, left_out)

        unit_count = self.units.n
        if select is not None:
            selecting_units, _ = halves_of(unit_count)
            unit_count = len(selecting_units)
        test_count = cell_count - len(left_out)
        unit_resolution = resolution(unit_count, test_count, q, self.resamples, self.units.kind)
        if draws is None:
            return unit_resolution
        check_counts(FEWEST_DRAWS, draws=draws)
        random_heads = draws * test_count  # each random model has the same number of heads
        return replace(unit_resolution, random=random_words(draws, test_count, random_heads, q))

    def stability(
        self,
        *,
        top: int | None = 10,
        by: Ranking | None = None,
        layer: int | None = None,
        conditions: Sequence[str] | None = None,
        splits: int = 200,
        patterns: int = 999,
    ) -> pd.DataFrame:
        """How much selections of heads on random disjoint halves overlap;
        :meth:`mechattn.Result.stability` explains the options.
        """
        return overlap_table(
            self,
            top=top,
            by=by,
            layer=layer,
            conditions=conditions,
            splits=splits,
            patterns=patterns,
        )


def _means(contrast: Contrast) -> dict[str, np.ndarray]:
    """Each prompt's means over layers and heads [prompt], by the fields of :class:`Aligned`.

    A null that is not known is left out. Some layers are read at a time.
    """
    blocks, labels = in_blocks(contrast)
    sums: dict[str, np.ndarray] = {}
    counts: dict[str, np.ndarray] = {}
    for block in blocks:
        for field, values in aligned(block, labels)._asdict().items():
            if values is not None:
                cell_dims = [dim for dim in values.dims if dim != "prompt"]
                sums[field] = sums.get(field, 0.0) + values.sum(cell_dims).values
                counts[field] = counts.get(field, 0) + values.count(cell_dims).values
    return {field: ratio(total, counts[field]) for field, total in sums.items()}
