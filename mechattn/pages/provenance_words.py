"""How the numbers of a page were made, in words: provenance, citation, the docs that explain them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mechattn.render.words import model_caption
from mechattn.results.result import Result

# The page of docs/concepts on each analysis.
CONCEPTS = {
    "received-attention": ("received_attention", "attention_map"),
    "attention-focus": ("attention_focus", "score_decomposition"),
    "attention-sinks": ("attention_sinks",),
    "affine-shift": ("affine_shift",),
    "segment-flow": ("segment_flow",),
    "attention-budget": ("attention_budget",),
    "head-updates": (
        "head_updates",
        "top_target_updates",
        "block_updates",
        "direct_logits",
        "segment_logits",
    ),
    "mlp-activations": ("mlp_activations",),
}
CITATION = """\
{title}. {runs}. Made with mechattn {mechattn}, transformer-lens {transformer_lens}.

@software{{mechattn, title = {{mechattn: what attention does, measured on hooked transformers}}, \
author = {{{{The mechattn developers}}}}, version = {{{mechattn}}}, year = {{{year}}}}}"""


def concepts(results: Sequence[Result]) -> list[str]:
    """The files of the docs that say what was measured and how it was compared."""
    measured = {name for result in results for name in result.datasets}
    names = [name for name, analyses in CONCEPTS.items() if measured.intersection(analyses)]
    return [f"docs/concepts/{name}.md" for name in [*names, "comparisons"]]


def time_words(result: Result) -> str:
    """When the numbers were computed; a range if several runs were merged."""
    time = result.provenance["time"]
    return time if isinstance(time, str) else " to ".join(time)


def citation(title: str, results: Sequence[Result]) -> str:
    """How to cite a figure: a caption and a BibTeX entry."""
    versions = results[0].provenance["versions"]
    runs = []
    for result in results:
        count = result.provenance["prompts"]["count"]
        seed = result.provenance["seed"]
        runs.append(f"{model_caption(result)}, {count} prompts, seed {seed}")
    return CITATION.format(
        title=title,
        runs="; ".join(runs),
        mechattn=versions["mechattn"],
        transformer_lens=versions["transformer-lens"],
        year=time_words(results[0])[:4],
    )


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Flatten nested values into table rows."""
    rows: list[tuple[str, str]] = []
    for name, value in values.items():
        label = f"{prefix}{name}"
        if isinstance(value, Mapping):
            rows += flat(value, f"{label} ")
        else:
            rows.append((label, str(value)))
    return rows
