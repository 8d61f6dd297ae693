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

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mechattn.axes import SEGMENTS
from mechattn.errors import OptionError
from mechattn.model.hooked import alone
from mechattn.patching.answer_metrics import Metric
from mechattn.patching.controls import (
    aligned_output,
    aligned_pattern,
    partners_of,
    random_steps,
    shuffled_patterns,
)
from mechattn.patching.effects import CHECKED_PROMPTS, CONTROLS, Control, Patching, checked_sample
from mechattn.patching.pairs import Direction, Pair, PatchingRequest, request_of
from mechattn.patching.patched_runs import LayerHead, Part, possible_starts
from mechattn.patching.plan import PairRuns, PatchingPlan, Replacements
from mechattn.patching.sites import Sites, target_in
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
    ``Σ ∂metric/∂z · (z_other − z)``, with three forward passes and one backward pass per prompt
    (and one forward pass for the other prompt), and eight are also patched. The logits depend only
    on the residual stream after the last layer, so its effect is the whole effect.

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
            all heads or layers, such as "z", "pattern" or "resid_post"; or :class:`Sites`, which
            names a part, heads or layers, and segments or positions.
        together: Patch all of ``at`` as one set. Heads that compensate for each other, or that are
            only right as a sum, may have no effect alone but one together.
        metric: "logprob" of the reference answer, in nats; "logit_diff", its logit minus that of
            the other answer, the default where every prompt has one; "logit_margin" of its tokens
            over the best others; "kl" from the baseline, in nats; or a function of logits [row
            answer d_vocab] and answer [answer] that returns one number per row [row].
        direction: "noising" or "denoising", which decides the run to patch; one default for
            ``patch``, ``edges`` and ``paths``.
        controls: "other_prompt", "random", both, or () for neither.
        memory: The memory that a prompt's runs and its patched copies may take; as many copies go
            together as fit.
        seed: The seed of random directions and other prompts, of the condition's draws and of the
            heads to check.

    Raises:
        MechattnError: A prompt has no answer, or the model cannot read it; a head or layer doesn't
            exist; a condition hides tokens or acts inside the model; or gradients are needed for
            quantised weights or for "kl" with "noising", where all are 0. Raised before the first
            forward pass.

    Source:
        Attribution patching: Nanda 2023; its errors and AtP*: arXiv:2403.00745. As z comes after
        the softmax, no softmax has to be recomputed.
    """
    request = request_of(model, prompts, condition, metric, direction, memory, seed)
    _check_controls(controls, request)
    target = target_in(request.model, at, together)
    if target.attributed:
        request.check_gradients()

    pairs = request.pairs
    if target.by == "segment":
        target = replace(target, token_groups=_common_segments(pairs))
    elif target.by == "position":
        target = replace(target, token_groups=_changed_positions(pairs))

    cells = target.cells
    plan = PatchingPlan(request, target, cells, _replacements, controls=controls)
    if "other_prompt" in controls:
        plan = replace(plan, partners=partners_of(pairs, seed))
    if not target.attributed:
        layers = [cell.first_layer for cell in cells]
        starts = possible_starts(request.model, request.shortest, layers)
        plan = replace(plan, starts=starts)

    patching = request.run_patching(
        plan.batches(pairs),
        plan.effects,
        {"cell": range(len(cells))},
        method="attributed (first order)" if target.attributed else "patched",
        part=target.part,
        heads=list(target.heads),
    )
    effects = target.by_dimension(patching.effects.drop_vars("before"))
    patching = replace(patching, effects=effects)
    if target.attributed:
        return _beside_exact(patching, plan)
    return patching


def _check_controls(controls: Sequence[Control], request: PatchingRequest) -> None:
    """Refuse controls that don't exist, and a metric that lacks the one that it is tested against."""
    if not isinstance(controls, (tuple, list)) or not set(controls) <= set(CONTROLS):
        raise OptionError(
            f'controls={controls!r}: give ("other_prompt", "random"), one of them, such as'
            ' ("random",), or () for none'
        )
    cannot_fall = request.metric == "kl" and request.direction == "noising"
    if cannot_fall and "random" not in controls:
        raise OptionError(
            'metric="kl" cannot fall with direction="noising", so effects are tested against the '
            'random control: give controls=("random",)'
        )


def _beside_exact(patching: Patching, plan: PatchingPlan) -> Patching:
    """Attributed effects with those of a sample of cells, patched exactly in a few prompts."""
    sample = checked_sample(patching, plan.request.seed)
    exact_plan = replace(
        plan,
        target=replace(plan.target, attributed=False),
        cells=[plan.cells[index] for index in sample],
        partners={},
        controls=(),
    )
    exact = []
    for pair in plan.request.pairs[:CHECKED_PROMPTS]:
        effects_by_id = exact_plan.effects([pair])
        exact.append(np.asarray(effects_by_id[pair.id]["effect"]))
    return patching.with_exact(exact, sample)


def _common_segments(pairs: Sequence[Pair]) -> list[int]:
    """The segments that every prompt has, by their numbers in ``SEGMENTS``."""
    in_all = []
    for number in range(len(SEGMENTS)):
        if all((pair.baseline.segment == number).any() for pair in pairs):
            in_all.append(number)
    return in_all


def _changed_positions(pairs: Sequence[Pair]) -> list[int]:
    """The positions at which some prompt's versions may differ.

    Up to the first token that differs both runs compute the same, so that an effect there is 0 by
    construction: nothing to measure or to test.

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
    first_differences = [_first_difference(pair) for pair in pairs]
    return list(range(min(first_differences), lengths[0]))


def _first_difference(pair: Pair) -> int:
    """The first position at which the runs' tokens differ, or one has a token that the other
    lacks."""
    shorter = min(len(pair.base), len(pair.source))
    differs = pair.base.tokens[:shorter] != pair.source.tokens[:shorter]
    if not differs.any():
        return shorter
    return int(differs.nonzero()[0])


def _replacements(plan: PatchingPlan, runs: PairRuns) -> Replacements:
    """What is put in place of each head's output, for the effect and each control."""
    heads = plan.target.heads
    is_pattern = plan.target.part == "pattern"
    aligned = aligned_pattern if is_pattern else aligned_output
    values = {where: aligned(runs.base, runs.source, where) for where in heads}
    replacements = {"effect": values}
    if runs.partner is not None:
        values_of_partner = {where: aligned(runs.base, runs.partner, where) for where in heads}
        replacements["other_prompt"] = values_of_partner

    if "random" in plan.controls:
        seed = plan.request.seed
        if is_pattern:
            model = plan.request.model
            drawn = shuffled_patterns(model, seed, runs.pair.id, runs.base, values)
        else:
            drawn = random_steps(seed, runs.pair.id, runs.base, values)
        replacements["random"] = drawn
    return replacements
