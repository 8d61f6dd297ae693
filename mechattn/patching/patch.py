"""Activation patching: which heads, layers and segments carry the effect of a condition."""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm.auto import tqdm

from mechattn.axes import BASELINE, SEGMENTS
from mechattn.errors import OptionError
from mechattn.functional.activations import keyed_uniform, token_keys
from mechattn.model.hooked import HookedModel, alone
from mechattn.model.hooks import attention_window
from mechattn.model.load import load_model
from mechattn.patching.answer_metrics import Metric
from mechattn.patching.effects import CONTROLS, Patching, checked_sample
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
from mechattn.prompts.token_sequences import Sequence

_CHECKED = 4  # prompts on which attribution is compared with patching
_ROWS = 32  # patched copies of a prompt in a batch, at most
_TOKENS = 2**14  # and tokens in them


@alone
def patch(
    model: Any,
    prompts: Prompt | str | Seq[Prompt | str],
    condition: Condition,
    *,
    at: Sites | Part | Seq[Where | str] = "z",
    together: bool = False,
    metric: Metric = "logprob",
    direction: Direction = "denoising",
    seed: int = 0,
) -> Patching:
    """Patch or attribute: how the answer changes when a head's output, or a layer's, comes from the prompt's other run.

    In "denoising" the model reads each prompt under the condition, and the part at every original token is replaced by
    that of the same token in the baseline run. Tokens are aligned by origin because the runs differ in length. In
    "noising" the baseline is read with the condition's. ``effect = metric(patched) − metric(unpatched)``; the whole
    effect is ``metric(the other run) − metric(unpatched)``. Everything is patched exactly, with one row of a forward
    pass for each, except ``at="z"``: then all heads are attributed to first order, ``Σ ∂metric/∂z · (z_other − z)``,
    with three forward passes and one backward pass per prompt, and eight are also patched. The logits depend only on
    the residual stream after the last layer, so its effect is the whole effect.

    Each cell has two controls: the part in another prompt's run, and a step of equal norm in a random direction (of a
    pattern: each token's probabilities, permuted among the keys that it sees). The other prompt is drawn by ``seed``
    among those that are at least as long, with another answer where there are such. Tokens with which both prompts
    begin are aligned with each other, the rest from the end, where the answer is. For a prompt that is longer than all
    others this control is NaN.

    Args:
        model: A hooked model, or anything that ``load_model`` accepts.
        prompts: Prompts with an answer that the model reads, as ``load_prompts(…, with_answer=True)`` gives them.
        condition: The condition to compare with the baseline.
        at: Heads to patch, as (layer, head) from 0 or "L0H2"; "all", each head exactly; a part of all of them: "z",
            "v", "pattern" or "resid_post"; or :class:`Sites`, which names a part, heads or layers, and segments.
        together: Patch all of ``at`` as one set. Heads that compensate for each other, or that are only right as a sum,
            may have no effect alone but one together.
        metric: "logprob" of the reference answer, in nats; "margin" of its tokens over the best others, in logits; "kl"
            from the baseline, in nats; or a function of logits [row answer d_vocab] and answer [answer] that returns
            one number per row [row].
        direction: "denoising" or "noising", which decides the run to patch.
        seed: The seed of random directions and other prompts, of the condition's draws and of the heads to check.

    Raises:
        MechattnError: A prompt has no answer, a head or layer doesn't exist, a condition hides tokens or acts inside
            the model, or gradients are needed for quantised weights or for "kl" with "noising", where all are 0; raised
            before the first forward pass.

    Source:
        Attribution patching: Nanda 2023; its errors and AtP*: arXiv:2403.00745. As z comes after the softmax, no
        softmax has to be recomputed.
    """
    model = load_model(model)
    target = target_in(model, at, together)
    if target.attributed:
        check_gradients(model, metric, direction)
    prompts = as_prompts(prompts)
    pairs, sequences = pairs_of(model, prompts, condition, metric, direction, seed)
    slots = _slots(target, prompts, sequences)
    ones = [_Prompt(model, target, slots, pair, seed) for pair in pairs]
    others = _others(
        {pair.id: (len(pair.origins), tuple(pair.answer.tolist())) for pair in pairs}, seed
    )
    found = []
    steps = tqdm(ones, desc="patching", unit="prompt", delay=2)
    for one, other in zip(steps, others, strict=True):
        found.append(one.effects(None if other is None else ones[other].read(pairs[other].donor)))
    about = about_of(model, prompts, condition, metric, direction, seed) | {
        "method": "attributed (first order)" if target.attributed else "patched",
        "part": target.part,
        "heads": list(target.heads),
    }
    made = Patching(
        _dataset(found, [p.id for p in prompts], target, slots), units_of(prompts), about
    )
    if not target.attributed:
        return made
    sample = checked_sample(made, seed)
    return made.compared([one.exact(sample) for one in ones[:_CHECKED]], sample)


@dataclass(frozen=True)
class _Prompt:
    """The measurements to make on a prompt; a cell is a unit of the target, at a segment, a position, or all."""

    model: HookedModel
    target: Target
    slots: Seq[str | int | None]
    pair: Pair
    seed: int

    def read(self, sequence: Sequence) -> Run:
        return read(self.model, sequence, self.target.layers, self.target.part, self.pair.origins)

    def cells(self, run: Run) -> list[tuple[tuple[Where, ...], Bool[Tensor, " shared"]]]:
        """The heads of each cell, and which of the original tokens are patched."""
        codes = run.sequence.segment[run.places]

        def at(slot: str | int | None) -> Bool[Tensor, " shared"]:
            if isinstance(slot, str):
                return codes == SEGMENTS.index(slot)
            return codes >= 0 if slot is None else self.pair.origins == slot

        chosen = list(map(at, self.slots))
        return [(heads, some) for heads in self.target.units for some in chosen]

    def effects(self, stranger: Run | None) -> dict[str, np.ndarray]:
        """The effect of each cell and its controls, and the whole effect; NaN where no token has a partner."""
        by_z: dict[int, Z] = {}
        pair, target, source = self.pair, self.target, self.read(self.pair.donor)
        if target.attributed:

            def measure(made: Run) -> Float[Tensor, " row"]:
                return pair.measure(made.logits, source.logits if pair.denoising else made.logits)

            run, by_z = read_with_gradients(
                self.model, pair.receiver, target.layers, pair.origins, measure
            )
        else:
            run = restartable(self.model, self.read(pair.receiver), target.layers)
        base = source if pair.denoising else run
        before, after = (float(pair.measure(each.logits, base.logits)) for each in (run, source))
        values = {
            name: {where: _aligned(run, given, where, target.part) for where in target.heads}
            for name, given in (("effect", source), ("other_prompt", stranger))
            if given is not None
        }
        values["random"] = {
            where: self._random(run, where, step) for where, step in values["effect"].items()
        }
        cells = self.cells(run)
        made = {"other_prompt": np.full(len(cells), np.nan), "whole": np.array(after - before)}
        for name, given in values.items():
            if target.attributed:
                made[name] = np.array([_attributed(run, by_z, given, *cell) for cell in cells])
            else:
                made[name] = self._patched(run, base, given, cells) - before
            made[name][[not some.any() for _, some in cells]] = np.nan
        return made

    def exact(self, sample: Seq[int]) -> np.ndarray:
        """The effect of some cells, patched exactly."""
        run, source = self.read(self.pair.receiver), self.read(self.pair.donor)
        base = source if self.pair.denoising else run
        cells = [self.cells(run)[i] for i in sample]
        given = {
            where: _aligned(run, source, where, self.target.part)
            for heads, _ in cells
            for where in heads
        }
        return self._patched(run, base, given, cells) - float(
            self.pair.measure(run.logits, base.logits)
        )

    def _patched(
        self, run: Run, base: Run, given: Mapping[Where, Z], cells: Seq[tuple[Any, Tensor]]
    ) -> np.ndarray:
        """The metric with each cell patched, a batch of them at a time."""
        put = [
            [
                (where, run.places[some], given[where][some.to(given[where].device)])
                for where in heads
            ]
            for heads, some in cells
        ]
        rows = max(1, min(_ROWS, _TOKENS // len(run.sequence)))
        found = []
        for first in range(0, len(put), rows):
            logits = patched_logits(self.model, run, put[first : first + rows], self.target.part)
            found.append(self.pair.measure(logits, base.logits).double().cpu())
        return torch.cat(found).numpy()

    def _random(self, run: Run, where: Where, value: Float[Tensor, "original d_head"]) -> Tensor:
        layer, head = where
        own = run.z[layer][run.places.to(value.device), head]
        purpose = f"a random direction of head {head}"
        keys = token_keys(self.seed, [self.pair.id], torch.arange(len(own))[None], layer, purpose)
        draw = keyed_uniform(keys[0], own.shape[-1]).to(own.device)
        if (
            self.target.part == "pattern"
        ):  # a token sees at least as many keys as have probabilities above 0
            back = run.places.to(own.device)[:, None] - torch.arange(
                own.shape[-1], device=own.device
            )
            unseen = (back < 0) | (back >= (attention_window(self.model, layer) or own.shape[-1]))
            order = draw.masked_fill(unseen, 2.0).argsort(-1)
            return torch.zeros_like(value).scatter(
                -1, order, value.sort(-1, descending=True).values
            )
        draw = torch.special.ndtri(draw.clamp(min=2**-25)).to(own)
        step = (value - own).norm(dim=-1, keepdim=True)
        return own + step * draw / draw.norm(dim=-1, keepdim=True)


def _slots(
    target: Target, prompts: Seq[Prompt], sequences: Seq[Mapping[str, Sequence]]
) -> list[Any]:
    """The segments that every prompt has, or its positions; None for all original tokens at once."""
    if target.by is None:
        return [None]
    own = [made[BASELINE] for made in sequences]
    if target.by == "segment":
        return [name for name in SEGMENTS if all(one.of_segment(name).any() for one in own)]
    lengths = [len(one) for one in own]
    if len(set(lengths)) > 1:
        at = lengths.index(max(lengths))
        raise OptionError(
            f"prompts have {min(lengths)} to {max(lengths)} tokens (prompt {prompts[at].id} the most), so a position "
            'means another token in each: give prompts of equal length, or by="segment"'
        )
    return list(range(lengths[0]))


def _others(known: Mapping[str, tuple[int, Seq[int]]], seed: int) -> list[int | None]:
    """The index of another prompt for each, of length and answer, drawn among those at least as long; None without any.

    Those with the same answer are left out where there are others: what they bring may be the answer itself.
    """
    ids, drawn = list(known), []
    for own, (length, answer) in known.items():
        longer = sorted(other for other in ids if other != own and known[other][0] >= length)
        some = [other for other in longer if known[other][1] != answer] or longer
        drawn.append(
            ids.index(random.Random(f"other prompt {seed} {own}").choice(some)) if some else None
        )
    return drawn


def _aligned(
    run: Run, source: Run, where: Where, part: Part = "z"
) -> Float[Tensor, "original d_head"]:
    """A head's output in another run at the receiver's original tokens; from the end, after a shared beginning."""
    layer, head = where
    own = run.z[layer][run.places.to(run.z[layer].device), head]
    ours, theirs = (each.sequence.tokens[each.places] for each in (run, source))
    after = int(
        (ours == theirs[: len(ours)]).long().cumprod(0).sum()
    )  # all, if it is the same prompt
    chosen = torch.cat(
        [source.places[:after], source.places[after + len(theirs) - len(ours) :]]
    ).to(own.device)
    given = source.z[layer][chosen, head]
    if part != "pattern":
        return given
    made = torch.zeros_like(own)
    made[:, run.places.to(own.device)] = given[:, chosen]
    return made


def _attributed(
    run: Run,
    by_z: Mapping[int, Z],
    given: Mapping[Where, Z],
    heads: Seq[Where],
    some: Bool[Tensor, " original"],
) -> float:
    """The first-order effect of one head at some of the original tokens."""
    (layer, head) = heads[0]
    value, here = given[layer, head], some.to(run.z[layer].device)
    places = run.places.to(value.device)[here]
    step = value[here].double() - run.z[layer][places, head].double()
    return float((by_z[layer][places, head].double() * step).sum())


def _dataset(
    found: Seq[Mapping[str, np.ndarray]], prompts: Seq[str], target: Target, slots: Seq[Any]
) -> xr.Dataset:
    """The effects by layer and head, layer, or set, and segment or position; NaN for heads that were not requested."""
    by: dict[str, list[Any]] = {} if target.by is None else {target.by: list(slots)}
    layers, heads = (sorted({where[i] for where in target.heads}) for i in (0, 1))
    labels: dict[str, list[Any]] = {"layer": layers} | ({} if target.of_layers else {"head": heads})
    at: tuple[list[int], ...] = (
        [layers.index(n) for n, _ in target.heads],
        [heads.index(h) for _, h in target.heads],
    )
    if target.together:
        labels, at = {"set": [_set_name(target)]}, ([0],)
    sizes = [len(label) for label in labels.values()]
    made: dict[str, Any] = {}
    for name in ("effect", *CONTROLS):
        values = np.full((len(prompts), *sizes, len(slots)), np.nan)
        each = np.stack([row[name] for row in found]).reshape(len(prompts), len(at[0]), -1)
        cells: Any = (slice(None), *at[: len(sizes)])
        values[cells] = each
        made[name] = (("prompt", *labels, *by), values if by else values[..., 0])
    made["whole"] = (("prompt",), np.array([float(row["whole"]) for row in found]))
    return xr.Dataset(made, {"prompt": list(prompts), **labels, **by})


def _set_name(target: Target) -> str:
    names = [
        f"L{layer}" if target.of_layers else f"L{layer}H{head}" for layer, head in target.heads
    ]
    return (
        " + ".join(names)
        if len(names) <= 8
        else f"{len(names)} {'layers' if target.of_layers else 'heads'}"
    )
