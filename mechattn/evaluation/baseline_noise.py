"""The noise of the baseline: how answers change with batch size and dtype."""

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
from mechattn.model.lock import alone
from mechattn.prompts.prompt import Prompt, as_prompts

if TYPE_CHECKING:
    import pandas as pd


@alone
def baseline_noise(
    model: Any,
    prompts: Prompt | str | Seq[Prompt | str],
    *,
    batch: int = 32,
    other_batch: int = 8,
    other_dtype: str | None = None,
    **options: Any,
) -> pd.DataFrame:
    """Measure how much baseline answers change with the batch size and with the dtype.

    The same problems are answered three times; the second and third runs are compared with the first. Rounding depends
    on batch size and dtype, and occasionally changes an answer. An effect no larger than this noise is not evidence of
    anything.

    Args:
        model: As for ``evaluate``. For the other dtype a copy of its parameters is held temporarily.
        prompts: Prompts with a ``solution``.
        batch: The batch size of the first run.
        other_batch: The batch size of the second run.
        other_dtype: The dtype of the third run; by default bfloat16, or float32 for a model of lower precision.
        options: Options of ``evaluate``, such as ``new_tokens``.

    Returns:
        One row per repetition: accuracy, difference with Newcombe's interval, mid-p McNemar, and ``texts``, the share
        of answers with a different text.

    Raises:
        OptionError: A repetition has the same batch size or dtype as the first run.
    """
    import pandas as pd

    if taken := sorted({"out", "conditions", "server"} & set(options)):
        raise OptionError(f"{taken[0]}=… cannot be given: only the baseline is answered, again in each repetition")
    model, prompts = load_model(as_hooked(model)), as_prompts(prompts)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    other_dtype = other_dtype or ("bfloat16" if dtype == "float32" else "float32")
    if batch == other_batch or dtype == other_dtype:
        same = f"batch={batch}" if batch == other_batch else f"dtype {dtype}"
        raise OptionError(f"{same} in both runs shows no noise; choose another value")
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
