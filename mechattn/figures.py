"""The command ``mechattn figures``: from a model's name to a page with the figures of the first two seeds."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

from mechattn.analysis.received_attention import ReceivedAttention
from mechattn.engine.run import run
from mechattn.from_config import check_enough, file_name
from mechattn.look import pattern
from mechattn.model.hooks import chosen_layers
from mechattn.model.load import load_model, model_place
from mechattn.page import Section, figure_section, result_sections, view_section, write_page
from mechattn.prompts.conditions import MeaninglessTokens
from mechattn.prompts.datasets import load_prompts
from mechattn.render.received_attention import check_heads
from mechattn.results.result import Result
from mechattn.results.storage import check_result_place, check_writable

VIEW_TOKENS = 16


def make_figures(
    out: Path,
    models: Seq[str],
    source: str,
    limit: int,
    layer: int,
    heads: Seq[int],
    *,
    field: str = "question",
    seed: int = 0,
    command: str = "",
) -> Path:
    """For each model two panels of the paper's redistribution figure and one attention map, on ``out/index.html``.

    The first figure's three heads are chosen by the data on one half of the prompts and shown on the other; the second
    shows ``heads``, on all prompts.

    Raises:
        MechattnError: Something given cannot be used; the output folder is tried before the work.
    """
    page = Path(out) / "index.html"
    check_writable(page)
    places = {name: Path(out) / f"{file_name(name)}.zarr" for name in models}
    for name, place in places.items():
        model_place(name)
        check_result_place(place)
    prompts = load_prompts(source, limit=limit, field=field, seed=seed)
    check_enough(len(prompts), 3)
    results: list[Result] = []
    sections: list[Section] = []
    for name, place in places.items():
        hooked = load_model(name)
        chosen_layers(hooked, layer)
        check_heads(heads, hooked.cfg.n_heads)
        slash = MeaninglessTokens("/", count=55)
        result = run(hooked, prompts, {"slash": slash}, [ReceivedAttention()], seed=seed, positions="prompts")
        result.save(place)
        results.append(result)
        made = result_sections(result, layer, min(3, hooked.cfg.n_heads))
        made.append(figure_section(result, layer, heads))
        short = MeaninglessTokens("/", count=VIEW_TOKENS)
        shortest = min(prompts, key=lambda prompt: len(prompt.question))
        view = pattern(hooked, shortest, layer, heads, short, seed=seed)
        note = f"The shortest of the prompts with {VIEW_TOKENS} inserted tokens. Click a head to enlarge it."
        made.append(view_section(view, f"{name}: the attention of one prompt", note))
        first = replace(made[0], title=f"{name}: one prompt as the model reads it", contents=name)
        sections += [first, *(replace(section, contents="") for section in made[1:])]
    subtitle = f"What happens to attention when 55 “/” are put before the question: {len(prompts)} prompts of {source}."
    return write_page(page, "mechattn: attention under meaningless tokens", subtitle, results, sections, command)
