"""The top of a page: verdicts in words or as a table, and a line of provenance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

from mechattn.analysis.registry import ANALYSES
from mechattn.engine.collect import lacking
from mechattn.errors import MemoryOptionError, OptionError
from mechattn.pages.figure_sections import time_words
from mechattn.render.received_figures import stated
from mechattn.render.theme import model_caption
from mechattn.render.words import percent, percent_words
from mechattn.results.result import Result
from mechattn.results.stored_conditions import matched_control
from mechattn.stats.comparison import Verdict

VERDICT_COLUMNS = (
    "model", "condition", "question attention, change", "under uniform attention", "heads below and above that",
    "prompts",
)  # fmt: skip


class Verdicts:
    """The verdicts of a result, each computed only once.

    Args:
        result: A result.
    """

    def __init__(self, result: Result) -> None:
        self.result = result
        self._found: dict[str, Verdict | OptionError] = {}

    def of(self, condition: str) -> Verdict:
        """The verdict on a condition."""
        if condition not in self._found:
            try:
                self._found[condition] = self.result.verdict(condition)
            except MemoryOptionError:
                raise
            except OptionError as error:
                self._found[condition] = error
        found = self._found[condition]
        if isinstance(found, OptionError):
            raise found
        return found


def verdicts(result: Result, known: Verdicts | None = None) -> list[str]:
    """One sentence per condition if received attention was measured; controls are reported with what they match."""
    if "received_attention" not in result.datasets:
        return []
    known = known or Verdicts(result)
    try:
        with explained([result]):
            return [f"{model_caption(result)}: {_sentence(known, name)}" for name in result.conditions[1:]]
    except MemoryOptionError:
        raise
    except OptionError as error:  # too few prompts for an interval, or a prompt without a question
        return [f"{model_caption(result)}: no verdict, since {error}."]


def _sentence(known: Verdicts, name: str) -> str:
    control = matched_control(known.result, name)
    beside = None if control is None else known.of(control)
    return stated(known.result, name, known.of(name), "question", control, beside)


def verdict_rows(result: Result, known: Verdicts | None = None) -> list[tuple[str, ...]]:
    """The verdicts as table rows with the columns ``VERDICT_COLUMNS``, for pages with several models."""
    model = model_caption(result)
    if "received_attention" not in result.datasets:
        return []
    known = known or Verdicts(result)
    try:
        with explained([result]):
            found = {name: known.of(name) for name in result.conditions[1:]}
    except MemoryOptionError:
        raise
    except OptionError as error:
        return [(model, "", f"no verdict, since {error}", "", "", "")]
    return [
        (
            model,
            name,
            percent_words(verdict.change),
            percent(verdict.null.estimate),
            f"{int(verdict.beyond.sum())} and {int(verdict.above.sum())} of {verdict.beyond.size}",
            str(verdict.n),
        )
        for name, verdict in found.items()
    ]


def captions(results: Seq[Result]) -> list[str]:
    """The caption of each result: its model, numbered if several results have the same model."""
    names = [model_caption(result) for result in results]
    return [
        f"{name}, result {names[: i + 1].count(name)}" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]


def strip_words(result: Result) -> str:
    """One line of provenance."""
    about, model = result.provenance, result.provenance["model"]
    verified = "verified" if model["verified"] else "not verified"
    parts = [model_caption(result), f"{model['dtype']} on {model['device']}", verified]
    prompts = about["prompts"]
    parts += [f"{prompts['count']} prompts ({prompts['hash']})", f"seed {about['seed']}", f"engine {about['engine']}"]
    parts += [f"{name} {about['versions'][name]}" for name in ("mechattn", "transformer-lens", "torch")]
    return " · ".join([*parts, time_words(result)])


@contextmanager
def explained(results: Seq[Result]) -> Iterator[None]:
    """Explain errors caused by quantities missing from a stored result; any other error is a bug in mechattn."""
    try:
        yield
    except OptionError:
        raise
    except Exception as error:
        for result in results:
            for analysis in (make() for make in ANALYSES):
                missing = lacking(result[analysis.name], analysis) if analysis.name in result.datasets else []
                if missing:
                    raise OptionError(
                        f"{analysis.name} lacks {', '.join(missing[:4])}: the result was stored by another version, or "
                        "changed since"
                    ) from error
        raise


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Flatten nested values into table rows."""
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        rows += flat(value, f"{prefix}{name} ") if isinstance(value, Mapping) else [(f"{prefix}{name}", str(value))]
    return rows
