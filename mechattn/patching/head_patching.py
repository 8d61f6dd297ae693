"""Activation patching: which heads and layers carry the effect of a condition."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.axes import BASELINE
from mechattn.engine.check import made_sequences, with_baseline
from mechattn.errors import OptionError
from mechattn.functional.keyed_random import keyed_uniform, token_keys
from mechattn.model.hooked import HookedModel
from mechattn.model.hooks import attention_window, chosen_layers
from mechattn.model.load import as_hooked, load_model
from mechattn.model.lock import alone
from mechattn.model.split_heads import kv_heads_of
from mechattn.patching.checks import (
    Direction,
    HeadPart,
    check_metric,
    check_options,
    check_part,
    check_sequences,
    chosen_heads,
)
from mechattn.patching.metrics import Measured, Metric, metric_of
from mechattn.patching.runs import Part, Run, Where, Z, patched_logits, read, read_with_gradients
from mechattn.patching.table import CONTROLS, HeadPatching, LayerPatching, SetPatching
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.prompts.sequences import Sequence
from mechattn.results import provenance
from mechattn.results.canonical import identity
from mechattn.stats.units import Units

if TYPE_CHECKING:
    import xarray as xr

_CHECKED = 4  # prompts on which attribution is compared with patching


@alone
def patch_heads(
    model: Any,
    prompts: Prompt | str | Seq[Prompt | str],
    condition: Condition,
    *,
    heads: Seq[Where] | None = None,
    part: HeadPart = "z",
    metric: Metric = "logprob",
    direction: Direction = "denoising",
    check: int = 8,
    rows: int = 32,
    seed: int = 0,
    progress: bool = True,
) -> HeadPatching:
    """Patch or attribute heads: how the answer changes when one head's output comes from the prompt's other run.

    In "denoising" the model reads each prompt under the condition, and a head's output z (before W_O) at every original
    token is replaced by that of the same token in the baseline run. Tokens are aligned by origin because the runs
    differ in length. In "noising" the baseline is read with the condition's z. ``effect = metric(patched) −
    metric(unpatched)``; the whole effect is ``metric(the other run) − metric(unpatched)``. Named heads are patched
    exactly, with one forward pass per head. Without ``heads``, all heads are attributed to first order, ``Σ ∂metric/∂z
    · (z_other − z)``, with three forward passes and one backward pass per prompt, and some are also patched.

    Each head has two controls: the z of another prompt's run, and a step of equal norm in a random direction (of a
    pattern: each token's probabilities, permuted among the keys that it sees). The other prompt is drawn by ``seed``
    among those that are at least as long. Tokens with which both prompts begin are aligned with each other, the rest
    from the end, where the answer is. For a prompt that is longer than all others this control is NaN.

    Args:
        model: A hooked model, or anything that ``load_model`` accepts.
        prompts: Prompts with an answer that the model reads, as ``load_prompts(…, with_answer=True)`` gives them.
        condition: The condition to compare with the baseline.
        heads: (layer, head) pairs, from 0, to patch exactly; by default all heads are attributed.
        part: The part of a head to patch: "z", its output; "value", its values before norms (for heads with values of
            their own); "pattern", its attention among the original tokens. Only z can be attributed.
        metric: "logprob" of the reference answer, in nats; "margin" of its tokens over the best others, in logits; "kl"
            from the baseline, in nats; or a function of logits [row answer d_vocab] and answer [answer] that returns
            one number per row [row].
        direction: "denoising" or "noising", which decides the run to patch.
        check: The number of heads on which attribution is compared with patching, half of them the largest; 0 for none.
        rows: The number of patched copies of a prompt in one batch.
        seed: The seed of random directions and other prompts, of the condition's draws and of the heads to check.
        progress: Show a progress bar if it takes longer than two seconds.

    Raises:
        MechattnError: A prompt has no answer, a head doesn't exist, a condition hides tokens or acts inside the model,
            or gradients are needed for quantised weights or for "kl" with "noising", where all are 0; raised before the
            first forward pass.

    Source:
        Attribution patching: Nanda 2023; its errors and AtP*: arXiv:2403.00745. As z comes after the softmax, no
        softmax has to be recomputed.
    """
    model = load_model(as_hooked(model))
    check_part(model, part, heads is None)
    chosen = chosen_heads(model, heads, kv_heads_of(model) if part == "value" else None)
    check_options(model, heads is None, direction, check, rows)
    if heads is None and metric == "kl" and direction == "noising":
        raise OptionError(
            'metric="kl" is smallest in the baseline, which direction="noising" patches, so every gradient is 0: name '
            'heads, which are patched without gradients, or choose direction="denoising" or another metric'
        )
    one = _Prompt(model, metric_of(metric)[0], chosen, part, heads is None, rows, seed)
    pairs, dataset, units, about = _patched(one, prompts, condition, metric, direction, progress)
    made = HeadPatching(dataset, units, about)
    if heads is not None or not check:
        return made
    sample = _sample(made, check, seed)
    return made.compared([one.exact(*pair, sample) for pair in pairs[:_CHECKED]], sample)


@alone
def patch_together(
    model: Any,
    prompts: Prompt | str | Seq[Prompt | str],
    condition: Condition,
    heads: Seq[Where],
    *,
    part: HeadPart = "z",
    metric: Metric = "logprob",
    direction: Direction = "denoising",
    seed: int = 0,
    progress: bool = True,
) -> SetPatching:
    """Patch a set of heads together: how the answer changes when all their outputs come from the prompt's other run.

    As :func:`patch_heads`, with the heads patched as one set. Heads that compensate for each other, or that are only
    right as a sum, may have no effect alone but one together.

    Args:
        model: A hooked model, or anything that ``load_model`` takes.
        prompts: Prompts with an answer that the model reads.
        condition: The condition to compare with the baseline.
        heads: (layer, head) pairs, from 0.
        part: As for ``patch_heads``.
        metric: As for ``patch_heads``.
        direction: Which run is patched.
        seed: The seed of random directions and of the condition's draws.
        progress: Show a progress bar if it takes longer than two seconds.

    Raises:
        MechattnError: As for ``patch_heads``.
    """
    model = load_model(as_hooked(model))
    check_part(model, part, False)
    chosen = chosen_heads(model, [] if heads is None else heads, kv_heads_of(model) if part == "value" else None)
    check_options(model, False, direction, 0, 1)
    one = _Prompt(model, metric_of(metric)[0], chosen, part, False, 1, seed, together=True)
    _, dataset, units, about = _patched(one, prompts, condition, metric, direction, progress)
    layer, head = chosen[0]  # the effect of the set is stored at each of its heads
    first = dataset.sel(layer=layer, head=head, drop=True)
    whole = first.whole
    several = first.drop_vars("whole").expand_dims(set=[len(chosen)], axis=-1).assign(whole=whole)
    return SetPatching(several, units, about | {"heads": chosen})


@alone
def patch_residual(
    model: Any,
    prompts: Prompt | str | Seq[Prompt | str],
    condition: Condition,
    *,
    layers: Seq[int] | int | None = None,
    metric: Metric = "logprob",
    direction: Direction = "denoising",
    rows: int = 32,
    seed: int = 0,
    progress: bool = True,
) -> LayerPatching:
    """Patch the residual stream by layer: how the answer changes when it comes from the prompt's other run.

    As :func:`patch_heads`, with the whole residual stream at every original token, patched exactly. The logits depend
    only on the stream after the last layer, so its effect is the whole effect. After an earlier layer, later layers
    still read the inserted tokens of the patched run.

    Args:
        model: A hooked model, or anything that ``load_model`` takes.
        prompts: Prompts with an answer that the model reads.
        condition: The condition to compare with the baseline.
        layers: Layers, from 0; all by default.
        metric: As for ``patch_heads``.
        direction: Which run is patched.
        rows: The number of patched copies of a prompt in one batch.
        seed: The seed of random directions and of the condition's draws.
        progress: Show a progress bar if it takes longer than two seconds.

    Raises:
        MechattnError: As for ``patch_heads``; or a layer doesn't exist.
    """
    model = load_model(as_hooked(model))
    check_options(model, False, direction, 0, rows)
    chosen = [(layer, 0) for layer in chosen_layers(model, layers)]
    one = _Prompt(model, metric_of(metric)[0], chosen, "resid", False, rows, seed)
    _, dataset, units, about = _patched(one, prompts, condition, metric, direction, progress)
    return LayerPatching(dataset.squeeze("head", drop=True), units, about)


def _patched(
    one: _Prompt, prompts: Any, condition: Condition, metric: Metric, direction: Direction, progress: bool
) -> tuple[list[tuple[Sequence, Sequence]], xr.Dataset, Units, dict[str, Any]]:
    """Both sequences of each prompt, the effects, the units of replication, and a description."""
    from tqdm.auto import tqdm

    prompts = as_prompts(prompts)
    sequences = made_sequences(with_baseline({"condition": condition}), prompts, one.model, one.seed)
    check_sequences(one.model, prompts, sequences)
    pairs = [_ordered(made, direction) for made in sequences]
    others = _others({p.id: len(made[BASELINE]) for p, made in zip(prompts, sequences, strict=True)}, one.seed)
    found = []
    steps = tqdm(pairs, desc="patching", unit="prompt", delay=2, disable=not progress)
    for (receiver, donor), prompt, other in zip(steps, prompts, others, strict=True):
        stranger = None if other is None else one.read(pairs[other][1])
        found.append(one.effects(prompt.id, receiver, one.read(donor), stranger))
    units = Units.grouped([p.group or f"\0{p.id}" for p in prompts])  # a prompt without a group is its own unit
    return pairs, _dataset(found, prompts, one.chosen), units, _about(one, prompts, condition, metric, direction)


@dataclass(frozen=True)
class _Prompt:
    """The measurements to make on each prompt."""

    model: HookedModel
    measured: Measured
    chosen: Seq[Where]
    part: Part
    attributed: bool
    rows: int
    seed: int
    together: bool = False

    @property
    def layers(self) -> list[int]:
        return sorted({layer for layer, _ in self.chosen})

    def read(self, sequence: Sequence) -> Run:
        return read(self.model, sequence, self.layers, self.part)

    def effects(self, prompt: str, receiver: Sequence, source: Run, stranger: Run | None) -> dict[str, np.ndarray]:
        """The effect of each head and its controls, and the whole effect."""
        by_z: dict[int, Z] = {}
        denoising = bool(receiver.inserted.any())
        if self.attributed:
            run, by_z = read_with_gradients(
                self.model,
                receiver,
                self.layers,
                lambda made: self._measure(made, made.logits, source if denoising else made),
            )
        else:
            run = self.read(receiver)
        base = source if denoising else run
        before, after = (float(self._measure(run, each.logits, base)) for each in (run, source))
        values = {
            name: {where: _aligned(run, given, where, self.part) for where in self.chosen}
            for name, given in (("effect", source), ("other_prompt", stranger))
            if given is not None
        }
        values["random"] = {where: self._random(prompt, run, where, values["effect"][where]) for where in self.chosen}
        if self.attributed:
            made = {name: _attributed(run, by_z, given) for name, given in values.items()}
        else:
            made = {name: self._patched(run, base, given) - before for name, given in values.items()}
        return {"other_prompt": np.full(len(self.chosen), np.nan)} | made | {"whole": np.array(after - before)}

    def exact(self, receiver: Sequence, donor: Sequence, sample: Seq[Where]) -> np.ndarray:
        """The effect of some heads, patched exactly."""
        run, source = self.read(receiver), self.read(donor)
        base = source if receiver.inserted.any() else run
        put = {where: _aligned(run, source, where, self.part) for where in sample}
        return self._patched(run, base, put) - float(self._measure(run, run.logits, base))

    def _measure(self, run: Run, logits: Float[Tensor, "row answer d_vocab"], base: Run) -> Float[Tensor, " row"]:
        wide = [each if each.dtype == torch.float64 else each.float() for each in (logits, base.logits)]
        made = self.measured(wide[0], run.answer.to(logits.device), wide[1])
        check_metric(made, len(logits), logits.requires_grad)
        return made

    def _patched(self, run: Run, base: Run, given: Mapping[Where, Z]) -> np.ndarray:
        items = [given] if self.together else [{where: value} for where, value in given.items()]
        found = []
        for first in range(0, len(items), self.rows):
            logits = patched_logits(self.model, run, items[first : first + self.rows], self.part)
            found.append(self._measure(run, logits, base).double().cpu())
        made: np.ndarray = torch.cat(found).numpy()
        return np.broadcast_to(made, len(given)) if self.together else made

    def _random(self, prompt: str, run: Run, where: Where, value: Float[Tensor, "original d_head"]) -> Tensor:
        layer, head = where
        own = run.z[layer][run.places.to(value.device), head]
        keys = token_keys(
            self.seed, [prompt], torch.arange(len(own))[None], layer, f"a random direction of head {head}"
        )
        draw = keyed_uniform(keys[0], own.shape[-1]).to(own.device)
        if self.part == "pattern":  # a token sees at least as many keys as have probabilities above 0
            back = run.places.to(own.device)[:, None] - torch.arange(own.shape[-1], device=own.device)
            unseen = (back < 0) | (back >= (attention_window(self.model, layer) or own.shape[-1]))
            order = draw.masked_fill(unseen, 2.0).argsort(-1)
            return torch.zeros_like(value).scatter(-1, order, value.sort(-1, descending=True).values)
        draw = torch.special.ndtri(draw.clamp(min=2**-25)).to(own)
        step = (value - own).norm(dim=-1, keepdim=True)
        return own + step * draw / draw.norm(dim=-1, keepdim=True)


def _others(lengths: Mapping[str, int], seed: int) -> list[int | None]:
    """The index of another prompt for each, drawn among those at least as long, in any order; None if there is none."""
    ids = list(lengths)
    longer = [sorted(b for b in ids if b != a and lengths[b] >= lengths[a]) for a in ids]
    drawn = [random.Random(f"other prompt {seed} {a}") for a in ids]
    return [ids.index(draw.choice(some)) if some else None for draw, some in zip(drawn, longer, strict=True)]


def _aligned(run: Run, source: Run, where: Where, part: Part = "z") -> Float[Tensor, "original d_head"]:
    """A head's output in another run at the receiver's original tokens; from the end, after a shared beginning."""
    layer, head = where
    own = run.z[layer][run.places.to(run.z[layer].device), head]
    ours, theirs = (each.sequence.tokens[each.places] for each in (run, source))
    after = int((ours == theirs[: len(ours)]).long().cumprod(0).sum())  # all, if it is the same prompt
    chosen = torch.cat([source.places[:after], source.places[after + len(theirs) - len(ours) :]]).to(own.device)
    given = source.z[layer][chosen, head]
    if part != "pattern":
        return given
    made = torch.zeros_like(own)
    made[:, run.places.to(own.device)] = given[:, chosen]
    return made


def _attributed(run: Run, by_z: Mapping[int, Z], given: Mapping[Where, Z]) -> np.ndarray:
    made = []
    for (layer, head), value in given.items():
        places = run.places.to(value.device)
        step = value.double() - run.z[layer][places, head].double()
        made.append(float((by_z[layer][places, head].double() * step).sum()))
    return np.array(made)


def _ordered(made: Mapping[str, Sequence], direction: Direction) -> tuple[Sequence, Sequence]:
    """The run to patch, and the run to patch from."""
    changed, baseline = made["condition"], made[BASELINE]
    return (changed, baseline) if direction == "denoising" else (baseline, changed)


def _about(
    one: _Prompt, prompts: Seq[Prompt], condition: Condition, metric: Metric, direction: Direction
) -> dict[str, Any]:
    return {
        "model": provenance.name_of(str(one.model.cfg.model_name)),
        "prompts": provenance.digest(prompts),
        "condition": identity(condition),
        "metric": metric_of(metric)[1],
        "direction": direction,
        "method": "attributed (first order)" if one.attributed else "patched",
        "part": one.part,
        "seed": one.seed,
        "versions": provenance.versions(),
    }


def _dataset(found: Seq[Mapping[str, np.ndarray]], prompts: Seq[Prompt], chosen: Seq[Where]) -> xr.Dataset:
    """The effects by layer and head; NaN for heads that were not requested."""
    import xarray as xr

    layers, heads = (sorted({pair[i] for pair in chosen}) for i in (0, 1))
    of_layer = np.array([layers.index(layer) for layer, _ in chosen])
    of_head = np.array([heads.index(head) for _, head in chosen])
    made: dict[str, Any] = {}
    for name in ("effect", *CONTROLS):
        values = np.full((len(prompts), len(layers), len(heads)), np.nan)
        values[:, of_layer, of_head] = np.stack([each[name] for each in found])
        made[name] = (("prompt", "layer", "head"), values)
    made["whole"] = (("prompt",), np.array([float(each["whole"]) for each in found]))
    return xr.Dataset(made, {"prompt": [p.id for p in prompts], "layer": layers, "head": heads})


def _sample(made: HeadPatching, check: int, seed: int) -> list[Where]:
    """The heads on which attribution is checked: those with the largest effects, and as many drawn at random."""
    mean = abs(made.effects.effect.mean("prompt"))
    every = [(int(layer), int(head)) for layer in mean.layer for head in mean["head"]]
    order = np.argsort(-mean.values.ravel(), kind="stable")
    largest = [every[i] for i in order[: (check + 1) // 2]]
    rest = [where for where in every if where not in largest]
    drawn = np.random.default_rng(seed).permutation(len(rest))[: check // 2]
    return [*largest, *(rest[i] for i in drawn)]
