"""How much the baseline differs from itself: the same answers in batches of another size, and in another dtype."""

from __future__ import annotations

import copy
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import torch

from mechattn.axes import BASELINE
from mechattn.errors import OptionError
from mechattn.evaluation.evaluate import evaluate
from mechattn.evaluation.evaluation import Evaluation
from mechattn.evaluation.generate import native_of
from mechattn.model.load import as_hooked, load_model
from mechattn.prompts.prompt import Prompt, as_prompts

if TYPE_CHECKING:
    import pandas as pd


def baseline_noise(
    model: Any,
    prompts: Prompt | str | Seq[Prompt | str],
    *,
    batch: int = 32,
    other_batch: int = 8,
    other_dtype: str | None = None,
    **options: Any,
) -> pd.DataFrame:
    """Answer the same problems three times, and compare the second and the third with the first.

    Rounding differs with the size of the batch and with the dtype, and an answer turns on it now and then. An effect
    that is no larger than this is none.

    Args:
        model: As for ``evaluate``. For the other dtype a copy of its parameters is held for a while.
        prompts: Prompts with a ``solution``.
        batch: Sequences at a time, the first time.
        other_batch: Sequences at a time, the second time.
        other_dtype: Of the third time; by default bfloat16, and float32 for a model in less.
        options: Of ``evaluate``, such as ``new_tokens``.

    Returns:
        A row for each repetition: accuracy, difference with Newcombe's interval, mid-p McNemar, and ``texts``, the
        share of answers whose text is another.

    Raises:
        OptionError: The second time would be the first again.
    """
    import pandas as pd

    if taken := sorted({"out", "conditions", "server"} & set(options)):
        raise OptionError(f"{taken[0]}=… has no place here: the baseline alone is answered, here, anew each time")
    model, prompts = load_model(as_hooked(model)), as_prompts(prompts)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    other_dtype = other_dtype or ("bfloat16" if dtype == "float32" else "float32")
    if batch == other_batch or dtype == other_dtype:
        same = f"batch={batch}" if batch == other_batch else f"dtype {dtype}"
        raise OptionError(f"{same} both times shows no noise; choose another")
    known = getattr(torch, other_dtype, None)
    if not isinstance(known, torch.dtype) or not known.is_floating_point:
        raise OptionError(f"other_dtype={other_dtype!r}: give the name of a dtype, such as 'bfloat16'")
    first = evaluate(model, prompts, batch=batch, **options)
    rows = [{"repetition": f"{dtype}, batch {batch}", **_row(first, first)}]
    second = evaluate(model, prompts, batch=other_batch, **options)
    rows.append({"repetition": f"{dtype}, batch {other_batch}", **_row(second, first)})
    twin = copy.deepcopy(native_of(model)).to(known)
    third = evaluate(load_model(twin, tokenizer=model.tokenizer, verify=False), prompts, batch=batch, **options)
    rows.append({"repetition": f"{other_dtype}, batch {batch}", **_row(third, first)})
    return pd.DataFrame(rows)


def _row(again: Evaluation, first: Evaluation) -> dict[str, float]:
    compared = again.compare(BASELINE, other=first)
    texts = [a.text != b.text for a, b in zip(again.answers, first.answers, strict=True)]
    shown = {name: compared[name] for name in ("difference", "low", "high", "p", "n")}
    return {"accuracy": float(again.right(BASELINE).mean()), **shown, "texts": sum(texts) / len(texts)}
