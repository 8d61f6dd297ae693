"""Exact paths: how much of an effect one head passes to another's queries, keys or values, or to the logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from mechattn.axes import head_named
from mechattn.errors import OptionError
from mechattn.model.head_parts import kv_heads_of
from mechattn.model.hooked import HookedModel, alone
from mechattn.model.hooks import attention_layers
from mechattn.model.load import load_model
from mechattn.patching.answer_metrics import Metric
from mechattn.patching.effects import Patching
from mechattn.patching.pairs import Pair, about_of, pairs_of, units_of
from mechattn.patching.patched_runs import (
    Run,
    Where,
    changing,
    logits_of,
    patched_logits,
    places_of,
    read,
    restartable,
)
from mechattn.patching.refusals import Direction
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts

Output = Float[Tensor, "shared d_head"]  # of a head, at the original tokens that both runs have


@dataclass(frozen=True)
class Path:
    """From a head to a part of another head, or to the logits (None)."""

    sender: Where
    receiver: Where | None
    part: Literal["q", "k", "v"] | None
    name: str


@alone
def paths(
    model: Any,
    prompts: Prompt | str | Sequence[Prompt | str],
    condition: Condition,
    between: Sequence[tuple[str, str]],
    *,
    metric: Metric = "answers",
    direction: Direction = "noising",
    seed: int = 0,
) -> Patching:
    """Patch paths exactly: from a head to another head's queries, keys or values, or directly to the logits.

    First the run is repeated with every head's output held at its own value, except the sender's, which is that of the
    other run, while MLPs are computed again; this gives what the receiver would get:
    ``r' = r(z_sender := z'_sender, z_h := z_h for all other heads h)``. Then the run is repeated with r' in that place
    alone, and all that comes after is computed: ``effect = metric(run with r') − metric(run)``. For "logits" the first
    repetition's are measured.

    Args:
        model: A hooked model, or anything that ``load_model`` accepts.
        prompts: Prompts with an answer that the model reads.
        condition: The other version: ``Counterpart()``, or inserted tokens.
        between: Pairs such as ``("L0H1", "L1H0.k")`` or ``("L1H0", "logits")``; keys and values are counted by heads
            that have their own.
        metric: As for ``patch``.
        direction: As for ``edges``.
        seed: The seed of random directions.

    Returns:
        Effects by path, with a random step of equal norm of the sender as control.

    Raises:
        OptionError: A head doesn't exist, or a receiver is not in a later layer than its sender.

    Source:
        Path patching: arXiv:2211.00593, appendix B.
    """
    model = load_model(model)
    named = _paths_in(model, between)
    prompts = as_prompts(prompts)
    pairs, _ = pairs_of(model, prompts, condition, metric, direction, seed)
    rows = [
        _effects(model, pair, named, seed + i)
        for i, pair in enumerate(tqdm(pairs, desc="paths", delay=2))
    ]
    found = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    effects = xr.Dataset(
        {
            name: (("prompt", "path") if each.ndim == 2 else ("prompt",), each)
            for name, each in found.items()
        },
        {"prompt": [p.id for p in prompts], "path": [path.name for path in named]},
    )
    about = about_of(model, prompts, condition, metric, direction, seed) | {"method": "patched"}
    return Patching(effects, units_of(prompts), about)


def _paths_in(model: HookedModel, between: Any) -> list[Path]:
    """The named paths, each checked."""
    layers, own = attention_layers(model), kv_heads_of(model)
    made, counts = [], {"q": int(model.cfg.n_heads), "k": own, "v": own}
    for one in between if isinstance(between, (list, tuple)) else ():
        both = one if isinstance(one, (list, tuple)) and len(one) == 2 else ("", "")
        start, (receiver, _, part) = head_named(both[0]), str(both[1]).partition(".")
        end = head_named(receiver)
        if start is None or (both[1] != "logits" and (end is None or part not in counts)):
            raise OptionError(
                f'{one!r} is not a path: give such as ("L0H1", "L1H0.k"), with q, k, v, or "logits"'
            )
        for where, count in ((start, counts["q"]), (end, counts.get(part, 0))):
            if where is not None and (where[0] not in layers or where[1] >= count):
                raise OptionError(
                    f"{one!r}: {model.cfg.model_name} has heads 0 to {count - 1} there, in layers "
                    f"{', '.join(map(str, layers))}"
                )
        if end is not None and end[0] <= start[0]:
            raise OptionError(
                f"{one!r}: nothing passes from layer {start[0]} to layer {end[0]}; name a later layer"
            )
        made.append(Path(start, end, part or None, f"{both[0]} → {both[1]}"))  # type: ignore[arg-type]
    if not made:
        raise OptionError(
            f'between={between!r}: give paths such as [("L0H1", "L1H0.k"), ("L1H0", "logits")]'
        )
    return made


def _effects(
    model: HookedModel, pair: Pair, named: Sequence[Path], seed: int
) -> dict[str, np.ndarray]:
    """The effect of each path, that of a random step of its sender, and the whole effect."""
    layers = attention_layers(model)
    own, other = (
        read(model, one, layers, "z", pair.origins) for one in (pair.receiver, pair.donor)
    )
    own = restartable(model, own, (path.receiver[0] for path in named if path.receiver))
    base = (other if pair.denoising else own).logits
    before = float(pair.measure(own.logits, base))
    generator = torch.Generator().manual_seed(seed)
    here, there = (places_of(one, pair.origins) for one in (pair.receiver, pair.donor))
    given: dict[str, dict[Where, Output]] = {"effect": {}, "random": {}}
    for layer, head in dict.fromkeys(path.sender for path in named):
        mine, theirs = own.z[layer][here, head], other.z[layer][there, head]
        drawn = torch.randn(mine.shape, generator=generator, dtype=torch.float64).to(mine)
        step = (theirs - mine).norm(dim=-1, keepdim=True) * drawn / drawn.norm(dim=-1, keepdim=True)
        given["effect"][layer, head], given["random"][layer, head] = theirs, mine + step
    made = {
        name: _patched(model, pair, named, own, each, base) - before for name, each in given.items()
    }
    return made | {"whole": np.array(float(pair.measure(other.logits, base)) - before)}


def _patched(
    model: HookedModel,
    pair: Pair,
    named: Sequence[Path],
    own: Run,
    given: Mapping[Where, Output],
    base: Tensor,
) -> np.ndarray:
    """The metric with each path patched: one row of two passes for each."""
    here = places_of(pair.receiver, pair.origins)
    seen: dict[tuple[str, int], Tensor] = {}

    def frozen(layer: int, z: Tensor) -> Tensor:
        z = own.z[layer].expand_as(z).clone()
        for row, path in enumerate(named):
            if path.sender[0] == layer:
                z[row, here.to(z.device), path.sender[1]] = given[path.sender].to(z)
        return z

    def keep(part: str, layer: int, x: Tensor) -> Tensor:
        seen[part, layer] = x.detach()
        return x

    with ExitStack() as stack:
        stack.enter_context(
            changing(model, "z", {layer: partial(frozen, layer) for layer in own.z})
        )
        for part in {path.part for path in named if path.part}:
            layers = {path.receiver[0] for path in named if path.receiver and path.part == part}
            stack.enter_context(
                changing(model, part, {layer: partial(keep, part, layer) for layer in layers})
            )
        made = (
            pair.measure(logits_of(model, pair.receiver, len(named)), base).double().cpu().numpy()
        )
    everywhere = torch.arange(len(pair.receiver))
    for part in {path.part for path in named if path.part}:
        ends = {
            row: path.receiver
            for row, path in enumerate(named)
            if path.receiver and path.part == part
        }
        put = [[(to, everywhere, seen[part, to[0]][row, :, to[1]])] for row, to in ends.items()]
        made[list(ends)] = (
            pair.measure(patched_logits(model, own, put, part), base).double().cpu().numpy()
        )
    return made
