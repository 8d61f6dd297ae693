"""What each figure declares, and what all of them do: check which heads are shown, and escape
names.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import plotly.graph_objects as go

from mechattn.axes import BASELINE
from mechattn.errors import OptionError
from mechattn.results.result import Result, head_named

Draw = TypeVar("Draw", bound=Callable)
# Every "<" except in tags that our own titles and hovers use.
_MARKUP = re.compile(r"<(?!(?:br|/?sup|/?extra)>)")
_NOT_DRAWN = ("template", "meta", "type")  # properties whose texts plotly shows nowhere


@dataclass(frozen=True)
class PageTable:
    """A table of words that is folded under a figure.

    Args:
        title: Its heading.
        columns: The names of the columns.
        rows: The cells of each row.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class PageWords:
    """What a page says beside a figure.

    Args:
        note: How to read it.
        title_end: What follows its title.
        table: Its numbers as a table, if the page has one.
    """

    note: str
    title_end: str = ""
    table: PageTable | None = None


# From what a page says of a figure, with its result and options, to what it says with more.
AddWords = Callable[[PageWords, Result, Mapping[str, Any]], PageWords]


@dataclass(frozen=True)
class Declared:
    """A figure: the function that draws it, and what it needs.

    Args:
        draw: The function.
        needs: The dataset that it shows, by its reading if a mapping; "" if the quantity decides.
            Of a figure that draws no result, what it draws, such as "patching".
        compares: Whether it needs a condition other than the baseline.
        report: With which options a report shows it, besides layer and condition.
        chooses_heads: Whether the data choose its heads where none are listed.
        add_words: Adds to what a page says beside it.
    """

    draw: Callable
    needs: str | Mapping[str, str]
    compares: bool
    report: Sequence[Mapping[str, Any]]
    chooses_heads: bool
    add_words: AddWords | None

    @property
    def takes(self) -> Mapping[str, Any]:
        """The options that it takes, with their defaults."""
        _, *options = inspect.signature(self.draw).parameters.values()
        return {option.name: option.default for option in options}

    @property
    def subject(self) -> str:
        """What it draws, which is the name of its first parameter: a "result", "results" beside
        each other, or such as "patching"."""
        first_parameter, *_ = inspect.signature(self.draw).parameters
        return first_parameter

    @property
    def draws_results(self) -> bool:
        """Whether it draws results, and not an evaluation or patching."""
        return self.subject in ("result", "results")

    def in_report(self, result: Result, layer: int) -> list[dict[str, Any]]:
        """The options of each time that a report shows it; none if the result lacks what it needs.

        Args:
            result: The result.
            layer: The layer of a figure that shows one.
        """
        takes = self.takes
        condition = result.shown_condition()
        if self.compares and condition == BASELINE:
            return []

        selected: dict[str, Any] = {}
        if "condition" in takes:
            selected["condition"] = condition
        if takes.get("layer") is not None:  # None is the mean over all layers
            selected["layer"] = layer
        return [{**selected, **options} for options in self.report if self.dataset(result, options)]

    def dataset(self, result: Result, options: Mapping[str, Any]) -> str | None:
        """The dataset of a result that it shows with these options, if the result has it."""
        options = {**self.takes, **options}
        if self.needs:
            analysis = self.analysis(options)
            return analysis if analysis in result.datasets else None

        names = {options["quantity"], f"{options['quantity']}_by_segment"}
        for dataset_name, dataset in result.datasets.items():
            if names & set(dataset):
                return dataset_name
        return None

    def page_words(self, result: Result, options: Mapping[str, Any]) -> PageWords:
        """What a page says beside it: its docstring up to the arguments, and what it adds."""
        docstring = inspect.getdoc(self.draw) or ""
        words = PageWords(note=docstring.split("\n\nArgs:")[0])
        if self.add_words is None:
            return words
        return self.add_words(words, result, options)

    def analysis(self, options: Mapping[str, Any]) -> str:
        """The dataset that it shows with all of these options; "" if ``quantity`` decides."""
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
    page_words: AddWords | None = None,
) -> Callable[[Draw], Draw]:
    """Declare a figure, for reports, config files and the gallery; its names are escaped.

    Args:
        needs: As for :class:`Declared`, like those that follow.
        compares: Whether it needs a condition other than the baseline.
        report: With which options a report shows it.
        chooses_heads: Whether the data choose its heads.
        page_words: Adds to what a page says beside it, which is the docstring up to the arguments.

    Returns:
        A decorator for the function that draws it.
    """

    def declared(draw: Draw) -> Draw:
        @functools.wraps(draw)
        def drawn(*args: Any, **options: Any) -> go.Figure:
            figure = draw(*args, **options)
            _one_legend_entry_each(figure)
            return with_plain_names(figure)

        FIGURES[draw.__name__] = Declared(
            drawn, needs, compares, tuple(report), chooses_heads, page_words
        )
        return cast(Draw, drawn)

    return declared


def _one_legend_entry_each(figure: go.Figure) -> None:
    """Name each group in the legend once, however many panels show it."""
    named_groups = set()
    for trace in figure.data:
        is_undecided = trace.showlegend is None
        if trace.legendgroup and is_undecided:
            trace.showlegend = trace.legendgroup not in named_groups
            named_groups.add(trace.legendgroup)


def with_plain_names(figure: go.Figure) -> go.Figure:
    """The figure with "<" escaped in its texts except in line breaks and small print: plotly makes
    ``<a …>`` a link.
    """
    for element in (figure.layout, *figure.data):
        for name, value in element.to_plotly_json().items():
            if name not in _NOT_DRAWN:
                element[name] = _escaped(value)
    return figure


def _escaped(value: Any) -> Any:
    """A property with "<" escaped in all of its texts."""
    if isinstance(value, str):
        return _MARKUP.sub("&lt;", value)
    if isinstance(value, dict):
        return {name: _escaped(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escaped(item) for item in value]
    if isinstance(value, np.ndarray) and value.dtype.kind not in "biuf":
        return np.array([_escaped(item) for item in value], dtype=object)
    return value


def several(results: Sequence[Result] | Result) -> list[Result]:
    """The results of a figure that draws one or more of them."""
    if isinstance(results, Result):
        return [results]
    if not results:
        raise OptionError("results=[] is empty; give at least one")
    return list(results)


def head_list(heads: Sequence[int | str] | int | str) -> list[int | str]:
    """One head or several as a list; an empty one is refused."""
    if isinstance(heads, (int, np.integer, str)):
        return [heads]
    listed = list(heads)
    if not listed:
        raise OptionError("heads=[] is empty; give at least one head")
    return listed


def check_heads(
    heads: Sequence[int | str] | int | str, measured: Sequence[int], layer: int | None = None
) -> list[int]:
    """The heads as numbers.

    Args:
        heads: Heads by number or name, one or several.
        measured: The heads that a layer of the model, or of the result, has.
        layer: The layer that is shown; None if all layers show the same heads.

    Raises:
        OptionError: The layer has no such head, a name such as "L1H2" is of another layer, or there
            are no heads.
    """
    numbers = []
    for head in head_list(heads):
        named = head_named(head)
        if named is None:
            number = head
        elif named[0] == layer:
            number = named[1]
        else:
            reason = "all layers show the same heads; give numbers"
            if layer is not None:
                reason = f"layer {layer} is shown; give heads of that layer"
            raise OptionError(f"heads holds {head!r}, but {reason}, such as [0, 3]")

        if not isinstance(number, (int, np.integer)) or isinstance(number, bool):
            raise OptionError(
                f"heads holds {number!r}; give whole numbers, from 0, such as heads=[0, 3], or"
                ' ["L1H2"]'
            )
        if number not in measured:
            measured_words = ", ".join(map(str, measured))
            if list(measured) == list(range(len(measured))):
                measured_words = f"0 to {len(measured) - 1}"
            raise OptionError(f"head {number} is out of range: heads are {measured_words}")
        numbers.append(int(number))
    return numbers
