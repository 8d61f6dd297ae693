"""The methods paragraph of a result; every number in it comes from the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from mechattn.axes import BASELINE
from mechattn.contrast.quantities import NULLS, inserted_words
from mechattn.errors import OptionError
from mechattn.results.result import Result, alike_words, units_of
from mechattn.stats.paired import FEWEST_FOR_SIMULTANEOUS


def methods(result: Result, tables: Sequence[pd.DataFrame]) -> str:
    """See :meth:`mechattn.results.result.Result.methods`, which explains the arguments.

    Raises:
        OptionError: A table is not from ``Result.compare``.
    """
    provenance = result.provenance
    for number, table in enumerate(tables):
        if "patterns" not in getattr(table, "attrs", {}):  # only tables of compare have it
            raise OptionError(
                f"table {number} has no record of how it was made; give tables from Result.compare"
            )

    sentences = [
        _model(provenance["model"], provenance["versions"], provenance["engine"]),
        _prompts(result),
        _conditions(result),
        _analyses(provenance),
    ]

    # The nulls that were computed: the names of their variables end with their kind.
    variable_names: set[str] = set()
    for dataset in result.datasets.values():
        variable_names |= set(map(str, dataset))
    nulls = []
    for kind, words in NULLS.items():
        ending = f"_{kind}"
        if any(name.endswith(ending) for name in variable_names):
            nulls.append(words)
    if nulls:
        null_words = _and(sorted(nulls))
        sentences.append(f"Each quantity is reported with its value under {null_words}.")

    for table in tables:
        sentences.append(_compared(table))
    sentences.append(f"The random seed was {provenance['seed']}.")
    return " ".join(sentences)


# How each engine measures attention, by its name in the provenance.
_ENGINES = {
    "streaming": "in blocks of query rows, without storing the pattern",
    "fused": "by two calls of a fused kernel",
    "hooks": "through the model's hooks",
}
_LIBRARIES = ("mechattn", "transformer-lens", "transformers", "torch")


def _model(model: Mapping[str, Any], versions: Mapping[str, Any], engine: str) -> str:
    """A sentence on the model, the engine and the libraries, and one on whether it was verified."""
    layers = f"{model['layers']} layers of {model['heads']} heads"
    size = f"{model['parameters']:,} parameters, {layers}, {model['dtype']}"
    if model.get("revision"):
        size += f", revision {model['revision']}"

    libraries = []
    for name in _LIBRARIES:
        if name in versions:
            version = _several(versions[name])
            libraries.append(f"{name} {version}")

    verified_words = "The hooked model was not verified against the model's own attention"
    if model["verified"]:
        verified_words = (
            "The hooked model was verified against the model's own attention when it was loaded"
        )
        if model.get("not_verified"):
            verified_words += f" (not checked: {_several(model['not_verified'])})"
        if model.get("mended"):
            verified_words += f"; mended: {_several(model['mended'])}"

    engine_words = _ENGINES.get(engine, engine)
    return (
        f"The attention of {model['name']} ({size}) was measured {engine_words},"
        f" with {_and(libraries)}. {verified_words}."
    )


def _prompts(result: Result) -> str:
    """A sentence on the prompts, their template and the unit, and how much prompts repeat each
    other.
    """
    prompts = result.provenance["prompts"]
    units = units_of(result)
    unit_word = "prompt"
    if units.group_of_prompt is not None:
        unit_word = "group"
    source = f"hash {prompts['hash']}"
    if "template" in prompts:
        source += f", template “{prompts['template']}”"
    sentence = (
        f"The run used {units.words} ({source}), and the unit of replication was the {unit_word}."
    )
    # The words are empty if the prompts do not repeat each other or groups take account of it.
    return f"{sentence} {alike_words(result)}".strip()


def _conditions(result: Result) -> str:
    """A sentence on what each condition does and the number of tokens that it inserts."""
    stored = result.provenance["conditions"]
    phrases = []
    for name in result.conditions:
        if name == BASELINE:
            continue

        call = stored[name]["written"]
        phrases.append(f"“{name}” ({call}; {inserted_words(result, name)})")

    if not phrases:
        return "The prompts were read unchanged."
    return f"Each prompt was read unchanged and under {_and(phrases)}, in one pass."


def _analyses(provenance: Mapping[str, Any]) -> str:
    """A sentence on the analyses with their options, and on the layers."""
    phrases = []
    for name, options in provenance["analyses"].items():
        words = name.replace("_", " ")
        if options:
            option_words = [f"{key} {value}" for key, value in options.items()]
            words += f" ({', '.join(option_words)})"
        phrases.append(words)

    layers = provenance["measured_layers"]
    all_layers = list(range(provenance["model"]["layers"]))
    layer_words = "all layers"
    if layers != all_layers:
        numbers = [str(layer) for layer in layers]
        layer_words = f"layers {_and(numbers)}"
    return f"The analyses were {_and(phrases)}, in {layer_words}."


def _compared(table: pd.DataFrame) -> str:
    """A sentence on how a table was computed, from its attributes."""
    attributes = table.attrs
    quantity_words = attributes["quantity"]
    if attributes["segment"] != "all":
        quantity_words += f" of the {attributes['segment']}"
    quantity_words += f" as {attributes['scale']}s"

    # The units, and whether heads were selected on one half of them.
    pairing_words = f"paired by {attributes['unit_kind']}"
    unit_count = 0  # unknown in a table without rows
    if len(table):
        unit_count = int(table.n.iloc[0])
        pairing_words += f" (n = {unit_count})"
    if attributes["select"] == "half":
        selection_words = "found"
        if "top" in attributes:
            selection_words = f"the {attributes['top']} largest"
        pairing_words += f", {selection_words} on one half and reported on the other"

    # The tests, and the family over which they are adjusted.
    pattern_words = "all patterns of signs"
    if attributes["patterns"] is not None:
        pattern_words = f"{attributes['patterns']:,} random patterns of signs"
    if "resampled" in attributes:
        pattern_words += (
            f" of {attributes['resampled']}, which are also what the bootstrap resamples"
        )

    null_words = attributes["null"]
    if attributes["tested"] == "difference":
        null_words = "no difference, as no null is known"
    test_words = f"sign-flip tests ({pattern_words}) against {null_words}"
    if unit_count >= FEWEST_FOR_SIMULTANEOUS:
        test_words += (
            "; p is the largest of the p of this test, the p of a bootstrap-t test, and the p of a"
            " step-down bootstrap-t test divided by the number of tests"
        )

    family_words = f"Benjamini-Hochberg over {attributes['family']}"
    if "null_random" in attributes:
        family_words += (
            f"; q_random, over {attributes['tests_random']} tests, adjusts the larger of this p and"
            f" the p against {attributes['null_random']}"
        )

    comparison_words = (
        f"“{attributes['condition']}” was compared with “{attributes['to']}” in {quantity_words}"
    )
    interval_words = f"{100 * attributes['level']:g} % t intervals"
    clauses = [interval_words, test_words, family_words, f"seed {attributes['seed']}"]
    return f"{comparison_words}, {pairing_words}: {'; '.join(clauses)}."


def _several(value: Any) -> str:
    """A value of the provenance in words; in merged results it may be a list."""
    if isinstance(value, (list, tuple)):
        return _and([str(entry) for entry in value])
    return str(value)


def _and(phrases: Sequence[str]) -> str:
    """An enumeration of phrases: "a, b and c"."""
    if len(phrases) <= 1:
        return "".join(phrases)
    return f"{', '.join(phrases[:-1])} and {phrases[-1]}"
