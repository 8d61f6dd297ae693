"""One pass over prompts × conditions, many analyses: everything is checked first, then the model runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from torch import Tensor

from mechattn.analysis.analysis import Analysis
from mechattn.engine.collect import Positions
from mechattn.engine.forward import Engine
from mechattn.engine.prepare import planned
from mechattn.errors import OptionError
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.results.result import Result


def run(
    model: Any,
    prompts: Prompt | str | Tensor | Seq[Prompt | str],
    conditions: Mapping[str, Condition] | None = None,
    analyses: Seq[Analysis] | Analysis | None = None,
    *,
    layers: Iterable[int] | int | None = None,
    seed: int = 0,
    positions: Positions = "moments",
    memory: str = "2GiB",
    engine: Engine = "auto",
    progress: bool = True,
    places: Seq[int] | None = None,
    paths: bool = False,
) -> Result:
    """Measure attention on every prompt under every condition, the baseline always among them.

    Args:
        model: A hooked model, or anything that ``load_model`` takes.
        prompts: What ``load_prompts`` gives, a text, a list of texts, or token ids [batch pos].
        conditions: Names and conditions; "baseline" is added.
        analyses: What to measure; received attention by default. All share one forward pass.
        layers: Layers to look at, from 0; all that have attention by default.
        seed: Decides every random draw, together with the prompt's id.
        positions: "moments" keeps mean, variance and n over prompts for each position; "prompts" each prompt's own too.
        memory: The budget for one layer of one batch; the batches follow from it and the lengths.
        engine: "streaming" computes attention in blocks of query rows and stores no [query, key] matrix; "hooks"
            reduces each layer's pattern as TransformerLens shows it; "auto" streams where that gives the model's
            own numbers.
        progress: Show a bar when the run takes longer than two seconds.
        places: Where these prompts are a part of a larger set: the index of each in that set, by which results of its
            parts are put in order when they are merged.
        paths: Say in the provenance where a checkpoint's directory lies, and not its name alone.

    Returns:
        A result with one dataset an analysis, and "sequences": the tokens that the model read.

    Raises:
        MechattnError: Something given cannot be used; found before the first forward pass, but for a model whose
            attention turns out to be none (NaN, a wrong mask), which is found at the first batch that shows it.
    """
    plan = planned(
        model,
        conditions,
        analyses,
        layers=layers,
        seed=seed,
        positions=positions,
        memory=memory,
        engine=engine,
        paths=paths,
    )
    prompts = as_prompts(prompts)
    places = _checked_places(places, len(prompts))
    sequences = plan.sequences(prompts)
    return plan.ready(prompts).measured(prompts, sequences, places, progress=progress)


def _checked_places(places: Seq[int] | None, prompts: int) -> Seq[int]:
    """The places of the prompts in a larger set; in this one by default."""
    if places is None:
        return range(prompts)
    if len(places) != prompts or list(places) != sorted({int(place) for place in places}) or min(places) < 0:
        raise OptionError(f"places: give each of the {prompts} prompts its index in the whole set, in rising order")
    return places
