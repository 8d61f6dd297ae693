"""Adjusts several tables of comparisons as one family of tests."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pandas as pd

from mechattn.axes import by_head
from mechattn.errors import OptionError
from mechattn.stats.paired import false_discovery

_ABOUT = ("models", "condition", "to", "quantity", "segment")
_ONE_TEST = {
    "low": "difference_low",
    "high": "difference_high",
    "p": "p_difference",
    "q": "q_difference",
}
_OF_TABLE = ("q_beyond", "q_difference", "q_same", "p_family")


def adjust(tables: Seq[pd.DataFrame]) -> pd.DataFrame:
    """Stack several tables of ``Result.compare``, with q-values over all of their tests together.

    ``q = `` Benjamini-Hochberg over the p-values of what each table tests: ``q_beyond`` of a row with a null,
    ``q_difference`` of one without. If an effect was searched for in several results, conditions or quantities, each
    row of each table was a chance to find it.

    Args:
        tables: Tables from ``Result.compare``, or from ``Evaluation.comparisons``, at least one.

    Returns:
        The rows of all tables. New first columns: table (from 0, in the order given), models, condition, to, quantity
        and segment. ``q_beyond``, ``q_difference`` and ``q_random`` are over all tables; the original ones are
        ``q_beyond_of_table``, ``q_difference_of_table``, ``q_same_of_table`` and ``p_family_of_table``. ``attrs`` state
        the family, each table's own attributes ("tables") and the smallest q that a single test can reach
        ("smallest_q_alone").

    Raises:
        OptionError: There are no tables, one has no p-values, or one is given twice.

    Source: Benjamini and Hochberg 1995.
    """
    tables = _checked(tables)
    parts = []
    for number, table in enumerate(tables):
        about = {"table": number} | {
            name: table.get(name, table.attrs.get(name, "")) for name in _ABOUT
        }
        part = table.drop(columns=[name for name in about if name in table])
        part = part.rename(columns={name: f"{name}_of_table" for name in _OF_TABLE})
        part = part.assign(**about)[[*about, *part.columns]]
        part.attrs = {}
        parts.append(part)
    made = by_head(pd.concat(parts, ignore_index=True))
    null = made.get("p_beyond", made.p_difference * np.nan).notna().to_numpy()
    p = np.where(null, made.get("p_beyond"), made.p_difference).astype(
        np.float64
    )  # of what is tested
    q, q_difference = (
        false_discovery(p),
        false_discovery(made.p_difference.to_numpy(dtype=np.float64)),
    )
    if null.any():
        made.insert(made.columns.get_loc("p_beyond") + 1, "q_beyond", np.where(null, q, np.nan))
    made.insert(
        made.columns.get_loc("p_difference") + 1, "q_difference", np.where(null, q_difference, q)
    )
    if "p_random" in made:
        others = sum(table.attrs.get("tests_random", len(table)) - len(table) for table in tables)
        both = np.concatenate(
            [np.maximum(p, made.p_random), np.ones(others)]
        )  # heads that were not chosen
        made["q_random"] = false_discovery(both)[: len(made)]
    sizes = [len(table) for table in tables]
    smallest = [
        table.attrs["smallest_q"] for table in tables if "smallest_q" in table.attrs and len(table)
    ]
    made.attrs = {
        "family": f"{sum(sizes)} tests in {len(tables)} tables ({' + '.join(map(str, sizes))})",
        "tables": [dict(table.attrs) for table in tables],
        "smallest_q_alone": min(1.0, len(made) * min(smallest)) if smallest else float("nan"),
    }
    return made


def _checked(tables: Any) -> list[pd.DataFrame]:
    if isinstance(tables, pd.DataFrame) or not isinstance(tables, Seq) or isinstance(tables, str):
        raise OptionError("give a list of tables: ma.adjust([one.compare(…), other.compare(…)])")
    if not tables:
        raise OptionError("there are no tables; give a list of tables from Result.compare")
    for number, table in enumerate(tables):
        if not isinstance(table, pd.DataFrame):
            raise OptionError(
                f"table {number} is of type {type(table).__name__}; give tables from Result.compare"
            )
        p = table.get("p_difference", table.get("p"))
        if p is None or not p.between(0, 1).all():
            why = "has no column p_difference" if p is None else "has invalid p-values"
            raise OptionError(f"table {number} {why}; give tables from Result.compare")
        if "table" in table:
            raise OptionError(
                f"table {number} is already adjusted; give all of the original tables at once"
            )
        for before in range(number):
            if tables[before] is table or (
                tables[before].attrs == table.attrs and tables[before].equals(table)
            ):
                raise OptionError(
                    f"table {number} is the same as table {before}; give every table once"
                )
    return [
        table if "p_difference" in table else table.rename(columns=_ONE_TEST) for table in tables
    ]
