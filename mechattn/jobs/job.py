"""A run that can be computed in chunks, anywhere: everything that decides its numbers, and the worker that computes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from typing import Any, Literal

import torch

from mechattn.analysis.analysis import Analysis
from mechattn.engine.collect import Positions
from mechattn.engine.forward import Engine
from mechattn.engine.run import Run, Sequences, make_plan
from mechattn.errors import ModelError, OptionError
from mechattn.jobs.into import Into
from mechattn.model.fingerprint import stored_hash
from mechattn.model.load import dtype_named, load_model
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.results import provenance
from mechattn.results.identity import identity
from mechattn.results.packed import packed

CHUNK = 64  # prompts
_AHEAD = 16  # chunks whose sequences are kept from the check until they are measured; of later ones they are made again


@dataclass(frozen=True)
class Job:
    """The arguments of ``run`` in a form that is sent to other processes, and cut into chunks of prompts.

    Where the chunks begin depends on ``chunk`` alone, and batches never reach over two of them: so the numbers depend
    neither on how many workers or shards there are, nor on what was interrupted.

    Args:
        model: A name or directory that every worker can load.
        prompts: All prompts of the run, of all shards.
        conditions: As for ``run``.
        analyses: As for ``run``.
        layers: As for ``run``.
        seed: As for ``run``.
        positions: As for ``run``.
        memory: As for ``run``.
        engine: As for ``run``.
        dtype: "auto", "float32", "bfloat16" or "float16".
        device: As for ``load_model``; where it is computed decides none but the last bits.
        verify: As for ``load_model``.
        chunk: Prompts a chunk.
        threads: Of torch, in each worker: they change the last bits of the numbers. None leaves them as they are.
        require: Is given the model and the layers when it is loaded, and refuses what it cannot be used for.
        command: Recorded with the result.
        paths: As for ``run``.
        large: For a result larger than memory: each chunk is written straight into its region of one sharded Zarr
            store, and ``load_result`` reads that a block at a time. Every worker must see the folder, or the address.
            None does so where the values of single prompts are about 1 GiB or more, and goes on as it was begun.
        values: Of a large result, how each prompt's numbers are kept: "float32", or "float16" in half the room, with
            an error of up to 0.05 % of a number, which makes the result a large one.
        into: Where workers write; set by ``run_job``.
    """

    model: str
    prompts: Seq[Prompt]
    conditions: Mapping[str, Condition] | None = None
    analyses: Seq[Analysis] | Analysis | None = None
    layers: Seq[int] | int | None = None
    seed: int = 0
    positions: Positions = "moments"
    memory: str = "2GiB"
    engine: Engine = "auto"
    dtype: str = "auto"
    device: str | None = field(default=None, compare=False)
    verify: bool = True
    chunk: int = CHUNK
    threads: int | None = None
    require: Callable[[Any, list[int]], None] | None = field(default=None, repr=False, compare=False)
    command: str = field(default="", compare=False)
    paths: bool = field(default=False, compare=False)
    large: bool | None = None
    values: Literal["float32", "float16"] = "float32"
    into: Into | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.model, PathLike):
            object.__setattr__(self, "model", str(self.model))
        if not isinstance(self.model, str):
            raise ModelError(
                f"a job names its model, so that every worker can load it, but a {type(self.model).__name__} was "
                "given; save the model (save_pretrained, with its tokenizer) and give the directory, or use ma.run"
            )
        for name, value in (("chunk", self.chunk), ("threads", 1 if self.threads is None else self.threads)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name}={value!r}: give a whole number, 1 at least")
        if self.values not in ("float32", "float16"):
            raise OptionError(f'values={self.values!r}: choose "float32" or "float16"')
        if self.large is not None and not isinstance(self.large, bool):
            raise OptionError(f"large={self.large!r}: say True, False, or None, by which the size decides")
        if self.values == "float16" and self.large is False:
            raise OptionError('values="float16" is for large results: leave large=False out')
        if self.values == "float16":
            object.__setattr__(self, "large", True)
        object.__setattr__(self, "prompts", tuple(as_prompts(self.prompts)))

    @property
    def chunks(self) -> list[range]:
        """The places of the prompts of each chunk."""
        starts = range(0, len(self.prompts), self.chunk)
        return [range(start, min(start + self.chunk, len(self.prompts))) for start in starts]

    def decides(self) -> dict[str, Any]:
        """What decides the numbers, as texts that can be compared with those of another day."""
        options = ("model", "layers", "seed", "positions", "memory", "engine", "dtype", "verify", "chunk", "threads")
        return {
            **{name: repr(getattr(self, name)) for name in options},
            "prompts": f"{len(self.prompts)} with the hash {provenance.digest(self.prompts)}",
            **self._groups(),
            **({"large": self.values} if self.large else {}),
            "weights": stored_hash(self.model),
            "conditions": {name: identity(condition) for name, condition in (self.conditions or {}).items()},
            "analyses": identity(self.analyses),
            "versions": provenance.versions(),
        }

    def _groups(self) -> dict[str, str]:
        """They are stored with the numbers, and change none."""
        groups = [prompt.group for prompt in self.prompts]
        return {"groups": provenance.digest(groups)} if any(groups) else {}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what decides the numbers: by it a stored result is known to be of this job."""
        return provenance.digest([json.dumps(self.decides())])


class Worker:
    """Loads a job's model once, and computes any of its chunks."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model = load_model(job.model, dtype=dtype_named(job.dtype), device=job.device, verify=job.verify)
        self.plan = make_plan(
            self.model,
            job.conditions,
            job.analyses,
            layers=job.layers,
            seed=job.seed,
            positions=job.positions,
            memory=job.memory,
            engine=job.engine,
            paths=job.paths,
        )
        if job.require is not None:
            job.require(self.model, self.plan.layers)
        self._checked: dict[int, Sequences] = {}

    @cached_property
    def run(self) -> Run:
        """Calibrated for all prompts of the job, so that every worker finds the same."""
        return self.plan.calibrated(self.job.prompts)

    def check(self, chunk: int) -> None:
        """Refuse a chunk whose prompts cannot be used, without running the model on them."""
        sequences = self.plan.sequences(self._prompts(chunk))
        if len(self._checked) < _AHEAD:
            self._checked[chunk] = sequences

    def part(self, chunk: int) -> bytes:
        """The result of a chunk, as ``results.packed`` packs it."""
        prompts = self._prompts(chunk)
        sequences = self._checked.pop(chunk, None) or self.plan.sequences(prompts)
        alone = len(self.job.chunks) == 1
        made = self.run.result(prompts, sequences, self.job.chunks[chunk], progress=alone)
        about = {"chunk": self.job.chunk, "command": self.job.command}
        made = replace(made, provenance={**made.provenance, **about})
        return packed(made if self.job.into is None else self.job.into.write(chunk, made))

    def _prompts(self, chunk: int) -> list[Prompt]:
        return [self.job.prompts[place] for place in self.job.chunks[chunk]]


def with_threads(threads: int | None) -> AbstractContextManager[None]:
    """As many threads of torch for the length of a ``with``; as they are for None."""
    return nullcontext() if threads is None else _threads(threads)


@contextmanager
def _threads(threads: int) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
