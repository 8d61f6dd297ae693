"""Writes the methods paragraph of a result; every number in it comes from the result."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pandas as pd

from mechattn.axes import BASELINE
from mechattn.contrast.quantities import NULLS
from mechattn.errors import OptionError
from mechattn.results.result import Result, alike_words, units_of
from mechattn.stats.paired import FEWEST_FOR_ALL


def methods(result: Result, tables: Seq[pd.DataFrame]) -> str:
    """See :meth:`mechattn.results.result.Result.methods`, which explains the arguments."""
    about = result.provenance
    for number, table in enumerate(tables):
        if not {"condition", "quantity", "family", "level", "unit"} <= set(
            getattr(table, "attrs", {})
        ):
            raise OptionError(
                f"table {number} has no record of how it was made; give tables from Result.compare"
            )
    names = {str(name) for dataset in result.datasets.values() for name in dataset}
    nulls = sorted(
        words for kind, words in NULLS.items() if any(name.endswith(f"_{kind}") for name in names)
    )
    sentences = [
        _model(about["model"], about["versions"], about["engine"]),
        _prompts(result),
        _conditions(result),
        _analyses(about),
        f"Each quantity is reported with its value under {_and(nulls)}." if nulls else "",
        *(_compared(table) for table in tables),
        f"The random seed was {about['seed']}.",
    ]
    return " ".join(filter(None, sentences))


def _model(model: Mapping[str, Any], versions: Mapping[str, Any], engine: str) -> str:
    revision = f", revision {model['revision']}" if model.get("revision") else ""
    by = [f"{name} {_several(versions[name])}" for name in ("mechattn", "transformer-lens", "transformers", "torch")
          if name in versions]  # fmt: skip
    how = {
        "streaming": "in blocks of query rows, without storing the pattern",
        "fused": "by two calls of a fused kernel",
        "hooks": "through the model's hooks",
    }
    said = "The hooked model was not verified against the model's own attention"
    if model["verified"]:
        left, mended = (_several(model.get(name) or []) for name in ("not_verified", "mended"))
        said = "The hooked model was verified against the model's own attention when it was loaded"
        said += (
            f"{f' (not checked: {left})' if left else ''}{f'; mended: {mended}' if mended else ''}"
        )
    return (
        f"The attention of {model['name']} ({model['parameters']:,} parameters, {model['layers']} layers of "
        f"{model['heads']} heads, {model['dtype']}{revision}) was measured {how.get(engine, engine)}, with {_and(by)}. "
        f"{said}."
    )


def _prompts(result: Result) -> str:
    prompts = result.provenance["prompts"]
    units = units_of(result, result["sequences"].sizes["prompt"])
    each = "prompt" if units.of is None else "group"
    over = f"The run used {units.words} (hash {prompts['hash']}"
    template = f", template “{prompts['template']}”" if "template" in prompts else ""
    return f"{over}{template}), and the unit of replication was the {each}. {alike_words(result)}".strip()


def _conditions(result: Result) -> str:
    """What each condition does, and how many tokens it inserts."""
    stored = result.provenance["conditions"]
    parts = []
    for name in result.conditions:
        if name == BASELINE:
            continue
        about = stored.get(name, {})
        counts = (result["sequences"].origin.sel(condition=name).values == -1).sum(-1)
        low, high = int(np.min(counts)), int(np.max(counts))
        tokens = (
            "no tokens"
            if not high
            else f"{low} tokens"
            if low == high
            else f"{low} to {high} tokens"
        )
        parts.append(f"“{name}” ({about.get('written', 'unknown')}; {tokens} inserted)")
    if not parts:
        return "The prompts were read unchanged."
    return f"Each prompt was read unchanged and under {_and(parts)}, in one pass."


def _analyses(about: Mapping[str, Any]) -> str:
    parts = []
    for name, options in about["analyses"].items():
        given = ", ".join(f"{key} {value}" for key, value in options.items())
        parts.append(name.replace("_", " ") + (f" ({given})" if given else ""))
    layers = about["measured_layers"]
    every = layers == list(range(about["model"]["layers"]))
    return f"The analyses were {_and(parts)}, in {'all layers' if every else 'layers ' + _and(list(map(str, layers)))}."


def _compared(table: pd.DataFrame) -> str:
    """How one table was computed, from its attributes."""
    about = table.attrs
    of = "" if about["segment"] == "all" else f" of the {about['segment']}"
    n = f" (n = {table.n.iloc[0]})" if len(table) else ""
    chosen = f"the {about['top']} largest" if "top" in about else "found"
    half = f", {chosen} on one half and reported on the other" if about["select"] == "half" else ""
    scale = f" as {table.scale.iloc[0]}s" if len(table) else ""
    tried = about["patterns"]
    patterns = "all patterns of signs" if tried is None else f"{tried:,} random patterns of signs"
    bags = (
        f" of {about['resampled']}, which are also what the bootstrap resamples"
        if "resampled" in about
        else ""
    )
    units = int(table.n.iloc[0]) if len(table) else 0
    skewed = ""
    if units >= FEWEST_FOR_ALL:
        skewed = ", bootstrap-t tests, and step-down bootstrap-t tests with p divided by their number (the largest p)"
    random = ""
    if "null_random" in about:
        random = f"; q_random, over {about['tests_random']} tests, is of the larger p of this and of {about['null_random']}"
    return (
        f"“{about['condition']}” was compared with “{about['to']}” in {about['quantity']}{of}{scale}, paired by "
        f"{about['unit'].partition(' ')[0]}{n}{half}: {100 * about['level']:g} % t intervals; sign-flip tests "
        f"({patterns}{bags}){skewed} against {about['null']}; "
        f"Benjamini-Hochberg over {about['family']}{random}; seed {about['seed']}."
    )


def _several(value: Any) -> str:
    return _and([str(part) for part in value]) if isinstance(value, (list, tuple)) else str(value)


def _and(parts: Seq[str]) -> str:
    return (
        parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""
    )
