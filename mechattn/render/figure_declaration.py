"""What each figure declares for reports and config files, and what all figures share: checks of the
heads, and the escaping of names.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import plotly.graph_objects as go

from mechattn.axes import BASELINE
from mechattn.contrast.quantities import check_condition
from mechattn.errors import OptionError
from mechattn.results.result import Result, head_named

Draw = TypeVar("Draw", bound=Callable)
# Every "<" except in the tags that the titles and hover texts of this library use.
_MARKUP = re.compile(r"<(?!(?:br|/?sup|/?extra)>)")
_NOT_DRAWN = ("template", "meta", "type")  # properties whose texts plotly does not show


@dataclass(frozen=True)
class PageTable:
    """A table of words that is folded under a figure on a page.

    Args:
        title: The heading of the table.
        columns: The names of the columns.
        rows: The cells of each row.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class PageWords:
    """The words that a page adds to a figure.

    Args:
        note: How to read the figure.
        title_end: The words after the figure's title.
        table: The numbers of the figure as a table, if there is one.
    """

    note: str
    title_end: str = ""
    table: PageTable | None = None


# From a figure's words, its result and its options to words that have more.
AddWords = Callable[[PageWords, Result, Mapping[str, Any]], PageWords]


@dataclass(frozen=True)
class Declared:
    """A figure: the function that draws it, and what it needs.

    Args:
        draw: The function.
        needs: The name of the analysis that the figure shows, which is also the name of its
            dataset. A mapping gives it by the option ``reading``. It is empty if the option
            ``quantity`` decides. A figure that does not draw a result names what it draws, such as
            "patching".
        compares: Whether the figure needs a condition other than the baseline.
        report: The options with which a report shows the figure, one mapping for each time, without
            layer and condition.
        chooses_heads: Whether the data choose the heads if none are listed.
        add_words: Adds to the words beside the figure on a page.
    """

    draw: Callable
    needs: str | Mapping[str, str]
    compares: bool
    report: Sequence[Mapping[str, Any]]
    chooses_heads: bool
    add_words: AddWords | None

    @property
    def takes(self) -> Mapping[str, Any]:
        """The options of the function, with their defaults.

        An option without a default has ``inspect.Parameter.empty``.
        """
        _, *options = inspect.signature(self.draw).parameters.values()
        return {option.name: option.default for option in options}

    @property
    def subject(self) -> str:
        """What the figure draws: "result", "results" (several at once), or another thing, such as
        "patching".

        It is the name of the function's first parameter.
        """
        first_parameter, *_ = inspect.signature(self.draw).parameters
        return first_parameter

    @property
    def draws_results(self) -> bool:
        """Whether the figure draws results, rather than an evaluation, patching or a circuit."""
        return self.subject in ("result", "results")

    def in_report(self, result: Result, layer: int) -> list[dict[str, Any]]:
        """The options with which a report shows the figure of a result, one mapping for each time.

        There are none if the result lacks what the figure needs.

        Args:
            result: The result.
            layer: The layer, for a figure that shows a single layer.
        """
        defaults = self.takes
        condition = result.shown_condition()
        if self.compares and condition == BASELINE:
            return []

        selection: dict[str, Any] = {}
        if "condition" in defaults:
            selection["condition"] = condition
        # A figure whose layer is None by default shows all layers, or their mean.
        if defaults.get("layer") is not None:
            selection["layer"] = layer
        return [
            {**selection, **options}
            for options in self.report
            if self.dataset_name(result, options) is not None
        ]

    def dataset_name(self, result: Result, options: Mapping[str, Any]) -> str | None:
        """The name of the dataset that the figure shows with these options; None if the result does
        not have it."""
        options = {**self.takes, **options}
        if self.needs:
            analysis = self.analysis(options)
            return analysis if analysis in result.datasets else None

        quantity = options["quantity"]
        for name, dataset in result.datasets.items():
            if quantity in dataset or f"{quantity}_by_segment" in dataset:
                return name
        return None

    def page_words(self, result: Result, options: Mapping[str, Any]) -> PageWords:
        """The words beside the figure on a page: its docstring up to the arguments, and what
        ``add_words`` adds."""
        docstring = inspect.getdoc(self.draw) or ""
        words = PageWords(note=docstring.split("\n\nArgs:")[0])
        if self.add_words is None:
            return words
        return self.add_words(words, result, options)

    def analysis(self, options: Mapping[str, Any]) -> str:
        """The name of the analysis that the figure shows with these options; empty if the option
        ``quantity`` decides.

        Args:
            options: All options of the figure, including those that have their defaults.
        """
        if isinstance(self.needs, str):
            return self.needs
        return self.needs[options["reading"]]


FIGURES: dict[str, Declared] = {}


def declare(
    needs: str | Mapping[str, str] = "",
    *,
    compares: bool = False,
    report: Sequence[Mapping[str, Any]] = (),
    chooses_heads: bool = False,
    add_words: AddWords | None = None,
) -> Callable[[Draw], Draw]:
    """Declare a figure for reports, config files and the gallery, and escape the names in it.

    Args:
        needs: The analysis that the figure shows, as for :class:`Declared`.
        compares: Whether the figure needs a condition other than the baseline.
        report: The options with which a report shows the figure, one mapping for each time.
        chooses_heads: Whether the data choose the heads if none are listed.
        add_words: Adds to the words beside the figure on a page, which are by default its
            docstring up to the arguments.

    Returns:
        A decorator for the function that draws the figure.
    """

    def decorator(draw: Draw) -> Draw:
        @functools.wraps(draw)
        def draw_escaped(*args: Any, **options: Any) -> go.Figure:
            figure = draw(*args, **options)
            _one_legend_entry_each(figure)
            return with_plain_names(figure)

        FIGURES[draw.__name__] = Declared(
            draw_escaped, needs, compares, tuple(report), chooses_heads, add_words
        )
        return cast(Draw, draw_escaped)

    return decorator


def with_plain_names(figure: go.Figure) -> go.Figure:
    """Escape "<" in the texts of a figure, and return the figure.

    plotly would make a link of ``<a …>`` in a name. The tags of line breaks, small print and hover
    texts are kept.
    """
    for element in (figure.layout, *figure.data):
        for name, value in element.to_plotly_json().items():
            if name not in _NOT_DRAWN:
                element[name] = _escaped(value)
    return figure


def several(results: Sequence[Result] | Result) -> list[Result]:
    """One or several results as a list.

    Raises:
        OptionError: The list is empty.
    """
    if isinstance(results, Result):
        return [results]
    if not results:
        raise OptionError("results=[] is empty; give at least one")
    return list(results)


def listed_conditions(result: Result, conditions: Sequence[str] | None) -> list[str]:
    """The conditions that a user lists for a figure, each once; by default all.

    Raises:
        OptionError: The result has no such condition, or one name is given instead of a list.
    """
    if conditions is None:
        return result.conditions
    if isinstance(conditions, str):
        raise OptionError(f"conditions={conditions!r}: give a list, such as [{conditions!r}]")
    names = list(dict.fromkeys(conditions))
    for name in names:
        check_condition(result, name)
    return names


def compared_conditions(
    result: Result, conditions: Sequence[str] | None, to: str = BASELINE
) -> list[str]:
    """The conditions that a figure compares with ``to``: those that are listed, or by default all,
    without the baseline and without ``to``.

    Raises:
        OptionError: There is none, or as for :func:`listed_conditions`.
    """
    result.condition()  # raises if the result has only the baseline
    names = listed_conditions(result, conditions)
    compared_names = [name for name in names if name not in (BASELINE, to)]
    if not compared_names:
        raise OptionError(
            f"there is no condition to compare with {to!r}: run or name at least one more; the"
            f" result has {result.conditions}"
        )
    return compared_names


def head_list(heads: Sequence[int | str] | int | str) -> list[int | str]:
    """One or several heads as a list.

    Raises:
        OptionError: The list is empty.
    """
    if isinstance(heads, str) or not isinstance(heads, Iterable):
        return [heads]
    head_names = list(heads)
    if not head_names:
        raise OptionError("heads=[] is empty; give at least one head")
    return head_names


def check_heads(
    heads: Sequence[int | str] | int | str, known_heads: Sequence[int], layer: int | None = None
) -> list[int]:
    """The numbers of some heads.

    Args:
        heads: One or several heads, by number or name.
        known_heads: The numbers of the heads that each layer has.
        layer: The layer that is shown; None if the same heads are shown of all layers, which takes
            numbers only.

    Raises:
        OptionError: A layer has no such head, a name such as "L1H2" is of another layer, an element
            is neither a whole number nor such a name, or the list is empty.
    """
    numbers = []
    for head in head_list(heads):
        number = head
        layer_and_head = head_named(head)
        if layer_and_head is not None:
            layer_of_head, number = layer_and_head
            if layer_of_head != layer:
                reason = "all layers show the same heads; give numbers"
                if layer is not None:
                    reason = f"layer {layer} is shown; give heads of that layer"
                raise OptionError(f"heads holds {head!r}, but {reason}, such as [0, 3]")

        if not isinstance(number, (int, np.integer)) or isinstance(number, bool):
            raise OptionError(
                f"heads holds {number!r}; give whole numbers, from 0, such as heads=[0, 3], or"
                ' ["L1H2"]'
            )
        if number not in known_heads:
            known_words = ", ".join(map(str, known_heads))
            if list(known_heads) == list(range(len(known_heads))):
                known_words = f"0 to {len(known_heads) - 1}"
            raise OptionError(f"head {number} is out of range: heads are {known_words}")
        numbers.append(int(number))
    return numbers


def _one_legend_entry_each(figure: go.Figure) -> None:
    """Give each group one entry in the legend, even if several panels show it."""
    named_groups = set()
    for trace in figure.data:
        is_undecided = trace.showlegend is None
        if trace.legendgroup and is_undecided:
            trace.showlegend = trace.legendgroup not in named_groups
            named_groups.add(trace.legendgroup)


def _escaped(value: Any) -> Any:
    """A property of a figure with "<" escaped in all of its texts."""
    if isinstance(value, str):
        return _MARKUP.sub("&lt;", value)
    if isinstance(value, dict):
        return {name: _escaped(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escaped(item) for item in value]
    if isinstance(value, np.ndarray) and value.dtype.kind not in "biuf":
        return np.array([_escaped(item) for item in value], dtype=object)
    return value
