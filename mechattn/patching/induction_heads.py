"""Induction heads: which heads attend to the token after an earlier occurrence of the current
token, and how much copying needs each head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd
import torch
import xarray as xr

from mechattn.analysis.attention_focus import AttentionFocus
from mechattn.axes import BASELINE
from mechattn.engine.run import run
from mechattn.errors import check_counts, memory_bytes
from mechattn.model.hooked import HookedModel, alone
from mechattn.model.load import load_model
from mechattn.patching.answer_metrics import Answer, Logits, Values, answer_logprob, of_answer
from mechattn.patching.effects import Patching, printed, with_ends
from mechattn.patching.pairs import Pair, PatchingRequest, PromptEffects
from mechattn.patching.patched_runs import HeadOutput, LayerHead, recorded_runs
from mechattn.patching.plan import PatchingPlan
from mechattn.patching.sites import PatchTarget, Sites, target_in
from mechattn.prompts.conditions import Baseline
from mechattn.prompts.generated import repeated_random
from mechattn.prompts.prompt import Prompt
from mechattn.results.result import MEMORY
from mechattn.stats.intervals import FEWEST, t_interval

# Further spans over which heads' outputs are averaged: their mean has less than a fifth of the
# noise of a single output.
_MEAN_OVER = 32
_SHOWN = 8  # heads that are printed


@dataclass(frozen=True, eq=False)
class InductionHeads:
    """Each head's induction score, and how much copying needs the head.

    ``print(heads)`` shows the first rows of the table.

    Args:
        needed: Effects of mean ablation: the loss of the second copy with a head's output replaced
            by its mean, minus the loss without. The whole effect is the loss of the same tokens
            without a first copy, minus their loss after one.
        scores: Induction scores [prompt layer head].
        attributed: First-order estimates of the effects in ``needed`` [prompt layer head], in nats
            per token.
        loss: The loss of the second copy [prompt], in nats per token.
    """

    needed: Patching
    scores: xr.DataArray
    attributed: xr.DataArray
    loss: xr.DataArray

    def table(self, top: int | None = None, select: Literal["half"] | None = None) -> pd.DataFrame:
        """One row for each head: its score with an interval, the first-order estimate of the effect
        of its mean ablation, and the columns of :meth:`mechattn.Patching.table` for that effect.

        Scores and estimates are means over all spans, also with ``select="half"``.

        Args:
            top: As for :meth:`mechattn.Patching.table`, whatever the sign of the effects.
            select: As for :meth:`mechattn.Patching.table`.

        Raises:
            OptionError: As for :meth:`mechattn.Patching.table`.
        """
        table = self.needed.table(top, select)
        rows = xr.Dataset({name: ("row", table[name].to_numpy()) for name in ("layer", "head")})
        score = t_interval(self.scores.sel(rows).values)
        attributed = self.attributed.sel(rows).mean("prompt")

        columns = with_ends("score", score) | {"attributed": attributed.values}
        after_head = table.columns.get_loc("head") + 1
        for position, (name, values) in enumerate(columns.items(), start=after_head):
            table.insert(position, name, values)
        return table

    @property
    def ranks(self) -> dict[str, float]:
        """Spearman's correlation over heads of the mean effect with the mean "score", and with the
        mean "attributed" estimate.

        With few prompts, noise in the small effects lowers both.
        """
        effect = self.needed.effects.effect.mean("prompt").to_series()
        ranks = {}
        for name, values in (("score", self.scores), ("attributed", self.attributed)):
            mean = values.mean("prompt").to_series()
            ranks[name] = float(effect.corr(mean, method="spearman"))
        return ranks

    def __str__(self) -> str:
        mean, low, high = self.needed.whole
        ranks = self.ranks
        table = self.table(_SHOWN)
        effect_columns = ["effect", "effect_low", "effect_high", "q_effect"]
        columns = ["layer", "head", "score", *effect_columns, "attributed", "share"]
        lines = [
            (
                f"{len(self.loss)} spans of random tokens, each read twice: the second copy's loss"
                f" is {float(self.loss.mean()):.3g} nats a token; that of the same tokens without a"
                f" first copy, minus it, is {mean:.3g} [{low:.3g}, {high:.3g}]"
            ),
            (
                "effect: the loss with the head's output replaced by its mean, minus the loss (+:"
                " copying needs the head); share: of what the first copy gains"
            ),
            (
                f"over {self.scores[0].size} heads the effect's ranks correlate"
                f" {ranks['score']:.2f} with the score's, {ranks['attributed']:.2f} with those of"
                " its first-order estimate"
            ),
            str(table.attrs["resolution"]),
            printed(table[columns]),
        ]
        return "\n".join(lines)


@alone
def induction_heads(
    model: Any, limit: int = 8, *, span: int = 16, memory: str = MEMORY, seed: int = 0
) -> InductionHeads:
    """Score every head as an induction head, and measure how much copying needs it.

    The model reads spans of random tokens, each twice. s(t) is the position of the same token in
    the first copy, z is a head's output before W_O, and the loss is the mean of −log p over the
    second copy without its first token::

        score      = mean over t in the second copy of pattern[t, s(t) + 1]
        effect     = loss(z := mean of z) − loss
        attributed = Σ_t ∂loss/∂z_t · (mean of z − z_t)

    The score says where a head attends, and the effect what the copying loses without the head.
    Neither follows from the other. A head's output is replaced at every token by its mean at that
    position over 32 other such prompts. A mean over positions would not be typical of any: heads
    that use the first tokens as a sink have different outputs there. Each head takes one row of a
    forward pass for each prompt.

    Args:
        model: A hooked model, or anything that ``load_model`` accepts.
        limit: The number of spans, at least 3. With few spans no head can be significant, and the
            print says so.
        span: The length of a span in tokens, at least 2.
        memory: The memory that the copies of a prompt may take. As many share a pass as fit.
        seed: The seed of the spans.

    Returns:
        The scores, the effects and the estimates; ``.table(top=20)``.

    Raises:
        MechattnError: There are too few spans for an interval, a span is longer than the model or
            the vocabulary allows, the weights have no gradients, or attention cannot be read. It is
            raised before the passes over heads.

    Source:
        Olsson et al. 2022, "In-context Learning and Induction Heads": prefix matching on repeated
        random tokens. Ablation by the mean: arXiv:2211.00593.
    """
    check_counts(FEWEST, limit=limit)
    check_counts(2, span=span)  # the first token of the second copy has no loss
    check_counts(0, seed=seed)
    budget = memory_bytes(memory)
    model = load_model(model)
    prompts = repeated_random(model, limit, span=(span, span), seed=seed)
    # The condition is not used, because the two sequences of each pair are made here.
    request = PatchingRequest(
        model,
        prompts,
        condition=Baseline(),
        metric=_loss,
        direction="noising",
        memory=budget,
        seed=seed,
    )
    request.check_gradients()

    focus = run(model, prompts, {}, [AttentionFocus()], memory=memory)["attention_focus"]
    scores = focus.induction_mass.sel(condition=BASELINE, segment="question", drop=True)
    scores = scores.transpose("prompt", "layer", "head")

    target = target_in(model, Sites("z"))
    other_prompts = repeated_random(model, _MEAN_OVER, span=(span, span), seed=seed + 1)
    means = _mean_outputs(model, target, other_prompts)
    cells = target.cells
    plan = PatchingPlan(request, target, cells, lambda _plan, _runs: {"effect": means})
    estimate_plan = replace(plan, method="attribution")

    def batch_effects() -> Iterator[Mapping[str, PromptEffects]]:
        for batch in plan.batches([_pair(model, prompt, span) for prompt in prompts]):
            estimates = estimate_plan.effects(batch)
            effects_by_id = {}
            for prompt_id, exact_effects in plan.effects(batch).items():
                estimate = estimates[prompt_id]["effect"]
                effects_by_id[prompt_id] = {**exact_effects, "attributed": estimate}
            yield effects_by_id

    effects_by_cell = request.run_patching(
        batch_effects(),
        {"cell": range(len(cells))},
        method="ablation",
        metric="loss of the second copy, in nats a token",
        metric_name="loss",
        direction="ablation",
    )
    effects = target.by_dimension(effects_by_cell.effects)
    needed = replace(effects_by_cell, effects=effects[["effect", "whole"]])
    return InductionHeads(needed, scores, effects.attributed, effects.base_metric)


def _pair(model: HookedModel, prompt: Prompt, span: int) -> Pair:
    """The pair of a span read twice, in which heads are ablated, and the same span read once.

    The loss is over the last copy without its first token.
    """
    tokens = prompt.tokens
    first_start = len(tokens) - 2 * span
    second_start = first_start + span
    answer = tokens[second_start + 1 :]
    both_copies = Prompt(tokens=tokens[: second_start + 1], answer_tokens=answer)
    one_copy = Prompt(tokens=(*tokens[:first_start], tokens[second_start]), answer_tokens=answer)
    base = Baseline().apply(both_copies, model)
    source = Baseline().apply(one_copy, model)
    # Heads are ablated at all tokens; nothing is taken from the other run, which is shorter.
    every_position = torch.arange(len(base))
    return Pair(prompt.id, base, source, every_position, of_answer(_loss), denoising=False)


def _mean_outputs(
    model: HookedModel, target: PatchTarget, prompts: Sequence[Prompt]
) -> dict[LayerHead, HeadOutput]:
    """Each head's output at each position, averaged over prompts of equal length."""
    means: dict[int, Any] = dict.fromkeys(target.layers, 0.0)
    for prompt in prompts:
        sequence = Baseline().apply(prompt, model)
        [recorded_run] = recorded_runs(model, [(sequence, sequence.origin)], target.layers, "z")
        for layer, z in recorded_run.activations.items():
            means[layer] = means[layer] + z / len(prompts)
    return {(layer, head): means[layer][:, head] for layer, head in target.heads}


def _loss(logits: Logits, answer: Answer) -> Values:
    """The mean of −log p over the answer's tokens, in nats."""
    return -answer_logprob(logits, answer) / len(answer)
