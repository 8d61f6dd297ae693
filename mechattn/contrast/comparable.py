"""Whether two conditions can be compared prompt by prompt."""

from __future__ import annotations

import numpy as np

from mechattn.axes import BASELINE
from mechattn.contrast.question import Question
from mechattn.errors import OptionError


def check_alike(contrast: Question) -> None:
    """Require the same prompts, and the same number of inserted tokens in each unless the baseline
    is compared.
    """
    result = contrast.result
    reference = contrast.reference
    # Parts of a result say by themselves whether their prompts are alike.
    prompts = {**result.provenance["prompts"], "alike": None}
    reference_prompts = {**reference.provenance["prompts"], "alike": None}
    if prompts != reference_prompts:
        raise OptionError(
            "the two results are of different prompts, and a paired comparison needs the same"
            " ones: run both with the same load_prompts"
        )
    if result is reference and contrast.condition == contrast.to:
        raise OptionError(
            f"{contrast.condition!r} is compared with itself: name another condition to compare it"
            " with"
        )
    if not contrast.matched or BASELINE in (contrast.condition, contrast.to):
        return

    counts = []
    for side, condition in contrast.sides:
        if condition not in side.conditions:
            return  # refused later, in its own words
        is_inserted = side["sequences"].origin.sel(condition=condition) == -1
        counts.append(is_inserted.sum("pos").values)
    count, reference_count = counts
    if not count.any() or not reference_count.any():
        return
    differing = np.flatnonzero(count != reference_count)
    if len(differing):
        prompt = differing[0]
        raise OptionError(
            f"{contrast.condition!r} inserts {count[prompt]} tokens, {contrast.to!r}"
            f" {reference_count[prompt]}, so their difference would be one of length too. Give both"
            " the same count, or say matched=False"
        )
