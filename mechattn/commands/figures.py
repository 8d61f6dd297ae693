"""The command ``mechattn figures``: measures models and writes a page of figures."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mechattn.analysis.analysis import Analysis
from mechattn.analysis.attention_focus import AttentionFocus
from mechattn.analysis.attention_map import AttentionMap
from mechattn.analysis.received_attention import ReceivedAttention
from mechattn.commands import config as configs
from mechattn.commands.run_config import check_enough, check_in_model
from mechattn.engine.run import run
from mechattn.model.hooked import HookedModel
from mechattn.model.hooks import chosen_layers
from mechattn.model.load import check_device, dtype_named, load_model, model_place
from mechattn.pages.figure_sections import Section, drawn_section, prompt_section, view_section
from mechattn.pages.page import write_page
from mechattn.prompts.conditions import Condition, MeaninglessTokens, RandomSentence
from mechattn.prompts.datasets import load_prompts
from mechattn.prompts.prompt import Prompt
from mechattn.render.html import check_page_place
from mechattn.render.patterns import attention_pattern, pattern_difference, received_text
from mechattn.render.received_figures import check_heads, received_attention
from mechattn.render.theme import model_caption
from mechattn.results.provenance import name_of
from mechattn.results.result import Result
from mechattn.shown import plain
from mechattn.store.atomic_writes import say
from mechattn.store.saving import check_result_place

VIEW_TOKENS = 16
WHERE = {
    "before_question": "before the question",
    "start": "at the start",
    "middle": "in the middle of the question",
    "after_question": "after the question",
    "before_answer": "before the answer",
    "random": "at a random place in the question",
}
READ_TEXT = (
    "Each token is coloured by the average attention that it receives from the original tokens after it; both texts "
    "share one scale. Hover over a token for its number."
)


def make_figures(
    out: Path,
    models: Seq[str],
    source: str,
    limit: int,
    layer: int,
    heads: Seq[int],
    *,
    inserted: MeaninglessTokens | None = None,
    field: str = "question",
    system: str | None = None,
    answer_field: str | None = None,
    seed: int = 0,
    dtype: str = "auto",
    device: str | None = None,
    command: str = "",
    force: bool = False,
    takes: str = "",
) -> Path:
    """Write ``out/index.html`` with two panels of the paper's redistribution figure and an attention map per model."""
    dtype_named(dtype)
    check_device(device)
    page, inserted = Path(out) / "index.html", inserted or MeaninglessTokens()
    check_page_place(page, force)
    places = {name: Path(out) / f"{file}.zarr" for name, file in configs.file_names(models).items()}
    for name, place in places.items():
        model_place(name)
        check_result_place(place)
    answers: dict[str, Any] = {"answer_field": answer_field, "with_answer": True} if answer_field else {}
    prompts = load_prompts(source, limit=limit, field=field, system=system, seed=seed, **answers)
    check_enough(len(prompts), by_half=True)
    shown = configs.Figure.model_validate({"kind": "received_attention", "layer": layer, "heads": list(heads)})
    for name in models:
        check_in_model(name, [layer], [shown])
    if takes:
        say(f"{', '.join(models)}: {len(prompts)} prompts with and without {inserted.count} inserted tokens; {takes}.")
    looked: list[_Looked] = []
    for name, place in places.items():
        hooked = load_model(name, dtype=dtype_named(dtype), device=device)
        chosen_layers(hooked, layer)
        check_heads(heads, hooked.cfg.n_heads)
        looked.append(_looked_at(hooked, prompts, inserted, place, layer, heads, seed, command))
    return write_page(
        page,
        "mechattn: attention under meaningless tokens",
        _subtitle(looked, inserted, len(prompts), source),
        [one.result for one in looked],
        [section for one in looked for section in one.sections],
        command,
        force,
        maps=[one.maps for one in looked],
        start=[(layer, int(heads[0]))] * len(looked),
    )


@dataclass(frozen=True)
class _Looked:
    """What is shown for one model: its result, the maps of a short prompt, figures, the number of inserted tokens."""

    result: Result
    maps: Result
    sections: list[Section]
    count: int


def _looked_at(
    hooked: HookedModel,
    prompts: Seq[Prompt],
    inserted: MeaninglessTokens,
    place: Path,
    layer: int,
    heads: Seq[int],
    seed: int,
    command: str,
) -> _Looked:
    """Run one model on all prompts, and on the shortest one for its maps; store the result immediately."""
    fitted = _fitted(inserted, hooked)
    analyses: list[Analysis] = [ReceivedAttention(), AttentionFocus()]
    result = run(hooked, prompts, _conditions(fitted), analyses, seed=seed, positions="prompts")
    result.save(place)
    one = min(prompts, key=lambda prompt: len(prompt.question))
    maps, views = _of_one(hooked, result, one, fitted, layer, heads, seed)
    return _Looked(result, maps, [*_of_all(result, layer, heads, command), *views], fitted.count)


def _subtitle(looked: Seq[_Looked], inserted: MeaninglessTokens, prompts: int, source: str) -> str:
    """The subtitle of the page."""
    tokens = " or ".join(map(str, sorted({one.count for one in looked})))
    slash = f"{tokens} tokens of “{plain(inserted.text)}” ({_name(inserted)})"
    what = f"{slash}, or as many tokens of random sentences (sentence), are inserted {WHERE[inserted.place]}"
    return f"Attention when {what}, for {prompts} prompts of {name_of(source)}."


def _fitted(inserted: MeaninglessTokens, hooked: HookedModel) -> MeaninglessTokens:
    """The requested number of tokens, or the nearest that the tokenizer can make: some split each "/" in two."""
    fitted = inserted.fitted(hooked)
    if fitted.count != inserted.count:
        say(
            f"the tokenizer of {hooked.cfg.model_name} cannot make {inserted.count} tokens of {inserted.text!r}; "
            f"{fitted.count} are inserted"
        )
    return fitted


def _conditions(inserted: MeaninglessTokens) -> dict[str, Condition]:
    """Meaningless tokens, and their matched control: a random sentence with the same number of tokens."""
    sentence = RandomSentence(count=inserted.count, place=inserted.place)
    return {_name(inserted): inserted, "sentence": sentence}


def _name(inserted: MeaninglessTokens) -> str:
    return "slash" if inserted.text == "/" else "meaningless"


def _of_all(result: Result, layer: int, heads: Seq[int], command: str) -> list[Section]:
    """The figures over all prompts of one model."""
    options: list[dict[str, Any]] = [
        {"choose": min(3, int(result.provenance["model"]["heads"]))},
        {"heads": list(heads)},
    ]
    drawn = [drawn_section(received_attention, result, {"layer": layer} | some, command) for some in options]
    text = received_text(result, layer, heads)
    name = model_caption(result)
    title = f"{name}: attention received in the first prompt"
    return [prompt_section(result), *drawn, view_section(text, title, READ_TEXT)]


def _of_one(
    hooked: HookedModel,
    result: Result,
    prompt: Prompt,
    inserted: MeaninglessTokens,
    layer: int,
    heads: Seq[int],
    seed: int,
) -> tuple[Result, list[Section]]:
    """One prompt's attention in every layer, with few enough inserted tokens that single cells are visible."""
    few = replace(inserted, count=min(VIEW_TOKENS, inserted.count)).fitted(hooked)
    name, what = model_caption(result), f"{few.count} “{plain(few.text)}”"
    one = run(hooked, prompt, {_name(few): few}, [AttentionMap()], seed=seed, progress=False)
    note = f"The shortest prompt with {what}, so that single cells are visible. Click a head to enlarge it."
    map_of_one = attention_pattern(one, layer, heads, _name(few))
    difference = pattern_difference(one, layer, heads)
    what_differs = "The same prompt: attention between original tokens, with minus without the inserted tokens."
    return one, [
        view_section(map_of_one, f"{name}: one prompt's attention, {what}", note),
        view_section(difference, f"{name}: how {what} change one prompt's attention", what_differs),
    ]
