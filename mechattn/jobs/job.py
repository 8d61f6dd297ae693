"""A run that can be computed in chunks on any machine, and the worker that computes the chunks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from mechattn.analysis.analysis import Analysis
from mechattn.engine.request_checks import with_baseline
from mechattn.engine.run import Plan, Run, RunOptions, make_plan
from mechattn.errors import ModelError, check_choice, check_counts
from mechattn.model.checkpoint import tokenizer_named
from mechattn.model.load import dtype_named, load_model
from mechattn.model.unloaded import unloaded_tokenizer
from mechattn.model.weights import stored_hash
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.prompts.tokenization import tokenize
from mechattn.results import provenance
from mechattn.results.provenance import identity
from mechattn.results.result import CHUNK, Result, in_half_the_space, with_provenance

# Tokens of the first prompt that an error shows if a job differs from an earlier one: most chat
# templates write the date near the beginning.
_SHOWN_TOKENS = 64
Values = Literal["float32", "float16"]


@dataclass(frozen=True)
class Job:
    """The arguments of ``run`` in a form that can be sent to other processes and split into chunks
    of prompts.

    Chunk boundaries depend only on ``chunk``, and no batch spans two chunks. The numbers therefore
    do not depend on the number of workers or shards, or on interruptions.

    Args:
        model: A name or directory that every worker can load.
        prompts: All prompts of the run, for all shards.
        conditions: As for ``run``.
        analyses: As for ``run``.
        options: The options of ``run``: layers, seed, keep, memory and engine.
        dtype: "auto", "float32", "bfloat16" or "float16".
        device: As for ``load_model``; it affects only the last digits of the numbers.
        verify: As for ``load_model``.
        chunk: The number of prompts per chunk.
        threads: The number of torch threads in each worker, which affects the last digits; None
            keeps torch's setting, or means 1 on a Ray cluster.
        require: A function that gets the loaded model and the layers, and raises an error if the
            job cannot use them.
        command: The command to record with the result.
        paths: Record the full path of a checkpoint's directory in the provenance, not only its
            name.
        values: How per-prompt numbers are stored: "float32", or "float16", which takes half the
            space and rounds by up to 0.05 % (numbers below 6e-5 by up to 3e-8).

    Raises:
        MechattnError: The model is not given by its name, or another argument cannot be used.
    """

    model: str
    prompts: Sequence[Prompt]
    conditions: Mapping[str, Condition] | None = None
    analyses: Sequence[Analysis] | Analysis | None = None
    options: RunOptions = RunOptions()
    dtype: str = "auto"
    device: str | None = None
    verify: bool = True
    chunk: int = CHUNK
    threads: int | None = None
    require: Callable[[Any, list[int]], None] | None = None
    command: str = ""
    paths: bool = False
    values: Values = "float32"

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        if not isinstance(self.model, str):
            raise ModelError(
                "a job names its model, so that every worker can load it, but a"
                f" {type(self.model).__name__} was given; save the model (save_pretrained, with its"
                " tokenizer) and give the directory, or use ma.run"
            )
        check_counts(chunk=self.chunk)
        if self.threads is not None:
            check_counts(threads=self.threads)
        check_choice(Values, values=self.values)
        with_baseline(self.conditions)  # refuses what is not a mapping of conditions
        object.__setattr__(self, "prompts", tuple(as_prompts(self.prompts)))

    @cached_property
    def chunks(self) -> list[range]:
        """The indices of the prompts in each chunk."""
        indices = range(len(self.prompts))
        starts = indices[:: self.chunk]
        return [indices[start : start + self.chunk] for start in starts]

    @cached_property
    def decides(self) -> dict[str, Any]:
        """Everything that determines the numbers, as JSON data that a later run can be compared
        with."""
        conditions = self.conditions or {}
        entries = {}
        for name in ("model", "dtype", "verify", "chunk", "threads", "values"):
            entries[name] = repr(getattr(self, name))
        for name, value in vars(self.options).items():
            entries[name] = repr(value)
        return {
            **entries,
            "prompts": {"count": len(self.prompts), "hash": provenance.digest(self.prompts)},
            "token_ids": self._token_ids(),
            # Groups do not change the numbers, but are stored with them.
            "groups": provenance.digest(prompt.group for prompt in self.prompts),
            "weights": stored_hash(self.model),
            "conditions": {name: identity(value) for name, value in conditions.items()},
            "analyses": identity(self.analyses),
            "versions": provenance.versions(),
        }

    def _token_ids(self) -> dict[str, str] | None:
        """A hash of the tokens of all prompts, and the beginning of the first as text.

        Equal texts can have other tokens on another day, because a chat template may write the
        date. None if every prompt gives its tokens, which cannot change.
        """
        if all(prompt.tokens for prompt in self.prompts):
            return None
        model: Any = unloaded_tokenizer(tokenizer_named(self.model), self.model)
        token_ids = [tokenize(prompt, model).tokens.tolist() for prompt in self.prompts]
        beginning = model.tokenizer.decode(token_ids[0][:_SHOWN_TOKENS])
        return {"hash": provenance.digest(token_ids), "first": beginning}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that determines the numbers. A stored result with the same hash is
        that of this job."""
        return provenance.digest([json.dumps(self.decides)])


@dataclass
class Worker:
    """Loads a job's model once, and computes any of its chunks.

    The model is loaded at the first chunk, because Ray loses the errors of constructors.
    """

    job: Job

    @cached_property
    def plan(self) -> Plan:
        """The plan of the run, with the loaded model."""
        job = self.job
        if job.threads is not None:
            torch.set_num_threads(job.threads)
        dtype = dtype_named(job.dtype)
        model = load_model(job.model, dtype=dtype, device=job.device, verify=job.verify)
        plan = make_plan(model, job.conditions, job.analyses, job.options, paths=job.paths)
        if job.require is not None:
            job.require(model, plan.layers)
        return plan

    @cached_property
    def run(self) -> Run:
        """The run, calibrated on all prompts of the job, so that all workers measure the same."""
        return self.plan.calibrated(self.job.prompts)

    def check(self, chunk_index: int) -> None:
        """Check that the model can read the prompts of a chunk, without computing it.

        Raises:
            MechattnError: A prompt cannot be used.
        """
        self.plan.sequences(self._prompts(chunk_index))

    def part(self, chunk_index: int) -> tuple[int, Result]:
        """Compute a chunk, and return its index and its result."""
        prompts = self._prompts(chunk_index)
        sequences = self.plan.sequences(prompts)
        result = self.run.result(prompts, sequences, self.job.chunks[chunk_index])
        result = with_provenance(result, chunk=self.job.chunk, command=self.job.command)
        if self.job.values == "float16":
            result = in_half_the_space(result)
        return chunk_index, result

    def _prompts(self, chunk_index: int) -> list[Prompt]:
        return [self.job.prompts[index] for index in self.job.chunks[chunk_index]]
