"""Activation patching: which heads, layers and segments carry the effect of a condition.

Each prompt is read twice: once as it is, the *baseline* run, and once under a condition, which
inserts tokens or exchanges some (``Counterpart``). As in the literature on causal abstraction, the
*base* is the run that is patched and the *source* the run from which an activation is taken.
*Clean* and *corrupted* would not do: in denoising the corrupted run is patched, in noising the
clean one.

- *denoising*: the base is the run under the condition, the source the baseline. An effect says
  that this activation of the baseline is enough to bring (part of) its answer back.
- *noising*: the base is the baseline, the source the run under the condition. An effect says
  that the baseline's answer needs this activation.

The two differ where one activation is enough but another could stand in for it, so one direction
says little about the other.

A patch takes one activation, such as a head's output ``z`` at the original tokens, from the source
and puts it into the base's forward pass; everything after it is computed again::

    effect = metric(base with the source's activation) − metric(base)
    whole  = metric(source) − metric(base)

An effect of the same size as the whole says that all of the difference passes through there. The
effects of two activations do not add up, since one may read what the other writes.

The two runs differ in length, so tokens are aligned by their origin: the original tokens that both
have. Each effect comes with two controls, what another prompt's activation and a random step of
equal length do at the same place.

*Attribution* replaces the patch by its first-order estimate, the gradient of the metric times the
difference of activations: one backward pass for all heads. Where attention is saturated the
gradient is nearly 0 and the effect is not, so eight heads are also patched.

``paths.py`` patches what one head passes to another, ``edges.py`` attributes every such edge of a
model, and ``circuit.py`` asks how much of the effect a set of edges carries by itself.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from time import perf_counter
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from mechattn.axes import BASELINE, SEGMENTS
from mechattn.errors import OptionError, warn
from mechattn.functional.activations import keyed_uniform, token_keys
from mechattn.model.hooked import HookedModel, alone
from mechattn.model.hooks import attention_window
from mechattn.model.load import load_model
from mechattn.patching.answer_metrics import Metric, chosen_metric
from mechattn.patching.effects import CONTROLS, Control, Patching, checked_sample
from mechattn.patching.memory import prompt_bytes, rows_within
from mechattn.patching.pairs import Pair, PairRuns, about_of, pairs_of, units_of
from mechattn.patching.patched_copies import PatchedCopy, effects_of, first_order
from mechattn.patching.patched_runs import (
    Part,
    Run,
    Where,
    Z,
    gradients_of,
    logits_of,
    possible_starts,
    read,
)
from mechattn.patching.refusals import Direction, check_gradients
from mechattn.patching.sites import Sites, Target, target_in
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.prompts.token_sequences import TokenSequence
from mechattn.results.result import MEMORY, memory_bytes

_CHECKED = 4  # prompts on which attribution is compared with patching
_LONG = 60  # seconds, from which on the time is foretold
_FEW_ROWS = 200  # of which the time is not worth one run more
_TIMED = 4  # rows of the pass by which the time is foretold
_TOGETHER = 8  # prompts whose patched copies go together, at most


@alone
def patch(
    model: Any,
    prompts: Prompt | str | Sequence[Prompt | str],
    condition: Condition,
    *,
    at: Sites | Part | Sequence[Where | str] = "z",
    together: bool = False,
    metric: Metric | None = None,
    direction: Direction = "noising",
    controls: Sequence[Control] = CONTROLS,
    memory: str = MEMORY,
    seed: int = 0,
) -> Patching:
    """Patch or attribute: how the answer changes when a head's or layer's output is that of the
    prompt's other run.

    In "noising" the model reads the baseline, and the part at every original token is replaced by
    that of the same token in the condition's run. Tokens are aligned by origin because the runs
    differ in length. In "denoising" the condition's run is read with the baseline's.
    ``effect = metric(patched) − metric(unpatched)``; the whole effect is
    ``metric(the other run) − metric(unpatched)``. Everything is patched exactly, with one row of a
    forward pass for each, except ``at="z"``: then all heads are attributed to first order,
    ``Σ ∂metric/∂z · (z_other − z)``, with three forward passes and one backward pass per prompt,
    and eight are also patched. The logits depend only on the residual stream after the last layer,
    so its effect is the whole effect.

    Each cell has two controls, each of which takes as long as the effect itself where cells are
    patched exactly: the part in another prompt's run, and a step of equal norm in a
    random direction (of a pattern: each token's probabilities, permuted among the keys that it
    sees). The other prompt is drawn by ``seed`` among those that are at least as long, with another
    answer where there are such. Tokens with which both prompts begin are aligned with each other,
    the rest from the end, where the answer is. For a prompt that is longer than all others this
    control is NaN.

    Args:
        model: A hooked model, or anything that ``load_model`` accepts.
        prompts: Prompts with an answer that the model reads, as
            ``load_prompts(…, with_answer=True)`` gives them.
        condition: The condition to compare with the baseline.
        at: Heads to patch, as (layer, head) from 0 or "L0H2"; "all", each head exactly; a part of
            all of them: "z", "v", "pattern" or "resid_post"; or :class:`Sites`, which names a part,
            heads or layers, and segments.
        together: Patch all of ``at`` as one set. Heads that compensate for each other, or that are
            only right as a sum, may have no effect alone but one together.
        metric: "logprob" of the reference answer, in nats; "logit_diff", its logit minus that of
            the other answer, the default where every prompt has one; "logit_margin" of its tokens
            over the best others; "kl" from the baseline, in nats; or a function of logits [row
            answer d_vocab] and answer [answer] that returns one number per row [row].
        direction: "noising" or "denoising", which decides the run to patch; one default for
            ``patch``, ``edges`` and ``paths``.
        controls: "other_prompt", "random", both, or () for neither.
        memory: The memory that prompts' runs and their patched copies may take; as many go together
            as fit.
        seed: The seed of random directions and other prompts, of the condition's draws and of the
            heads to check.

    Raises:
        MechattnError: A prompt has no answer, a head or layer doesn't exist, a condition hides
            tokens or acts inside the model, or gradients are needed for quantised weights or for
            "kl" with "noising", where all are 0; raised before the first forward pass.

    Source:
        Attribution patching: Nanda 2023; its errors and AtP*: arXiv:2403.00745. As z comes after
        the softmax, no softmax has to be recomputed.
    """
    budget = memory_bytes(memory)
    prompts = as_prompts(prompts)
    metric = chosen_metric(metric, prompts)
    _check_controls(controls, metric, direction)
    model = load_model(model)
    target = target_in(model, at, together)
    if target.attributed:
        check_gradients(model, metric, direction)
    pairs, sequences = pairs_of(model, prompts, condition, metric, direction, seed)
    token_sets = _token_sets(target, prompts, sequences, pairs)
    cells = [(heads, tokens) for heads in target.units for tokens in token_sets]
    plan = PatchingPlan(model, target, cells, controls, budget, seed)
    shorter = "without at=… all heads are attributed in a few passes"
    if controls:
        shorter = f"controls=() takes 1/{1 + len(controls)} of it, and {shorter}"
    effects = plan.effects(pairs, shorter)
    about = about_of(model, prompts, condition, metric, direction, seed)
    about["method"] = "patched"
    if target.attributed:
        about["method"] = "attributed (first order)"
    about |= {"part": target.part, "heads": list(target.heads)}
    dataset = effects_by_head(effects, prompts, target, token_sets).drop_vars("before")
    patching = Patching(dataset, units_of(prompts), about)
    if not target.attributed:
        return patching
    sample = checked_sample(patching, seed)
    exact_plan = replace(
        plan,
        target=replace(target, attributed=False),
        cells=[cells[index] for index in sample],
        controls=(),
    )
    return patching.compared(exact_plan.effects(pairs[:_CHECKED], shorter)["effect"], sample)


@dataclass(frozen=True)
class PatchingPlan:
    """The measurements to make on each pair. A cell is a unit of the target, and which tokens of it
    are patched: a segment's, the one at a position, or all original ones (None).
    """

    model: HookedModel
    target: Target
    cells: Sequence[tuple[tuple[Where, ...], str | int | None]]
    controls: Sequence[Control]
    memory: int  # bytes
    seed: int

    def effects(self, pairs: Sequence[Pair], shorter: str) -> dict[str, np.ndarray]:
        """The effect of each cell and its controls [prompt cell], NaN where no token has a partner;
        the whole effect, and the metric of the base run [prompt].

        ``shorter`` says what would take less time.
        """
        effects: dict[str, np.ndarray] = {
            name: np.full((len(pairs), len(self.cells)), np.nan)
            for name in ("effect", *self.controls)
        }
        effects["whole"] = np.empty(len(pairs))
        effects["before"] = np.empty(len(pairs))
        partners: list[int | None] = [None] * len(pairs)
        if "other_prompt" in self.controls:
            length_and_answer = {
                pair.id: (len(pair.origins), tuple(pair.answer.tolist())) for pair in pairs
            }
            partners = _partners(length_and_answer, self.seed)

        # Prompts of one length go together, so that few passes have few rows.
        by_length = sorted(range(len(pairs)), key=lambda index: len(pairs[index].base))
        rows = len(pairs)
        starts: list[int] = []
        if not self.target.attributed:
            rows *= (1 + len(self.controls)) * len(self.cells)
            first_layers = [min(layer for layer, _ in heads) for heads, _ in self.cells]
            self._warn_of_time(pairs[0].base, first_layers, rows, shorter)
            starts = possible_starts(self.model, pairs[by_length[0]].base, first_layers)

        bytes_of_prompt = prompt_bytes(self.model, self.target, pairs[by_length[-1]])
        prompts_together = min(_TOGETHER, rows_within(self.memory, bytes_of_prompt))
        memory_of_copies = self.memory - prompts_together * bytes_of_prompt
        progress = tqdm(total=rows, desc="patching", unit="run", delay=2)
        for start in range(0, len(pairs), prompts_together):
            indices = by_length[start : start + prompts_together]
            copies: dict[tuple[str, int], list[PatchedCopy]] = {}
            for index, runs in self._runs(pairs, indices, partners, starts).items():
                effects["whole"][index] = runs.effect(runs.source.logits)
                effects["before"][index] = runs.before
                for name, values in self.replacements(runs).items():
                    copies[name, index] = self.copies(runs, values)

            all_copies = list(chain(*copies.values()))
            if self.target.attributed:
                values_of_copies = np.array([first_order(copy) for copy in all_copies])
                progress.update(len(indices))
            else:
                values_of_copies = effects_of(
                    self.model, all_copies, self.target.part, memory_of_copies, progress
                )
            values_of_copies[[not copy.patched_tokens.any() for copy in all_copies]] = np.nan
            by_cell = values_of_copies.reshape(len(copies), -1)
            for (name, index), values_of_cells in zip(copies, by_cell, strict=True):
                effects[name][index] = values_of_cells
        progress.close()
        return effects

    def _warn_of_time(
        self, sequence: TokenSequence, first_layers: Sequence[int], rows: int, shorter: str
    ) -> None:
        """Say how long exact patching will take, if more than a minute, from the time of one pass;
        and what takes less.
        """
        if rows < _FEW_ROWS:
            return
        start = perf_counter()
        logits_of(self.model, [sequence] * _TIMED)
        seconds = (perf_counter() - start) / _TIMED * rows
        # Passes start at the patched layer, wherever blocks can be given what they returned before.
        share_of_layers = 1 - float(np.mean(first_layers)) / int(self.model.cfg.n_layers)
        seconds *= share_of_layers
        if seconds >= _LONG:
            warn(f"about {seconds / 60:.0f} min for {rows:,} patched runs; {shorter}")

    def _runs(
        self,
        pairs: Sequence[Pair],
        indices: Sequence[int],
        partners: Sequence[int | None],
        starts: Sequence[int],
    ) -> dict[int, PairRuns]:
        """The runs of some pairs and their partners, each once."""
        layers = self.target.layers
        part = self.target.part
        bases = [(pairs[index].base, pairs[index].origins) for index in indices]
        base_runs = read(self.model, bases, layers, part, starts)
        needed: dict[Any, None] = dict.fromkeys([*indices, *(partners[index] for index in indices)])
        needed.pop(None, None)
        sources = [(pairs[index].source, pairs[index].origins) for index in needed]
        source_runs = dict(zip(needed, read(self.model, sources, layers, part), strict=True))
        runs_of_pairs = {}
        for index, base_run in zip(indices, base_runs, strict=True):
            partner_run = source_runs.get(partners[index])
            runs = PairRuns(pairs[index], base_run, source_runs[index], partner_run)
            if self.target.attributed:
                gradients = gradients_of(self.model, runs.pair.base, layers, runs.measure)
                runs = replace(runs, gradients=gradients)
            runs_of_pairs[index] = runs
        return runs_of_pairs

    def copies(self, runs: PairRuns, replacements: Mapping[Where, Z]) -> list[PatchedCopy]:
        """A copy of the base run for each cell."""
        segments = runs.base.sequence.segment[runs.base.places]
        copies = []
        for heads, tokens in self.cells:
            if tokens is None:
                patched_tokens = segments >= 0
            elif isinstance(tokens, str):
                patched_tokens = segments == SEGMENTS.index(tokens)
            else:
                patched_tokens = runs.pair.origins == tokens
            copies.append(PatchedCopy(runs, heads, patched_tokens, replacements))
        return copies

    def replacements(self, runs: PairRuns) -> dict[str, dict[Where, Z]]:
        """What is put in place of each head's output, for the effect and each control."""
        heads = list(dict.fromkeys(where for heads, _ in self.cells for where in heads))
        sources = {"effect": runs.source}
        if runs.partner is not None:
            sources["other_prompt"] = runs.partner
        replacements = {}
        for name, source in sources.items():
            replacements[name] = {
                where: _aligned(runs.base, source, where, self.target.part) for where in heads
            }
        if "random" in self.controls:
            replacements["random"] = {
                where: self._random(runs.pair.id, runs.base, where, value)
                for where, value in replacements["effect"].items()
            }
        return replacements

    def _random(
        self,
        prompt_id: str,
        base_run: Run,
        where: Where,
        value: Float[Tensor, "original d_head"],
    ) -> Tensor:
        layer, head = where
        places = base_run.places.to(value.device)
        own = base_run.z[layer][places, head]
        purpose = f"a random direction of head {head}"
        keys = token_keys(self.seed, [prompt_id], torch.arange(len(own))[None], layer, purpose)
        uniform = keyed_uniform(keys[0], own.shape[-1]).to(own.device)
        if self.target.part == "pattern":
            # A token sees at least as many keys as have probabilities above 0: these are permuted.
            width = own.shape[-1]
            window = attention_window(self.model, layer) or width
            key_positions = torch.arange(width, device=own.device)
            distance = places[:, None] - key_positions
            unseen = (distance < 0) | (distance >= window)
            order = uniform.masked_fill(unseen, 2.0).argsort(-1)
            probabilities = value.sort(-1, descending=True).values
            return torch.zeros_like(value).scatter(-1, order, probabilities)
        direction = torch.special.ndtri(uniform.clamp(min=2**-25)).to(own)
        length = (value - own).norm(dim=-1, keepdim=True)
        return own + length * direction / direction.norm(dim=-1, keepdim=True)


def _token_sets(
    target: Target,
    prompts: Sequence[Prompt],
    sequences: Sequence[Mapping[str, TokenSequence]],
    pairs: Sequence[Pair],
) -> list[Any]:
    """The segments that every prompt has, or the positions at which some prompt's versions may
    differ; None for all original tokens at once."""
    if target.by is None:
        return [None]
    baselines = [by_condition[BASELINE] for by_condition in sequences]
    if target.by == "segment":
        return [
            segment
            for segment in SEGMENTS
            if all(baseline.of_segment(segment).any() for baseline in baselines)
        ]
    lengths = [len(baseline) for baseline in baselines]
    if len(set(lengths)) > 1:
        longest = prompts[lengths.index(max(lengths))]
        raise OptionError(
            f"prompts have {min(lengths)} to {max(lengths)} tokens (prompt {longest.id} the most), "
            "so a position means another token in each: give prompts of equal length, or "
            'by="segment"'
        )
    # Up to the first token that differs, both runs compute the same, so that an effect there is 0
    # by construction: nothing to measure or to test.
    return list(range(min(map(_first_difference, pairs)), lengths[0]))


def _first_difference(pair: Pair) -> int:
    """The first position at which the runs' tokens differ, or one has a token that the other
    lacks."""
    tokens = zip(pair.base.tokens.tolist(), pair.source.tokens.tolist(), strict=False)
    return [*(own != other for own, other in tokens), True].index(True)


def _check_controls(controls: Any, metric: Metric, direction: Direction) -> None:
    """Refuse controls that don't exist, or none where nothing else can be tested."""
    if not {*controls} <= {*CONTROLS}:
        raise OptionError(
            f'controls={controls!r}: give ("other_prompt", "random"), one of them in brackets, or '
            "() for none"
        )
    if metric == "kl" and direction == "noising" and "random" not in controls:
        raise OptionError(
            'metric="kl" cannot fall with direction="noising", so effects are tested against the '
            'random control: give controls=("random",)'
        )


def _partners(
    length_and_answer: Mapping[str, tuple[int, Sequence[int]]], seed: int
) -> list[int | None]:
    """The index of another prompt for each, drawn among those at least as long; None without any.

    Those with the same answer are left out where there are others: what they bring may be the
    answer itself.
    """
    ids = list(length_and_answer)
    drawn: list[int | None] = []
    for own_id, (length, answer) in length_and_answer.items():
        candidates = [
            name for name in sorted(ids) if name != own_id and length_and_answer[name][0] >= length
        ]
        if not candidates:
            drawn.append(None)
            continue
        with_another_answer = [name for name in candidates if length_and_answer[name][1] != answer]
        generator = random.Random(f"other prompt {seed} {own_id}")
        drawn.append(ids.index(generator.choice(with_another_answer or candidates)))
    return drawn


def _aligned(
    run: Run, source: Run, where: Where, part: Part = "z"
) -> Float[Tensor, "original d_head"]:
    """A head's output in another run at the base run's original tokens; from the end, after a
    shared beginning.
    """
    layer, head = where
    device = run.z[layer].device
    own_places = run.places.to(device)
    own_tokens = run.sequence.tokens[run.places]
    source_tokens = source.sequence.tokens[source.places]

    # All of them, if it is the same prompt.
    agrees = own_tokens == source_tokens[: len(own_tokens)]
    in_shared_beginning = agrees.long().cumprod(0).bool()
    index = torch.arange(len(own_tokens))
    from_the_end = index + len(source_tokens) - len(own_tokens)
    chosen = source.places[torch.where(in_shared_beginning, index, from_the_end)].to(device)
    value = source.z[layer][chosen, head]
    if part != "pattern":
        return value
    pattern = torch.zeros_like(run.z[layer][own_places, head])
    pattern[:, own_places] = value[:, chosen]
    return pattern


def effects_by_head(
    effects: Mapping[str, np.ndarray],
    prompts: Sequence[Prompt],
    target: Target,
    token_sets: Sequence[Any],
) -> xr.Dataset:
    """A plan's effects by layer and head, layer, or set, and segment or position; NaN for heads
    that were not requested.
    """
    layers = target.layers
    axes: dict[str, Sequence[Any]] = {"layer": layers}
    indices = [[layers.index(layer) for layer, _ in target.heads]]
    if target.together:
        axes = {"set": [_set_name(target)]}
        indices = [[0]]
    elif not target.of_layers:
        heads = sorted({head for _, head in target.heads})
        axes["head"] = heads
        indices.append([heads.index(head) for _, head in target.heads])
    if target.by is not None:
        axes[target.by] = token_sets

    coords = {"prompt": [prompt.id for prompt in prompts], **axes}
    variables = {}
    for name, values in effects.items():
        grid = values
        if values.ndim > 1:
            grid = np.full([len(labels) for labels in coords.values()], np.nan)
            cells: Any = (slice(None), *indices)
            grid[cells] = values.reshape(grid[cells].shape)
        variables[name] = (tuple(coords)[: grid.ndim], grid)
    return xr.Dataset(variables, coords)


def _set_name(target: Target) -> str:
    if len(target.heads) > 8:
        return f"{len(target.heads)} {'layers' if target.of_layers else 'heads'}"
    name = "L{}" if target.of_layers else "L{}H{}"
    return " + ".join(name.format(*where) for where in target.heads)
