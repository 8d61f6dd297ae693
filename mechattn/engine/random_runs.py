"""Repeats a run with random weights of the same architecture, as a null for the model."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from torch import Tensor

from mechattn.analysis.analysis import Analysis
from mechattn.engine.run import run
from mechattn.errors import OptionError
from mechattn.model.load import as_hooked
from mechattn.model.random_weights import Kind, check_draw, random_weights
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt
from mechattn.results.result import Result
from mechattn.stats.random_draws import FEWEST_DRAWS


def run_random(
    model: Any,
    prompts: Prompt | str | Tensor | Seq[Prompt | str],
    conditions: Mapping[str, Condition] | None = None,
    analyses: Seq[Analysis] | Analysis | None = None,
    *,
    draws: int = 3,
    kind: Kind = "initialised",
    seed: int = 0,
    **options: Any,
) -> list[Result]:
    """Repeat ``run`` on several models with random weights, for ``result.compare(…, random=…)``.

    One random model is held at a time, in addition to the given one; each run costs as much as the original run.

    Args:
        model: As for ``run``; "shuffled" uses its weights, and both kinds use its configuration and tokenizer.
        prompts: As in the original run.
        conditions: As in the original run.
        analyses: As in the original run.
        draws: The number of random models, at least 3. With 3 draws of 4 layers × 8 heads, a head is one of 97.
        kind: "initialised" or "shuffled"; see ``random_weights``.
        seed: As in the original run, for the conditions' draws; draw i has the weights of seed + i.
        **options: Other options of ``run``, such as ``layers``.

    Raises:
        OptionError: There are fewer than 3 draws, or there is no such kind.
        MechattnError: The model's weights cannot be redrawn, or ``run`` raises an error.

    Source:
        arXiv:2512.18792.
    """
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < FEWEST_DRAWS:
        raise OptionError(
            f"draws={draws!r}: give a whole number of random models, at least {FEWEST_DRAWS}; heads are compared with "
            f"their spread"
        )
    check_draw(kind, seed)
    model = as_hooked(model)
    return [
        run(random_weights(model, kind, seed + i), prompts, conditions, analyses, seed=seed, **options)
        for i in range(draws)
    ]
