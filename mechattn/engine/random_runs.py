"""The same run on the same architecture with random weights, several times: a null of the model."""

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
    """What ``run`` gives on several draws of random weights, for ``result.compare(…, random=…)``.

    One model is drawn at a time, beside the one given; each costs what the run costs.

    Args:
        model: What ``run`` takes; its weights are read for "shuffled", its configuration and tokenizer for both.
        prompts: As in the run that is compared.
        conditions: As there.
        analyses: As there.
        draws: How many random models, 3 at least. With 3 draws of 4 layers × 8 heads a head is one of 97.
        kind: "initialised" or "shuffled"; see ``random_weights``.
        seed: As in the run that is compared, which it draws the conditions with; draw i has the weights of seed + i.
        **options: What ``run`` takes besides, such as ``layers``.

    Raises:
        OptionError: Fewer than 3 draws, or no such kind.
        MechattnError: The model cannot be drawn anew, or what ``run`` raises.

    Source:
        arXiv:2512.18792.
    """
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < FEWEST_DRAWS:
        raise OptionError(
            f"draws={draws!r}: give a whole number of random models, {FEWEST_DRAWS} at least, as their spread is what "
            "heads are compared with"
        )
    check_draw(kind, seed)
    model = as_hooked(model)
    return [
        run(random_weights(model, kind, seed + i), prompts, conditions, analyses, seed=seed, **options)
        for i in range(draws)
    ]
