"""The numbers of each unit that a table tests, for selections on halves and for samples of
conditions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from mechattn.contrast.differences import cell_labels, check_cells, layers_of
from mechattn.contrast.question import Question
from mechattn.contrast.table import Ranking
from mechattn.errors import OptionError
from mechattn.stats.paired import without_rounding
from mechattn.stats.units import Bags, Units


class Tested(NamedTuple):
    """The numbers that a table tests, for each cell and each unit or bag of units."""

    values: np.ndarray  # [unit or bag, cell]; NaN in cells that are left out
    units: Units
    labels: pd.DataFrame  # a row for each cell: its layer, its head …
    null: str  # in words


class TestedTogether(NamedTuple):
    """The numbers that the tables of several conditions test, in the cells that all of them
    have.
    """

    values: np.ndarray  # [unit or bag, condition, cell]
    units: Units
    labels: pd.DataFrame  # a row for each cell: its layer, its head …
    null: str  # in words


def what_is_tested(
    contrast: Question,
    layer: int | None = None,
    bags: Bags | None = None,
    by: Ranking = "beyond",
) -> Tested:
    """The numbers that a table tests: by default the differences minus those of the null.

    Args:
        contrast: The question of the comparison.
        layer: One layer; by default all.
        bags: Bags of units; their means take the place of single units.
        by: "beyond" subtracts the null if it is known; "difference" does not.

    Raises:
        OptionError: The conditions cannot be compared, or no cell has a difference.
    """
    contrast.check_alike()
    contrast = contrast.at_layer(layer)
    units = contrast.units

    values_of_blocks = []
    labels_of_blocks = []
    left_out: list[str] = []
    for block in layers_of(contrast):
        tested = block.difference.values
        if by == "beyond" and block.expected is not None:
            tested = tested - block.expected

        unit_values = without_rounding(units.means(tested), block.rounding(units))
        known_values = np.where(block.has_difference, unit_values, np.nan).reshape(units.n, -1)
        if bags is None:
            values_of_blocks.append(known_values)
        else:
            values_of_blocks.append(bags.means(known_values))
        every_cell = np.ones_like(block.has_difference)
        labels_of_blocks.append(pd.DataFrame(cell_labels(block, every_cell)))
        left_out += block.left_out

    values = np.concatenate(values_of_blocks, axis=1)
    check_cells(contrast, values.shape[1], left_out)
    labels = pd.concat(labels_of_blocks, ignore_index=True)
    return Tested(values, units, labels, null=block.null)  # the same in all blocks


def several_tested(
    contrast: Question,
    names: Sequence[str],
    layer: int | None = None,
    bags: Bags | None = None,
    by: Ranking = "beyond",
) -> TestedTogether:
    """The numbers that the tables of several conditions test, in the cells that all of them have.

    The labels of cells must be the same in all conditions, and with ``by="beyond"`` the nulls too.

    Args:
        contrast: The question of the comparison; its own condition is not used.
        names: The conditions.
        layer: As for :func:`what_is_tested`.
        bags: As for :func:`what_is_tested`.
        by: As for :func:`what_is_tested`.

    Raises:
        OptionError: Nulls or labels differ, or a condition cannot be compared.
    """
    contrasts = [replace(contrast, condition=name) for name in names]
    nulls = [of_condition.null_used for of_condition in contrasts]
    if by == "beyond" and len(set(nulls)) > 1:
        words = ", ".join(f"{name!r}: {null}" for name, null in zip(names, nulls, strict=True))
        raise OptionError(
            f"the conditions have different nulls by default ({words}), so what is beyond them"
            ' cannot be combined; give one null for all, such as null="uniform"'
        )

    # Cells are matched by their position, so their labels must agree.
    by_condition = [
        what_is_tested(of_condition, layer=layer, bags=bags, by=by) for of_condition in contrasts
    ]
    first_tested = by_condition[0]
    for name, tested in zip(names, by_condition, strict=True):
        for dim in first_tested.labels:
            if not tested.labels[dim].equals(first_tested.labels[dim]):
                raise OptionError(
                    f"{name!r} and {names[0]!r} have different {dim}s, so they cannot be combined;"
                    " compare each by itself"
                )

    values = np.stack([tested.values for tested in by_condition], axis=1)
    in_all = np.isfinite(values).all((0, 1))
    labels = first_tested.labels[in_all].reset_index(drop=True)
    return TestedTogether(values[:, :, in_all], first_tested.units, labels, first_tested.null)
