"""What each figure declares: the analysis that it shows, whether it compares conditions, and its place in a report."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, TypeVar

from mechattn.axes import BASELINE
from mechattn.results.result import Result

Draw = TypeVar("Draw", bound=Callable)


@dataclass(frozen=True)
class Declared:
    """A figure: the function that draws it, and what it needs.

    Args:
        draw: The function; if its first parameter is ``result`` or ``results``, it draws results.
        needs: The dataset of the analysis that it shows; by its ``reading``, if a mapping; "" if ``quantity`` decides.
        compares: Whether it needs a condition other than the baseline.
        report: The options with which a report shows it, besides layer, condition and heads; empty for not at all.
    """

    draw: Callable
    needs: str | Mapping[str, str]
    compares: bool
    report: Seq[Mapping[str, Any]]

    @property
    def takes(self) -> Mapping[str, Any]:
        """The options that it takes, with their defaults."""
        return {p.name: p.default for p in list(inspect.signature(self.draw).parameters.values())[1:]}

    @property
    def draws_results(self) -> bool:
        """Whether it draws results, and not an evaluation or patching."""
        return next(iter(inspect.signature(self.draw).parameters)) in ("result", "results")

    def shown(self, result: Result, given: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The datasets and options with which a report shows it; none if the result lacks what it needs."""
        if self.compares and result.shown_condition() == BASELINE:
            return
        named = {"condition": result.shown_condition(), "conditions": result.conditions[1:], **given}
        wanted = [  # a figure whose condition or layer is None by default chooses for each result
            name
            for name, default in self.takes.items()
            if name in named and (default is inspect.Parameter.empty or default in (0, BASELINE))
        ]
        wanted += [name for name in ("heads", "choose") if name in named and "choose" in self.takes]
        for extra in self.report:
            dataset = self.dataset(result, {**self.takes, **extra})
            if dataset is not None:
                yield dataset, {name: named[name] for name in wanted} | dict(extra)

    def dataset(self, result: Result, options: Mapping[str, Any]) -> str | None:
        """The dataset of a result that it shows with these options, if the result has it."""
        if self.needs:
            return self.analysis(options) if self.analysis(options) in result.datasets else None
        names = {options["quantity"], f"{options['quantity']}_by_segment"}
        return next((name for name, dataset in result.datasets.items() if names & set(dataset)), None)

    def analysis(self, options: Mapping[str, Any]) -> str:
        """The dataset that it shows with these options; "" if ``quantity`` decides."""
        return self.needs if isinstance(self.needs, str) else self.needs[options["reading"]]


FIGURES: dict[str, Declared] = {}


def figure(
    needs: str | Mapping[str, str] = "", *, compares: bool = False, report: Seq[Mapping[str, Any]] = ()
) -> Callable[[Draw], Draw]:
    """Declare a figure; see :class:`Declared`. A report, a config file and the gallery ask here."""

    def declared(draw: Draw) -> Draw:
        FIGURES[draw.__name__] = Declared(draw, needs, compares, tuple(report))
        return draw

    return declared
