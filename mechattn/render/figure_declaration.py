"""What each figure declares, and what all of them do: check which heads are shown, and escape names."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import plotly.graph_objects as go

from mechattn.axes import BASELINE, head_named
from mechattn.errors import OptionError
from mechattn.results.result import Result

Draw = TypeVar("Draw", bound=Callable)
_MARKUP = re.compile(
    r"<(?!(?:br|/?sup|/?extra)>)"
)  # every "<" except in tags that our own titles and hovers use
_OURS = ("template", "meta")  # the template, and metadata that plotly doesn't draw


@dataclass(frozen=True)
class Declared:
    """A figure: the function that draws it, and what it needs."""

    draw: Callable
    needs: (
        str | Mapping[str, str]
    )  # the dataset that it shows, by its reading if a mapping; "" if the quantity decides
    compares: bool  # whether it needs a condition other than the baseline
    report: Seq[
        Mapping[str, Any]
    ]  # with which options a report shows it, besides layer, condition and heads

    @property
    def takes(self) -> Mapping[str, Any]:
        """The options that it takes, with their defaults."""
        return {
            p.name: p.default for p in list(inspect.signature(self.draw).parameters.values())[1:]
        }

    @property
    def draws_results(self) -> bool:
        """Whether it draws results, and not an evaluation or patching."""
        return next(iter(inspect.signature(self.draw).parameters)) in ("result", "results")

    def shown(
        self, result: Result, given: Mapping[str, Any]
    ) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The datasets and options with which a report shows it; none if the result lacks what it needs."""
        if self.compares and result.shown_condition() == BASELINE:
            return
        named = {
            "condition": result.shown_condition(),
            "conditions": result.conditions[1:],
            **given,
        }
        wanted = [  # a figure whose condition or layer is None by default chooses for each result
            name
            for name, default in self.takes.items()
            if name in named and (default is inspect.Parameter.empty or default in (0, BASELINE))
        ]
        wanted += [name for name in ("heads", "top") if name in named and "top" in self.takes]
        for extra in self.report:
            dataset = self.dataset(result, {**self.takes, **extra})
            if dataset is not None:
                yield dataset, {name: named[name] for name in wanted} | dict(extra)

    def dataset(self, result: Result, options: Mapping[str, Any]) -> str | None:
        """The dataset of a result that it shows with these options, if the result has it."""
        if self.needs:
            return self.analysis(options) if self.analysis(options) in result.datasets else None
        names = {options["quantity"], f"{options['quantity']}_by_segment"}
        return next(
            (name for name, dataset in result.datasets.items() if names & set(dataset)), None
        )

    def analysis(self, options: Mapping[str, Any]) -> str:
        """The dataset that it shows with these options; "" if ``quantity`` decides."""
        return self.needs if isinstance(self.needs, str) else self.needs[options["reading"]]


FIGURES: dict[str, Declared] = {}


def figure(
    needs: str | Mapping[str, str] = "",
    *,
    compares: bool = False,
    report: Seq[Mapping[str, Any]] = (),
) -> Callable[[Draw], Draw]:
    """Declare a figure (see :class:`Declared`), for reports, config files and the gallery; its names are escaped."""

    def declared(draw: Draw) -> Draw:
        @functools.wraps(draw)
        def drawn(*args: Any, **options: Any) -> go.Figure:
            return with_plain_names(draw(*args, **options))

        FIGURES[draw.__name__] = Declared(drawn, needs, compares, tuple(report))
        return cast(Draw, drawn)

    return declared


def with_plain_names(figure: go.Figure) -> go.Figure:
    """The figure with "<" escaped in its texts except in line breaks and small print: plotly makes ``<a …>`` a link."""
    for part in (figure.layout, *figure.data):
        _escape(part)
    return figure


def _escape(part: Any) -> None:
    for name in part.to_plotly_json():
        value = part[name]
        if name in _OURS:
            continue
        if hasattr(value, "to_plotly_json"):
            _escape(value)
        elif isinstance(value, tuple) and value and hasattr(value[0], "to_plotly_json"):
            for one in value:
                _escape(one)
        elif (made := _escaped(value)) is not value:
            part[name] = made


def _escaped(value: Any) -> Any:
    """The same object if there is nothing to escape."""
    if isinstance(value, str):
        return _MARKUP.sub("&lt;", value) if _MARKUP.search(value) else value
    if isinstance(value, dict):  # the arguments of a slider's steps
        made = {name: _escaped(one) for name, one in value.items()}
        return made if any(made[name] is not value[name] for name in value) else value
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OUT":
        return value
    if isinstance(value, (list, tuple, np.ndarray)):
        parts = [_escaped(one) for one in value]
        return (
            parts if any(new is not old for new, old in zip(parts, value, strict=True)) else value
        )
    return value


def listed_or_chosen(
    heads: Seq[int | str] | None, top: int | None
) -> tuple[list[int | str], int | None]:
    """The named heads, or the number of heads to choose."""
    if (heads is None) == (top is None):
        raise OptionError(
            f"heads={heads!r}, top={top!r}: give one of the two, such as heads=[0, 3] or top=3"
        )
    if top is not None:
        if isinstance(top, bool) or not isinstance(top, int) or top < 1:
            raise OptionError(f"top={top!r}: give a number of heads, at least 1")
        return [], top
    if not isinstance(heads, (list, tuple, range, np.ndarray)):
        raise OptionError(
            f"heads={heads!r}: give a list, such as [0, 3], or top=… for a number of heads"
        )
    return list(heads), None


def check_heads(heads: Seq[int | str], count: int, layer: int | None = None) -> list[int]:
    """The heads as numbers; refuses those that a layer doesn't have, and names such as "L1H2" of another layer."""
    found = []
    for given in heads:
        of, head = head_named(given) or (layer, given)
        if isinstance(head, bool) or not isinstance(head, (int, np.integer)):
            raise OptionError(
                f'heads holds {head!r}; give whole numbers, from 0, such as heads=[0, 3], or ["L1H2"]'
            )
        if of != layer:
            shown = "all layers show the same heads" if layer is None else f"layer {layer} is shown"
            raise OptionError(
                f"heads holds {given!r}, but {shown}; give heads of that layer, such as [0, 3]"
            )
        if not 0 <= head < count:
            raise OptionError(f"head {head} is out of range: heads are 0 to {count - 1}")
        found.append(int(head))
    if not found:
        raise OptionError("heads=[] is empty; give at least one head")
    if len(set(found)) < len(found):
        raise OptionError(f"heads={list(heads)} names a head twice")
    return found
