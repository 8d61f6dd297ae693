"""Adjusts several tables of comparisons as one family of tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from mechattn.errors import OptionError
from mechattn.results.result import by_head
from mechattn.stats.paired import false_discovery

_QUESTION_COLUMNS = ("models", "condition", "to", "quantity", "segment")
# The columns of an evaluation's table, which has one test per row, and their names in a result's.
_RESULT_COLUMNS = {
    "low": "difference_low",
    "high": "difference_high",
    "p": "p_difference",
    "q": "q_difference",
}
_COLUMNS_OF_A_FAMILY = ("q_beyond", "q_difference", "q_same", "p_family")


def adjust(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Stack several tables of ``Result.compare``, with q-values over all of their tests together.

    If an effect was searched for in several results, conditions or quantities, each row of each
    table was a chance to find it. Each row has one test in the family, and its q is
    Benjamini-Hochberg over all of them: ``q_beyond`` if a null is known, and ``q_difference``
    otherwise. ``q_difference`` of a row with a null is over the ``p_difference`` of all rows.

    Args:
        tables: At least one table from ``Result.compare(…, columns="all")`` or
            ``Evaluation.comparisons``.

    Returns:
        The rows of all tables. New first columns are table (from 0, in the order given), models,
        condition, to, quantity and segment. ``q_beyond`` (if any row has a null), ``q_difference``
        and ``q_random`` are over all tables. The original ones are ``q_beyond_of_table`` and
        ``q_difference_of_table``; other columns that are adjusted within their table are
        ``q_same_of_table`` and ``p_family_of_table``. ``attrs`` state the family, the attributes of
        each table ("tables") and the smallest q that a single test can reach ("smallest_q_alone",
        which is NaN if all tables are of evaluations).

    Raises:
        OptionError: There are no tables, a table has no p-values or is already adjusted, or a table
            is given twice.

    Source: Benjamini and Hochberg 1995.
    """
    _check_tables(tables)
    numbered_tables = [_numbered(number, table) for number, table in enumerate(tables)]
    rows = by_head(pd.concat(numbered_tables, ignore_index=True))

    # Each row tests what is beyond its null, or the difference if it has no null.
    p_difference = rows.p_difference.to_numpy(dtype=np.float64)
    p_beyond = np.full(len(rows), np.nan)
    if "p_beyond" in rows:
        p_beyond = rows.p_beyond.to_numpy(dtype=np.float64)
    has_null = ~np.isnan(p_beyond)
    p_tested = np.where(has_null, p_beyond, p_difference)
    q_tested = false_discovery(p_tested)
    q_difference = np.where(has_null, false_discovery(p_difference), q_tested)

    # Each q follows its p.
    if has_null.any():
        after_p = rows.columns.get_loc("p_beyond") + 1
        q_beyond = np.where(has_null, q_tested, np.nan)
        rows.insert(after_p, "q_beyond", q_beyond)
    after_p = rows.columns.get_loc("p_difference") + 1
    rows.insert(after_p, "q_difference", q_difference)

    if "p_random" in rows:
        # Heads that the selecting half of the prompts left out count as tests with a p of 1.
        unselected_count = 0
        for table in tables:
            if "p_random" in table:
                test_count = table.attrs.get("tests_random", len(table))
                unselected_count += test_count - table.q_random.count()
        p_of_rows = np.maximum(p_tested, rows.p_random)
        q_random = false_discovery(np.append(p_of_rows, np.ones(unselected_count)))
        rows["q_random"] = q_random[: len(rows)]

    # Tables of evaluations have no smallest p, and tables without rows have no tests.
    smallest_p = [table.attrs.get("smallest_p", np.nan) for table in tables if len(table)]
    smallest_q_alone = len(rows) * pd.Series(smallest_p, dtype=float).min()
    row_counts = " + ".join(str(len(table)) for table in tables)
    rows.attrs = {
        "family": f"{len(rows)} tests in {len(tables)} tables ({row_counts})",
        "tables": [dict(table.attrs) for table in tables],
        "smallest_q_alone": float(np.minimum(1.0, smallest_q_alone)),
    }
    return rows


def _check_tables(tables: Any) -> None:
    """Refuse anything but a list of different tables with p-values that are not adjusted yet."""
    is_sequence = isinstance(tables, (list, tuple)) and len(tables) > 0
    if not is_sequence or not all(isinstance(table, pd.DataFrame) for table in tables):
        raise OptionError(
            "give a list of tables: ma.adjust([result.compare(…, columns='all'),"
            " other.compare(…, columns='all')])"
        )
    for number, table in enumerate(tables):
        if "table" in table:
            raise OptionError(
                f"table {number} is already adjusted; give all of the original tables at once"
            )
        for earlier_number, earlier_table in enumerate(tables[:number]):
            if earlier_table.attrs == table.attrs and earlier_table.equals(table):
                raise OptionError(
                    f"table {number} is the same as table {earlier_number}; give every table once"
                )
        if "p_difference" not in table and "p" not in table:
            raise OptionError(
                f"table {number} has no column p_difference; give tables from"
                " Result.compare(…, columns='all')"
            )


def _numbered(number: int, table: pd.DataFrame) -> pd.DataFrame:
    """A table with its number and its question as first columns.

    Columns that are adjusted for the table's own tests are renamed.
    """
    if "p_difference" not in table:
        table = table.rename(columns=_RESULT_COLUMNS)

    # If a question has no column, it is the same for the whole table and stands in the attributes.
    labels = {"table": number}
    for name in _QUESTION_COLUMNS:
        labels[name] = table.get(name, table.attrs.get(name, ""))

    new_names = {name: f"{name}_of_table" for name in _COLUMNS_OF_A_FAMILY}
    other_columns = table.drop(columns=[*labels], errors="ignore").rename(columns=new_names)
    numbered = other_columns.assign(**labels)[[*labels, *other_columns.columns]]
    numbered.attrs = {}  # pd.concat would compare the attrs of all tables
    return numbered
