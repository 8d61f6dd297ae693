"""Predicts the size of a result from the shapes that its analyses store."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mechattn.axes import SEGMENTS
from mechattn.engine.check import with_baseline, with_names
from mechattn.engine.forward import BLIND, with_nulls
from mechattn.errors import ModelError
from mechattn.model.checkpoint import layers_and_heads

if TYPE_CHECKING:
    from mechattn.jobs.job import Job

LARGE = 2**30  # bytes of per-prompt values, from which on the size is said
VALUES, POSITIONS, MOMENTS, TOKENS = (
    "each prompt's values", "each prompt's positions", "moments by position", "the tokens that were read",
)  # fmt: skip
_LETTERS = 4  # of an English token


def stored_bytes(
    analyses: Seq[Any], layers: int, heads: int, prompts: int, conditions: int, length: int, inserted: int,
    positions: str,
) -> dict[str, int]:  # fmt: skip
    """The bytes of the arrays in memory, by kind."""
    sizes = {"head": heads, "segment": len(SEGMENTS), "to_segment": len(SEGMENTS), "other_condition": conditions}
    longest = length + inserted
    found = dict.fromkeys((VALUES, MOMENTS, POSITIONS), 0)
    for analysis in analyses:
        sizes |= {name: len(labels) for name, labels in getattr(analysis, "coords", {}).items()}
        for name, quantity in with_nulls(analysis).items():
            if name.endswith(BLIND):  # only in models with ALiBi or learned sinks
                continue
            cells = conditions * layers * prod(sizes.get(dim, longest) for dim in quantity.dims if dim != "key")
            if "key" not in quantity.dims:
                wide = 8 if "other_condition" in quantity.dims else 4  # products of changes are summed in float64
                found[VALUES] += wide * prompts * cells
                continue
            found[MOMENTS] += 3 * 8 * cells * (longest + length)
            if positions == "prompts":
                found[POSITIONS] += 4 * prompts * cells * (longest + length)
    return found | {TOKENS: prompts * (3 * 4 * conditions * longest + 8)}


def foretold(job: Job) -> int | None:
    """The approximate bytes of per-prompt values for all shards of a job; None if the model's config does not say."""
    try:
        size = layers_and_heads(job.model)
    except ModelError:  # not on this machine, or invalid, which a worker will report
        return None
    if size is None:
        return None
    given = job.options.layers
    layers = len(given) if isinstance(given, (list, tuple, range)) else size[0] if given is None else 1
    conditions = with_baseline(job.conditions)
    lengths = [len(p.tokens) or len(p.system + p.question + p.answer) // _LETTERS for p in job.prompts]
    found = stored_bytes(
        with_names(job.analyses), layers, size[1], len(job.prompts), len(conditions), max(lengths, default=0),
        max(map(_inserted, conditions.values())), job.options.positions,
    )  # fmt: skip
    return (found[VALUES] + found[POSITIONS]) // (1 if job.values == "float32" else 2) + found[TOKENS]


def announced(job: Job, path: str | Path) -> str | None:
    """What to say about a job before it begins; None if it is small."""
    size = foretold(job)
    if (size or 0) < LARGE:
        return None
    return f"{path}: about {_words(size or 0)} of per-prompt values, which are stored chunk by chunk and read in blocks"


def _inserted(condition: Any) -> int:
    """The number of tokens that a condition inserts, if it says."""
    while hasattr(condition, "condition"):  # a variant of another condition
        condition = condition.condition
    count, text = getattr(condition, "count", 0), getattr(condition, "text", "")
    return count if isinstance(count, int) and count else len(str(text)) // _LETTERS


def _words(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 / 10 else f"{-(-size // 2**20)} MiB"
