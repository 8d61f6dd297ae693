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
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
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
from mechattn.patching.memory import pass_bytes, rows_within
from mechattn.patching.pairs import Pair, about_of, pairs_of, units_of
from mechattn.patching.patched_runs import (
    Part,
    Run,
    Where,
    Z,
    patched_logits,
    read,
    read_with_gradients,
    restartable,
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
_ROWS = 32  # patched copies of a prompt in a batch, at most: more are no faster


@alone
def patch(
    model: Any,
    prompts: Prompt | str | Sequence[Prompt | str],
    condition: Condition,
    *,
    at: Sites | Part | Sequence[Where | str] = "z",
    together: bool = False,
    metric: Metric | None = None,
    direction: Direction = "denoising",
    controls: Sequence[Control] = CONTROLS,
    memory: str = MEMORY,
    seed: int = 0,
) -> Patching:
    """Patch or attribute: how the answer changes when a head's or layer's output is that of the
    prompt's other run.

    In "denoising" the model reads each prompt under the condition, and the part at every original
    token is replaced by that of the same token in the baseline run. Tokens are aligned by origin
    because the runs differ in length. In "noising" the baseline is read with the condition's.
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
        direction: "denoising" or "noising", which decides the run to patch.
        controls: "other_prompt", "random", both, or () for neither.
        memory: The memory that the patched copies of a prompt may take; as many go together as fit.
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
    slots = _slots(target, prompts, sequences)
    slots = _changed(target, slots, pairs)
    patched_prompts = [PatchedPrompt(model, target, slots, pair, budget, seed) for pair in pairs]
    rows = len(target.units) * len(slots) * (1 + len(controls))
    if target.attributed:
        rows = 1
    else:
        shorter = "without at=… all heads are attributed in a few passes"
        if controls:
            shorter = f"controls=() takes 1/{1 + len(controls)} of it, and {shorter}"
        warn_of_time(patched_prompts[0], rows * len(prompts), shorter)

    partners: list[int | None] = [None] * len(pairs)
    if "other_prompt" in controls:
        length_and_answer = {}
        for pair in pairs:
            length_and_answer[pair.id] = (len(pair.origins), tuple(pair.answer.tolist()))
        partners = _partners(length_and_answer, seed)

    effects = []
    progress = tqdm(total=rows * len(prompts), desc="patching", unit="run", delay=2)
    for prompt, partner in zip(patched_prompts, partners, strict=True):
        partner_run = None
        if partner is not None:
            partner_run = patched_prompts[partner].read(pairs[partner].source)
        effects.append(prompt.effects(partner_run, controls, progress))
    progress.close()

    about = about_of(model, prompts, condition, metric, direction, seed)
    about["method"] = "patched"
    if target.attributed:
        about["method"] = "attributed (first order)"
    about["part"] = target.part
    about["heads"] = list(target.heads)
    dataset = _dataset(effects, [prompt.id for prompt in prompts], target, slots, controls)
    patching = Patching(dataset, units_of(prompts), about)
    if not target.attributed:
        return patching
    sample = checked_sample(patching, seed)
    exact = [prompt.exact(sample) for prompt in patched_prompts[:_CHECKED]]
    return patching.compared(exact, sample)


@dataclass(frozen=True)
class PatchedPrompt:
    """The measurements to make on a prompt; a cell is a unit of the target, at a segment, a
    position, or all.
    """

    model: HookedModel
    target: Target
    slots: Sequence[str | int | None]
    pair: Pair
    memory: int  # bytes
    seed: int

    def read(self, sequence: TokenSequence) -> Run:
        return read(self.model, sequence, self.target.layers, self.target.part, self.pair.origins)

    def cells(self, run: Run) -> list[tuple[tuple[Where, ...], Bool[Tensor, " shared"]]]:
        """The heads of each cell, and which of the original tokens are patched."""
        segments = run.sequence.segment[run.places]
        masks = []
        for slot in self.slots:
            if slot is None:
                masks.append(segments >= 0)
            elif isinstance(slot, str):
                masks.append(segments == SEGMENTS.index(slot))
            else:
                masks.append(self.pair.origins == slot)
        return [(heads, mask) for heads in self.target.units for mask in masks]

    def effects(
        self, other_prompt: Run | None, controls: Sequence[Control], progress: tqdm
    ) -> dict[str, np.ndarray]:
        """The effect of each cell and its controls, and the whole effect; NaN where no token has a
        partner.
        """
        pair = self.pair
        target = self.target
        source = self.read(pair.source)
        gradients: dict[int, Z] = {}
        if target.attributed:

            def measure(base_run: Run) -> Float[Tensor, " row"]:
                baseline = source if pair.denoising else base_run
                return pair.measure(base_run.logits, baseline.logits)

            base_run, gradients = read_with_gradients(
                self.model, pair.base, target.layers, pair.origins, measure
            )
        else:
            base_run = restartable(self.model, self.read(pair.base), target.layers)
        baseline = source if pair.denoising else base_run
        before = float(pair.measure(base_run.logits, baseline.logits))
        after = float(pair.measure(source.logits, baseline.logits))

        # What is put in place of each head's output.
        replacements = {"effect": self._aligned_to(base_run, source, target.heads)}
        if other_prompt is not None:
            replacements["other_prompt"] = self._aligned_to(base_run, other_prompt, target.heads)
        if "random" in controls:
            replacements["random"] = {}
            for where, value in replacements["effect"].items():
                replacements["random"][where] = self._random(base_run, where, value)

        cells = self.cells(base_run)
        empty = [not mask.any() for _, mask in cells]
        effects = {"other_prompt": np.full(len(cells), np.nan), "whole": np.array(after - before)}
        for name, values in replacements.items():
            if target.attributed:
                attributed = [first_order(base_run, gradients, values, *cell) for cell in cells]
                effects[name] = np.array(attributed)
            else:
                effects[name] = self.patched(base_run, baseline, values, cells, progress) - before
            effects[name][empty] = np.nan
        if target.attributed:
            progress.update()
        return effects

    def exact(self, sample: Sequence[int]) -> np.ndarray:
        """The effect of some cells, patched exactly."""
        base_run = self.read(self.pair.base)
        source = self.read(self.pair.source)
        baseline = source if self.pair.denoising else base_run
        cells = self.cells(base_run)
        cells = [cells[index] for index in sample]
        values = self._aligned_to(
            base_run, source, [where for heads, _ in cells for where in heads]
        )
        before = float(self.pair.measure(base_run.logits, baseline.logits))
        return self.patched(base_run, baseline, values, cells) - before

    def _aligned_to(self, base_run: Run, source: Run, heads: Sequence[Where]) -> dict[Where, Z]:
        """The outputs of these heads in another run, at this run's original tokens."""
        return {where: _aligned(base_run, source, where, self.target.part) for where in heads}

    def patched(
        self,
        base_run: Run,
        baseline: Run,
        values: Mapping[Where, Z],
        cells: Sequence[tuple[Any, Tensor]],
        progress: tqdm | None = None,
    ) -> np.ndarray:
        """The metric with each cell patched, a batch of them at a time."""
        changes_by_row = []
        for heads, mask in cells:
            places = base_run.places[mask]
            changes = [
                (where, places, values[where][mask.to(values[where].device)]) for where in heads
            ]
            changes_by_row.append(changes)

        row = pass_bytes(self.model, len(base_run.sequence), len(self.pair.answer))
        rows = min(_ROWS, rows_within(self.memory, 0, row))
        metrics = []
        for start in range(0, len(changes_by_row), rows):
            batch = changes_by_row[start : start + rows]
            logits = patched_logits(self.model, base_run, batch, self.target.part)
            metrics.append(self.pair.measure(logits, baseline.logits).double().cpu())
            if progress is not None:
                progress.update(len(batch))
        return torch.cat(metrics).numpy()

    def _random(
        self, base_run: Run, where: Where, value: Float[Tensor, "original d_head"]
    ) -> Tensor:
        layer, head = where
        own = base_run.z[layer][base_run.places.to(value.device), head]
        purpose = f"a random direction of head {head}"
        keys = token_keys(self.seed, [self.pair.id], torch.arange(len(own))[None], layer, purpose)
        uniform = keyed_uniform(keys[0], own.shape[-1]).to(own.device)
        if self.target.part == "pattern":
            # A token sees at least as many keys as have probabilities above 0: these are permuted.
            width = own.shape[-1]
            window = attention_window(self.model, layer) or width
            key_positions = torch.arange(width, device=own.device)
            distance = base_run.places.to(own.device)[:, None] - key_positions
            unseen = (distance < 0) | (distance >= window)
            order = uniform.masked_fill(unseen, 2.0).argsort(-1)
            probabilities = value.sort(-1, descending=True).values
            return torch.zeros_like(value).scatter(-1, order, probabilities)
        direction = torch.special.ndtri(uniform.clamp(min=2**-25)).to(own)
        length = (value - own).norm(dim=-1, keepdim=True)
        return own + length * direction / direction.norm(dim=-1, keepdim=True)


def _slots(
    target: Target, prompts: Sequence[Prompt], sequences: Sequence[Mapping[str, TokenSequence]]
) -> list[Any]:
    """The segments that every prompt has, or its positions; None for all original tokens at
    once."""
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
    return list(range(lengths[0]))


def _changed(target: Target, slots: list[Any], pairs: Sequence[Pair]) -> list[Any]:
    """Only the positions that some prompt's versions may differ at.

    Up to the first token that differs, both runs compute the same, so that an effect there is 0 by
    construction: nothing to measure or to test.
    """
    if target.by != "position":
        return slots
    first_changed = min(_first_difference(pair) for pair in pairs)
    return [slot for slot in slots if slot >= first_changed]


def _first_difference(pair: Pair) -> int:
    """The first position at which the runs' tokens differ, or one has a token that the other
    lacks."""
    shorter = min(len(pair.base), len(pair.source))
    differs = pair.base.tokens[:shorter] != pair.source.tokens[:shorter]
    if not differs.any():
        return shorter
    return int(differs.nonzero()[0])


def _check_controls(controls: Any, metric: Metric, direction: Direction) -> None:
    """Refuse controls that don't exist, or none where nothing else can be tested."""
    if isinstance(controls, str) or any(name not in CONTROLS for name in controls):
        raise OptionError(
            f'controls={controls!r}: give ("other_prompt", "random"), one of them in brackets, or '
            "() for none"
        )
    if metric == "kl" and direction == "noising" and "random" not in controls:
        raise OptionError(
            'metric="kl" cannot fall with direction="noising", so effects are tested against the '
            'random control: give controls=("random",)'
        )


def warn_of_time(prompt: PatchedPrompt, rows: int, shorter: str) -> None:
    """Say how long exact patching will take, if more than a minute, from the time of one run; and
    what takes less."""
    if rows < _FEW_ROWS:
        return
    layers = int(prompt.model.cfg.n_layers)
    start = perf_counter()
    prompt.read(prompt.pair.base)
    seconds_of_run = perf_counter() - start
    # Passes start at the patched layer, wherever blocks can be given what they returned before.
    remaining = [layers - min(layer for layer, _ in heads) for heads in prompt.target.units]
    seconds = seconds_of_run * rows * float(np.mean(remaining)) / layers
    if seconds < _LONG:
        return
    warn(f"about {seconds / 60:.0f} min for {rows:,} patched runs; {shorter}")


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
        candidates = []
        with_another_answer = []
        for other_id in sorted(ids):
            other_length, other_answer = length_and_answer[other_id]
            if other_id == own_id or other_length < length:
                continue
            candidates.append(other_id)
            if other_answer != answer:
                with_another_answer.append(other_id)
        if not candidates:
            drawn.append(None)
            continue
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
    longer_by = len(source_tokens) - len(own_tokens)

    # All of them, if it is the same prompt.
    agrees = own_tokens == source_tokens[: len(own_tokens)]
    shared_beginning = int(agrees.long().cumprod(0).sum())
    chosen = torch.cat(
        [source.places[:shared_beginning], source.places[shared_beginning + longer_by :]]
    ).to(device)
    value = source.z[layer][chosen, head]
    if part != "pattern":
        return value
    own = run.z[layer][own_places, head]
    pattern = torch.zeros_like(own)
    pattern[:, own_places] = value[:, chosen]
    return pattern


def first_order(
    run: Run,
    gradients: Mapping[int, Z],
    values: Mapping[Where, Z],
    heads: Sequence[Where],
    mask: Bool[Tensor, " original"],
) -> float:
    """The first-order effect of one head at some of the original tokens."""
    layer, head = heads[0]
    z = run.z[layer]
    mask = mask.to(z.device)
    places = run.places.to(z.device)[mask]
    step = values[layer, head][mask].double() - z[places, head].double()
    return float((gradients[layer][places, head].double() * step).sum())


def _dataset(
    effects: Sequence[Mapping[str, np.ndarray]],
    prompts: Sequence[str],
    target: Target,
    slots: Sequence[Any],
    controls: Sequence[Control],
) -> xr.Dataset:
    """The effects by layer and head, layer, or set, and segment or position; NaN for heads that
    were not requested.
    """
    layers = sorted({layer for layer, _ in target.heads})
    heads = sorted({head for _, head in target.heads})
    layer_indices = [layers.index(layer) for layer, _ in target.heads]
    head_indices = [heads.index(head) for _, head in target.heads]
    labels: dict[str, list[Any]]
    indices: tuple[list[int], ...]
    if target.together:
        labels = {"set": [_set_name(target)]}
        indices = ([0],)
    elif target.of_layers:
        labels = {"layer": layers}
        indices = (layer_indices,)
    else:
        labels = {"layer": layers, "head": heads}
        indices = (layer_indices, head_indices)

    coords: dict[str, list[Any]] = {"prompt": list(prompts), **labels}
    if target.by is not None:
        coords[target.by] = list(slots)
    sizes = [len(label) for label in labels.values()]
    variables: dict[str, Any] = {}
    for name in ("effect", *controls):
        values = np.full((len(prompts), *sizes, len(slots)), np.nan)
        rows = np.stack([effects_of_prompt[name] for effects_of_prompt in effects])
        values[(slice(None), *indices)] = rows.reshape(len(prompts), len(indices[0]), -1)
        if target.by is None:
            values = values[..., 0]
        variables[name] = (tuple(coords), values)
    whole = [float(effects_of_prompt["whole"]) for effects_of_prompt in effects]
    variables["whole"] = (("prompt",), np.array(whole))
    return xr.Dataset(variables, coords)


def _set_name(target: Target) -> str:
    if target.of_layers:
        names = [f"L{layer}" for layer, _ in target.heads]
    else:
        names = [f"L{layer}H{head}" for layer, head in target.heads]
    if len(names) <= 8:
        return " + ".join(names)
    kind = "layers" if target.of_layers else "heads"
    return f"{len(names)} {kind}"
