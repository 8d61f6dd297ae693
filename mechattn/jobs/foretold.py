"""How large a result will be, from the shapes that are stored, and the form that it is stored in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mechattn.axes import SEGMENTS
from mechattn.engine.check import with_baseline, with_names
from mechattn.engine.null import BLIND, with_nulls
from mechattn.errors import ModelError
from mechattn.model.load import layers_and_heads
from mechattn.results.addresses import as_place
from mechattn.results.large_store import attributes_of

if TYPE_CHECKING:
    from mechattn.jobs.job import Job

LARGE = 2**30  # bytes of single prompts' values, from which on a result goes into a store that is written as it runs
VALUES, POSITIONS, MOMENTS, TOKENS = (
    "each prompt's values", "each prompt's positions", "moments by position", "the tokens that were read",
)  # fmt: skip
_LETTERS = 4  # of a token of English


def stored_bytes(
    analyses: Seq[Any], layers: int, heads: int, prompts: int, conditions: int, length: int, inserted: int,
    positions: str,
) -> dict[str, int]:  # fmt: skip
    """Bytes of the arrays in memory, by what they are.

    Args:
        analyses: Whose quantities are counted.
        layers: That are measured.
        heads: Of the model.
        prompts: All of the same length.
        conditions: With the baseline.
        length: Tokens of a prompt without insertion.
        inserted: Tokens that the longest condition inserts.
        positions: As for ``run``.
    """
    sizes = {"head": heads, "segment": len(SEGMENTS), "to_segment": len(SEGMENTS), "other_condition": conditions}
    longest = length + inserted
    found = dict.fromkeys((VALUES, MOMENTS, POSITIONS), 0)
    for analysis in analyses:
        sizes |= {name: len(labels) for name, labels in getattr(analysis, "coords", {}).items()}
        for name, quantity in with_nulls(analysis).items():
            if name.endswith(BLIND):  # in models with ALiBi or learned sinks alone
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
    """About how many bytes a job stores of single prompts, of all its shards; None where the model's config is silent.

    A token counts as four letters, and what a condition inserts as its ``count``.
    """
    try:
        size = layers_and_heads(job.model)
    except ModelError:  # not here, or none that a worker could load either, which says so
        return None
    if size is None:
        return None
    layers = len(job.layers) if isinstance(job.layers, (list, tuple, range)) else size[0] if job.layers is None else 1
    conditions = with_baseline(job.conditions)
    lengths = [len(p.tokens) or len(p.system + p.question + p.answer) // _LETTERS for p in job.prompts]
    found = stored_bytes(
        with_names(job.analyses), layers, size[1], len(job.prompts), len(conditions), max(lengths, default=0),
        max(map(_inserted, conditions.values())), job.positions,
    )  # fmt: skip
    return (found[VALUES] + found[POSITIONS]) // (1 if job.values == "float32" else 2) + found[TOKENS]


def settled(job: Job, path: str | Path, kept: Mapping[str, Any] | None, fresh: bool, seen: bool = True) -> Job:
    """The job in the form that is asked for; else in that in which it was begun, or stored; else as its size asks for.

    Args:
        job: A job.
        path: Where its result goes; what is no Zarr folder is never a store.
        kept: What the folder of its finished chunks says of their job.
        fresh: Neither what is kept nor what is stored counts.
        seen: All workers are known to see that place; a cluster's may each have folders of their own.
    """
    if job.large is not None:
        return job
    if str(path).endswith(".nc"):
        return replace(job, large=False)
    forms = [replace(job, large=large) for large in (False, True)]
    if kept is not None and not fresh:
        return forms["large" in kept]
    if not fresh and (stored := _stored_job(path)) is not None:
        for form in forms:
            if form.fingerprint == stored:
                return form
    return forms[seen and (foretold(job) or 0) >= LARGE]


def announced(job: Job, path: str | Path) -> str | None:
    """What is said of a job before it begins; nothing where it is small, and is kept as everything small is."""
    size = foretold(job)
    if not job.large and (size or 0) < LARGE:
        return None
    about = "" if size is None else f"about {_words(size)} of per-prompt values: "
    if job.large:
        return f"{path}: {about}each chunk is written straight into one Zarr store, which is read block by block"
    return (
        f"{path}: {about}all of it is held in memory when the chunks are merged, and when it is loaded; large=True "
        "(in a config large = true) avoids that, and needs a .zarr that every worker sees"
    )


def _inserted(condition: Any) -> int:
    """Tokens that a condition inserts, as far as it says."""
    while hasattr(condition, "condition"):  # a variant of another one
        condition = condition.condition
    count, text = getattr(condition, "count", 0), getattr(condition, "text", "")
    return count if isinstance(count, int) and count else len(str(text)) // _LETTERS


def _stored_job(path: str | Path) -> Any:
    """The fingerprint of the job whose result is stored at a place."""
    try:
        return json.loads(attributes_of(as_place(path))["provenance"]).get("job")
    except Exception:  # nothing is there, or nothing of ours; what it is, is said when it is read
        return None


def _words(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 / 10 else f"{-(-size // 2**20)} MiB"
