"""A run that can be computed in chunks on any machine: what decides its numbers, its worker, and its size foretold."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch

from mechattn.analysis.analysis import Analysis
from mechattn.axes import SEGMENTS
from mechattn.engine.attention_rows import BLIND, with_nulls
from mechattn.engine.request_checks import with_baseline, with_names
from mechattn.engine.run import Run, RunOptions, Sequences, make_plan
from mechattn.errors import ModelError, OptionError, check_counts
from mechattn.model.checkpoint import layers_and_heads
from mechattn.model.load import dtype_named, load_model
from mechattn.model.weights import stored_hash
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.results import provenance
from mechattn.results.provenance import identity
from mechattn.store.result_bytes import packed

CHUNK = 64  # prompts
_THREADS = 1024  # with many more, such as 100,000, the process ends with a segmentation fault
_AHEAD = (
    16  # chunks whose checked sequences are kept until they are measured; later ones are rebuilt
)
LARGE = 2**30  # bytes of per-prompt values, from which on the size is said
VALUES, POSITIONS, MOMENTS, TOKENS = (
    "each prompt's values", "each prompt's positions", "moments by position", "the tokens that were read",
)  # fmt: skip
_LETTERS = 4  # of an English token


@dataclass(frozen=True)
class Job:
    """The arguments of ``run`` in a form that can be sent to other processes and split into chunks of prompts.

    Chunk boundaries depend only on ``chunk``, and no batch spans two chunks, so the numbers do not depend on the number
    of workers or shards, or on interruptions.

    Args:
        model: A name or directory that every worker can load.
        prompts: All prompts of the run, for all shards.
        conditions: As for ``run``.
        analyses: As for ``run``.
        options: The options of ``run``: layers, seed, positions, memory and engine.
        dtype: "auto", "float32", "bfloat16" or "float16".
        device: As for ``load_model``; it affects only the last bits of the numbers.
        verify: As for ``load_model``.
        chunk: The number of prompts per chunk.
        threads: The number of torch threads in each worker, which affects last bits; None leaves torch's setting.
        require: A function that gets the loaded model and the layers, and raises an error if the job cannot use them.
        command: The command to record with the result.
        paths: Record the full path of a checkpoint's directory in the provenance, not only its name.
        values: How per-prompt numbers are stored: "float32", or "float16" in half the space and off by up to 0.05 %.
    """

    model: str
    prompts: Seq[Prompt]
    conditions: Mapping[str, Condition] | None = None
    analyses: Seq[Analysis] | Analysis | None = None
    options: RunOptions = RunOptions()  # noqa: RUF009, a frozen value
    dtype: str = "auto"
    device: str | None = field(default=None, compare=False)
    verify: bool = True
    chunk: int = CHUNK
    threads: int | None = None
    require: Callable[[Any, list[int]], None] | None = field(
        default=None, repr=False, compare=False
    )
    command: str = field(default="", compare=False)
    paths: bool = field(default=False, compare=False)
    values: Literal["float32", "float16"] = "float32"

    def __post_init__(self) -> None:
        if isinstance(self.model, PathLike):
            object.__setattr__(self, "model", str(self.model))
        if not isinstance(self.model, str):
            raise ModelError(
                f"a job names its model, so that every worker can load it, but a {type(self.model).__name__} was "
                "given; save the model (save_pretrained, with its tokenizer) and give the directory, or use ma.run"
            )
        check_counts(chunk=self.chunk, threads=1 if self.threads is None else self.threads)
        if self.threads is not None and self.threads > _THREADS:
            raise OptionError(
                f"threads={self.threads}: give at most {_THREADS:,}; more than there are cores is slower"
            )
        if self.values not in ("float32", "float16"):
            raise OptionError(f'values={self.values!r}: choose "float32" or "float16"')
        object.__setattr__(self, "prompts", tuple(as_prompts(self.prompts)))

    @property
    def chunks(self) -> list[range]:
        """The indices of the prompts in each chunk."""
        starts = range(0, len(self.prompts), self.chunk)
        return [range(start, min(start + self.chunk, len(self.prompts))) for start in starts]

    def decides(self) -> dict[str, Any]:
        """Everything that determines the numbers, as text that can be compared with that of a later run."""
        own = ("model", "dtype", "verify", "chunk", "threads")
        groups = [
            prompt.group for prompt in self.prompts
        ]  # stored with the numbers, which they do not change
        return {
            **{name: repr(getattr(self, name)) for name in own},
            **{name: repr(value) for name, value in vars(self.options).items()},
            "prompts": f"{len(self.prompts)} with the hash {provenance.digest(self.prompts)}",
            **({"groups": provenance.digest(groups)} if any(groups) else {}),
            **({} if self.values == "float32" else {"values": self.values}),
            "weights": stored_hash(self.model),
            "conditions": {
                name: identity(condition) for name, condition in (self.conditions or {}).items()
            },
            "analyses": identity(self.analyses),
            "versions": provenance.versions(),
        }

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that determines the numbers; it shows whether a stored result belongs to this job."""
        return provenance.digest([json.dumps(self.decides())])


class Worker:
    """Loads a job's model once and computes any of its chunks."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model = load_model(
            job.model, dtype=dtype_named(job.dtype), device=job.device, verify=job.verify
        )
        self.plan = make_plan(
            self.model, job.conditions, job.analyses, job.options, paths=job.paths
        )
        if job.require is not None:
            job.require(self.model, self.plan.layers)
        self._checked: dict[int, Sequences] = {}

    @cached_property
    def run(self) -> Run:
        """The run, calibrated on all prompts of the job so that every worker gets the same."""
        return self.plan.calibrated(self.job.prompts)

    def check(self, chunk: int) -> None:
        """Refuse a chunk with unusable prompts, without running the model on them."""
        sequences = self.plan.sequences(self._prompts(chunk))
        if len(self._checked) < _AHEAD:
            self._checked[chunk] = sequences

    def part(self, chunk: int) -> bytes:
        """Return the result of a chunk, packed by ``store.result_bytes``."""
        prompts = self._prompts(chunk)
        sequences = self._checked.pop(chunk, None) or self.plan.sequences(prompts)
        made = self.run.result(prompts, sequences, self.job.chunks[chunk])
        about = {"chunk": self.job.chunk, "command": self.job.command}
        made = replace(made, provenance={**made.provenance, **about})
        return packed(made)

    def _prompts(self, chunk: int) -> list[Prompt]:
        return [self.job.prompts[place] for place in self.job.chunks[chunk]]


@contextmanager
def with_threads(threads: int | None) -> Iterator[None]:
    """Set the number of torch threads within a ``with`` block; None leaves it unchanged."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def stored_bytes(
    analyses: Seq[Any], layers: int, heads: int, prompts: int, conditions: int, length: int, inserted: int,
    positions: str,
) -> dict[str, int]:  # fmt: skip
    """The bytes of the arrays in memory, by kind."""
    sizes = {
        "head": heads,
        "segment": len(SEGMENTS),
        "to_segment": len(SEGMENTS),
        "other_condition": conditions,
    }
    longest = length + inserted
    found = dict.fromkeys((VALUES, MOMENTS, POSITIONS), 0)
    for analysis in analyses:
        sizes |= {name: len(labels) for name, labels in getattr(analysis, "coords", {}).items()}
        for name, quantity in with_nulls(analysis).items():
            if name.endswith(BLIND):  # only in models with ALiBi or learned sinks
                continue
            cells = (
                conditions
                * layers
                * prod(sizes.get(dim, longest) for dim in quantity.dims if dim != "key")
            )
            if "key" not in quantity.dims:
                wide = (
                    8 if "other_condition" in quantity.dims else 4
                )  # products of changes are summed in float64
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
    layers = (
        len(given) if isinstance(given, (list, tuple, range)) else size[0] if given is None else 1
    )
    conditions, inserted = with_baseline(job.conditions), 0
    for condition in conditions.values():
        while hasattr(condition, "condition"):  # a variant of another condition
            condition = condition.condition
        count, text = (
            getattr(condition, "count", 0),
            getattr(condition, "text", ""),
        )  # of those that say
        inserted = max(
            inserted, count if isinstance(count, int) and count else len(str(text)) // _LETTERS
        )
    lengths = [
        len(p.tokens) or len(p.system + p.question + p.answer) // _LETTERS for p in job.prompts
    ]
    found = stored_bytes(
        with_names(job.analyses), layers, size[1], len(job.prompts), len(conditions), max(lengths, default=0),
        inserted, job.options.positions,
    )  # fmt: skip
    return (found[VALUES] + found[POSITIONS]) // (1 if job.values == "float32" else 2) + found[
        TOKENS
    ]


def announced(job: Job, path: str | Path) -> str | None:
    """What to say about a job before it begins; None if it is small."""
    size = foretold(job) or 0
    words = f"{size / 2**30:,.1f} GiB" if size >= 2**30 / 10 else f"{-(-size // 2**20)} MiB"
    about = f"{path}: about {words} of per-prompt values, which are stored chunk by chunk and read in blocks"
    return about if size >= LARGE else None
