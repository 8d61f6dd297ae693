"""Activation patching: which heads, layers and segments carry the effect of a condition.

Each prompt is read twice: once as it is, the *baseline* run, and once under a condition that
inserts tokens or exchanges some (``Counterpart``). As in the literature on causal abstraction, the
*base* is the run that is patched, and the *source* is the run from which an activation is taken.
The usual names *clean* (the baseline) and *corrupted* (the run under the condition) do not say
which run is patched: in noising it is the clean run, and in denoising the corrupted run.

- *denoising*: the base is the run under the condition, and the source is the baseline. An effect
  says that this activation of the baseline is sufficient to restore (part of) its answer.
- *noising*: the base is the baseline, and the source is the run under the condition. An effect
  says that the baseline's answer needs this activation.

The two differ if one activation is sufficient but another can replace it. So one direction says
little about the other.

A patch takes one activation, such as a head's output ``z`` at the original tokens, from the source
and puts it into the base's forward pass; everything after it is computed again::

    effect = metric(base with the source's activation) − metric(base)
    whole  = metric(source) − metric(base)

An effect as large as the whole says that all of the difference passes through this activation. The
effects of two activations do not add up, since one may read what the other writes.

The two runs may differ in length, so tokens are aligned by their origin: activations are exchanged
at the original tokens that both runs have. Each effect comes with two controls, which put in
another prompt's activation or a random step of equal norm at the same place.

*Attribution* replaces the patch by its first-order estimate, the gradient of the metric times the
difference of activations, which takes one backward pass for all heads. Where attention is saturated
the gradient is nearly 0 although the effect is not. So eight heads are also patched exactly.

``paths.py`` patches what one head passes to another, ``edges.py`` attributes every edge of a model,
and ``circuit.py`` measures how much of the effect a set of edges carries alone. Only ``patch`` has
a choice of method: paths are always patched exactly, and edges, which are too many for that, are
always attributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from mechattn.axes import SEGMENTS
from mechattn.errors import OptionError, check_choice
from mechattn.model.hooked import alone
from mechattn.patching.answer_metrics import Metric, first_difference
from mechattn.patching.controls import (
    after_random_steps,
    aligned_output,
    aligned_pattern,
    partners_of,
    shuffled_patterns,
)
from mechattn.patching.effects import (
    CHECKED_PROMPTS,
    CONTROLS,
    Control,
    Method,
    Patching,
    checked_sample,
    only_rises,
)
from mechattn.patching.pairs import Direction, Pair, request_of
from mechattn.patching.patched_runs import LayerHead, Part, possible_starts
from mechattn.patching.plan import PairRuns, PatchingPlan, Replacements
from mechattn.patching.sites import Sites, sites_of, target_in
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt
from mechattn.results.result import MEMORY


@alone
def patch(
    model: Any,
    prompts: Prompt | str | Sequence[Prompt | str],
    condition: Condition,
    *,
    at: Sites | Part | Sequence[LayerHead | str] = "z",
    method: Method = "exact",
    together: bool = False,
    metric: Metric | None = None,
    direction: Direction = "noising",
    controls: Sequence[Control] = CONTROLS,
    memory: str = MEMORY,
    seed: int = 0,
) -> Patching:
    """Measure how the answer changes when the output of a head or layer is replaced by that of the
    prompt's other run.

    - "noising" patches the baseline: a part's activation at each original token is replaced by its
      activation at the same token in the run under the condition.
    - "denoising" patches the run under the condition with activations of the baseline.

    ``effect = metric(patched) − metric(unpatched)``, and the whole effect is
    ``metric(the other run) − metric(unpatched)``. The logits depend only on the residual stream
    after the last layer. So patching that stream has the whole effect, unless an inserted token
    predicts the answer.

    By default each cell, such as a head, is patched exactly. This takes one row of a forward pass
    for each cell of each prompt, and as many for each control: for all heads with both controls,
    ``3 · heads · prompts`` rows. With ``method="attribution"``, which is the fast estimate, each
    head's effect is estimated to first order, ``Σ ∂metric/∂z · (z_other − z)``. Whatever the number
    of heads, this takes three forward passes and one backward pass per prompt, and one forward pass
    for the control "other_prompt". The estimate may rank heads wrongly, so eight cells are also
    patched exactly, in four prompts.

    Each cell has two controls:

    - "random": a step of equal norm in a random direction. For a pattern, the probabilities of each
      query are permuted among its visible keys instead.
    - "other_prompt": the activation in the run of another prompt, drawn among those that are at
      least as long, and if possible have another answer. Tokens with which both prompts begin are
      aligned with each other, and all later tokens from the end, where the answer is. It is NaN for
      a prompt that is longer than all others.

    Args:
        model: A hooked model, or anything that ``load_model`` accepts.
        prompts: Prompts with an answer that the model reads, as
            ``load_prompts(…, with_answer=True)`` returns them.
        condition: The condition to compare with the baseline.
        at: What to patch: heads as (layer, head), counted from 0, or as "L0H2"; a part of all heads
            or layers, such as "z", "pattern" or "resid_post"; or :class:`Sites`, which names a
            part, heads or layers, and segments or positions.
        method: "exact" patches each cell. "attribution" estimates effects to first order, for the
            part "z" and without ``together``.
        together: Patch all of ``at`` as one set. Heads that compensate for each other may have no
            effect alone but an effect together.
        metric: "logprob", the log-probability of the reference answer, in nats; "logit_diff", its
            logit minus that of the other answer; "logit_margin", the logit of its tokens minus the
            largest other logit; "kl", the divergence from the baseline, in nats; or a function of
            logits [row answer d_vocab] and answer [answer] that returns one number per row [row].
            The default is "logit_diff" if every prompt has another answer, and "logprob" otherwise.
        direction: "noising" or "denoising".
        controls: "other_prompt", "random", both, or () for neither.
        memory: The memory that a prompt's runs and its patched copies may take. As many copies
            share a pass as fit.
        seed: The seed of random directions and other prompts, of the condition's draws and of the
            heads to check.

    Returns:
        Effects by layer and head, by layer, or of the set, and by segment or position if ``at``
        says so; each with its controls.

    Raises:
        MechattnError: A prompt has no answer, or the model cannot read it; a head or layer doesn't
            exist; the condition hides tokens or acts inside the model; or the method is
            "attribution" but the part is not "z", ``together`` is set, the weights are quantised,
            or the metric is "kl" with "noising", so that all gradients are 0. It is raised before
            anything is patched.
        OptionError: The metric is a function that does not return one finite number per row, or
            that has no gradient although heads are attributed.

    Source:
        Attribution patching: Nanda 2023; its errors and AtP*: arXiv:2403.00745. Since z comes after
        the softmax, the softmax does not have to be recomputed.
    """
    _check_controls(controls, metric, direction)
    sites = sites_of(at)
    _check_method(method, sites, together)
    request = request_of(model, prompts, condition, metric, direction, memory, seed)
    target = target_in(request.model, sites, together)
    if method == "attribution":
        request.check_gradients()

    pairs = request.pairs
    if target.by == "segment":
        target = replace(target, token_groups=_common_segments(pairs))
    elif target.by == "position":
        target = replace(target, token_groups=_changed_positions(pairs))

    cells = target.cells
    partners = {}
    if "other_prompt" in controls:
        partners = partners_of(pairs, seed)
    starts = []
    if method == "exact":
        first_layers = [cell.first_layer for cell in cells]
        starts = possible_starts(request.model, request.shortest, first_layers)
    plan = PatchingPlan(
        request,
        target,
        cells,
        replacements=_replacements,
        method=method,
        controls=controls,
        starts=starts,
        partners=partners,
    )

    effects_by_cell = request.run_patching(
        map(plan.effects, plan.batches(pairs)),
        {"cell": range(len(cells))},
        method=method,
        part=target.part,
        heads=list(target.heads),
    )
    effects = target.by_dimension(effects_by_cell.effects.drop_vars("base_metric"))
    patching = replace(effects_by_cell, effects=effects)
    if method == "attribution":
        return _with_exact_sample(patching, plan)
    return patching


def _check_controls(
    controls: Sequence[Control], metric: Metric | None, direction: Direction
) -> None:
    """Refuse controls that don't exist, or that lack the one that effects are tested against."""
    if not isinstance(controls, (tuple, list)) or not all(name in CONTROLS for name in controls):
        raise OptionError(
            f'controls={controls!r}: give a tuple, ("other_prompt", "random"), one of them, such as'
            ' ("random",), or () for none'
        )
    if only_rises(metric, direction) and "random" not in controls:
        raise OptionError(
            'metric="kl" cannot fall with direction="noising", so effects are tested against the '
            'random control: give controls=("random",)'
        )


def _check_method(method: Method, sites: Sites, together: bool) -> None:
    """Refuse a method that doesn't exist, and attribution of what has no first-order estimate."""
    check_choice(Method, method=method)
    if not isinstance(together, bool):
        raise OptionError(f"together={together!r}: give True or False, and name the set in at=…")
    if method == "attribution" and (sites.part != "z" or together):
        raise OptionError(
            f'method="attribution" estimates the effect of each head\'s "z" alone, but at=… names '
            f"{sites.part!r} with together={together}: leave method out to patch this exactly"
        )


def _common_segments(pairs: Sequence[Pair]) -> list[int]:
    """The indices in ``SEGMENTS`` of the segments that every prompt has."""
    common = set(range(len(SEGMENTS)))
    for pair in pairs:
        common &= set(pair.baseline.segment.tolist())
    return sorted(common)


def _changed_positions(pairs: Sequence[Pair]) -> list[int]:
    """The positions at which the two runs of some prompt may differ.

    Both runs compute the same before the first token that differs. An effect there is 0 by
    construction, so it is neither measured nor tested.

    Raises:
        OptionError: Prompts have different lengths.
    """
    longest = max(pairs, key=lambda pair: len(pair.baseline))
    lengths = [len(pair.baseline) for pair in pairs]
    if min(lengths) < max(lengths):
        raise OptionError(
            f"prompts have {min(lengths)} to {max(lengths)} tokens (prompt {longest.id} the most), "
            "so a position means another token in each: give prompts of equal length, or "
            'by="segment"'
        )
    first_differences = [first_difference(pair.base.tokens, pair.source.tokens) for pair in pairs]
    return list(range(min(first_differences), lengths[0]))


def _replacements(plan: PatchingPlan, runs: PairRuns) -> Replacements:
    """What replaces each head's output, for the effect and for each control."""
    heads = plan.target.heads
    aligned_activation = aligned_output
    random_activations = after_random_steps
    if plan.target.part == "pattern":
        aligned_activation = aligned_pattern
        random_activations = partial(shuffled_patterns, plan.request.model)

    values = {where: aligned_activation(runs.base, runs.source, where) for where in heads}
    replacements = {"effect": values}
    if runs.partner is not None:
        replacements["other_prompt"] = {
            where: aligned_activation(runs.base, runs.partner, where) for where in heads
        }
    if "random" in plan.controls:
        replacements["random"] = random_activations(
            plan.request.seed, runs.pair.id, runs.base, values
        )
    return replacements


def _with_exact_sample(patching: Patching, plan: PatchingPlan) -> Patching:
    """Add the exact effects of a sample of cells in a few prompts to attributed effects."""
    sample = checked_sample(patching, plan.request.seed)
    # The table names cells in ascending order, and lacks those that some prompt cannot have.
    cell_index = xr.Dataset({"cell_index": ("cell", range(len(plan.cells)))})
    by_dimension = plan.target.by_dimension(cell_index)
    index_of_row = by_dimension.cell_index.values[patching.measured].astype(int)
    exact_plan = replace(
        plan,
        method="exact",
        cells=[plan.cells[index] for index in index_of_row[sample]],
        controls=(),
        partners={},
    )
    exact_effects = []
    for pair in plan.request.pairs[:CHECKED_PROMPTS]:
        effects_by_id = exact_plan.effects([pair])
        exact_effects.append(np.asarray(effects_by_id[pair.id]["effect"]))
    return patching.with_exact(exact_effects, sample)
