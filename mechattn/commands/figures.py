"""The command ``mechattn figures``: measures models and writes a page of figures."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mechattn.analysis.analysis import Analysis
from mechattn.analysis.attention_focus import AttentionFocus
from mechattn.analysis.received_attention import AttentionMap, ReceivedAttention
from mechattn.commands.config_file import Config
from mechattn.commands.run_config import prepared
from mechattn.engine.run import run
from mechattn.jobs.kinds import made_conditions
from mechattn.model.hooked import HookedModel
from mechattn.model.hooks import chosen_layers
from mechattn.model.load import check_device, dtype_named, load_model
from mechattn.pages.first_screen import ShownModel
from mechattn.pages.page import About, Section, drawn_section, prompt_section, view_section, write_page
from mechattn.prompts.conditions import Condition, MeaninglessTokens, RandomSentence
from mechattn.prompts.prompt import Prompt
from mechattn.render.attention_figures import received_attention
from mechattn.render.declared import check_heads
from mechattn.render.views import pattern, received_text
from mechattn.render.words import model_caption
from mechattn.results.provenance import name_of
from mechattn.results.result import Result
from mechattn.shown import plain
from mechattn.store.atomic_writes import say

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


def make_figures(config: Config, command: str = "", force: bool = False, takes: str = "") -> Path:
    """Write a page with two panels of the paper's redistribution figure and an attention map per model.

    The config has one condition, ``MeaninglessTokens``, and ``output.heads``; a control of equal length is added.
    """
    dtype = dtype_named(config.dtype)
    check_device(config.device)
    (inserted,) = made_conditions(config.conditions).values()
    assert isinstance(inserted, MeaninglessTokens)
    places, prompts = prepared(config, force, by_half=True)
    if takes:
        names = ", ".join(config.models)
        say(f"{names}: {len(prompts)} prompts with and without {inserted.count} inserted tokens; {takes}.")
    looked: list[_Looked] = []
    for name, place in places.items():
        hooked = load_model(name, dtype=dtype, device=config.device)
        chosen_layers(hooked, config.output.layer)
        check_heads(_heads(config), hooked.cfg.n_heads)
        looked.append(_looked_at(hooked, config, prompts, inserted, Path(place), command))
    subtitle = _subtitle(looked, inserted, len(prompts), config.prompts.source)
    about = About("mechattn: attention under meaningless tokens", subtitle, command)
    each = [ShownModel(one.result, one.maps) for one in looked]
    page = Path(str(config.output.page))
    return write_page(page, about, each, [section for one in looked for section in one.sections], force)


def _heads(config: Config) -> list[int]:
    heads = config.output.heads
    return heads if isinstance(heads, list) else [int(heads or 0)]


@dataclass(frozen=True)
class _Looked:
    """What is shown for one model: its result, the maps of a short prompt, figures, the number of inserted tokens."""

    result: Result
    maps: Result
    sections: list[Section]
    count: int


def _looked_at(
    hooked: HookedModel, config: Config, prompts: Seq[Prompt], inserted: MeaninglessTokens, place: Path, command: str
) -> _Looked:
    """Run one model on all prompts, and on the shortest one for its maps; store the result immediately."""
    fitted = inserted.fitted(hooked)  # some tokenizers split each "/" in two
    if fitted.count != inserted.count:
        say(
            f"the tokenizer of {hooked.cfg.model_name} cannot make {inserted.count} tokens of {inserted.text!r}; "
            f"{fitted.count} are inserted"
        )
    sentence = RandomSentence(count=fitted.count, place=fitted.place)  # the matched control
    conditions: dict[str, Condition] = {_name(fitted): fitted, "sentence": sentence}
    analyses: list[Analysis] = [ReceivedAttention(), AttentionFocus()]
    result = run(hooked, prompts, conditions, analyses, seed=config.seed, positions="prompts")
    result.save(place)
    layer, heads = config.output.layer or 0, _heads(config)
    one = min(prompts, key=lambda prompt: len(prompt.question))
    maps, views = _of_one(hooked, result, one, fitted, layer, heads, config.seed)
    return _Looked(result, maps, [*_of_all(result, layer, heads, command), *views], fitted.count)


def _subtitle(looked: Seq[_Looked], inserted: MeaninglessTokens, prompts: int, source: str) -> str:
    """The subtitle of the page."""
    tokens = " or ".join(map(str, sorted({one.count for one in looked})))
    slash = f"{tokens} tokens of “{plain(inserted.text)}” ({_name(inserted)})"
    what = f"{slash}, or as many tokens of random sentences (sentence), are inserted {WHERE[inserted.place]}"
    return f"Attention when {what}, for {prompts} prompts of {name_of(source)}."


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
    one = run(hooked, prompt, {_name(few): few}, [AttentionMap()], seed=seed)
    note = f"The shortest prompt with {what}, so that single cells are visible. Click a head to enlarge it."
    map_of_one = pattern(one, layer, heads, _name(few))
    difference = pattern(one, layer, heads, difference=True)
    what_differs = "The same prompt: attention between original tokens, with minus without the inserted tokens."
    return one, [
        view_section(map_of_one, f"{name}: one prompt's attention, {what}", note),
        view_section(difference, f"{name}: how {what} change one prompt's attention", what_differs),
    ]
