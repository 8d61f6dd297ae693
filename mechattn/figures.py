"""The command ``mechattn figures``: from a model's name to a page with the figures of the first two seeds."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from mechattn import config as configs
from mechattn.analysis.attention_map import AttentionMap
from mechattn.analysis.received_attention import ReceivedAttention
from mechattn.engine.run import run
from mechattn.from_config import check_enough, check_in_model
from mechattn.model.hooks import chosen_layers
from mechattn.model.load import load_model, model_place
from mechattn.page import Section, drawn_section, prompt_section, view_section, write_page
from mechattn.prompts.conditions import Condition, MeaninglessTokens, RandomSentence
from mechattn.prompts.datasets import load_prompts
from mechattn.prompts.prompt import Prompt
from mechattn.render.html import check_page_place
from mechattn.render.patterns import attention_pattern, pattern_difference, received_text
from mechattn.render.received_attention import check_heads, received_attention
from mechattn.render.theme import model_caption
from mechattn.results.provenance import name_of
from mechattn.results.result import Result
from mechattn.results.storage import check_result_place
from mechattn.results.whole import say

COUNT, VIEW_TOKENS = 55, 16
READ_TEXT = (
    "Each token is coloured by the attention that it receives on average from the original tokens after it; both texts "
    "have one scale. Hover for the number."
)


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
    force: bool = False,
) -> Path:
    """For each model two panels of the paper's redistribution figure and one attention map, on ``out/index.html``.

    The first figure's three heads are chosen by the data on one half of the prompts and shown on the other; the second
    shows ``heads``, on all prompts. ``force`` replaces an ``index.html`` that mechattn did not write.

    Raises:
        MechattnError: Something given cannot be used; the output folder is tried before the work.
    """
    page = Path(out) / "index.html"
    check_page_place(page, force)
    places = {name: Path(out) / f"{file}.zarr" for name, file in configs.file_names(models).items()}
    for name, place in places.items():
        model_place(name)
        check_result_place(place)
    prompts = load_prompts(source, limit=limit, field=field, seed=seed)
    check_enough(len(prompts), 3)
    shown = configs.Figure.model_validate({"kind": "received_attention", "layer": layer, "heads": list(heads)})
    for name in models:
        check_in_model(name, [layer], [shown])
    results: list[Result] = []
    sections: list[Section] = []
    counts: list[int] = []
    for name, place in places.items():
        hooked = load_model(name)
        chosen_layers(hooked, layer)
        check_heads(heads, hooked.cfg.n_heads)
        slash = _fitted(COUNT, hooked)
        counts.append(slash.count)
        result = run(hooked, prompts, _conditions(slash), [ReceivedAttention()], seed=seed, positions="prompts")
        result.save(place)
        results.append(result)
        sections += _sections(hooked, result, prompts, layer, heads, seed, command)
    of = f"{len(prompts)} prompts of {name_of(source)}"
    tokens = " or ".join(map(str, sorted(set(counts))))
    subtitle = f"What happens to attention when {tokens} tokens of “/” are put before the question: {of}."
    return write_page(page, "mechattn: attention under meaningless tokens", subtitle, results, sections, command, force)


def _fitted(count: int, hooked: Any) -> MeaninglessTokens:
    """So many tokens of "/", or as near as the tokenizer comes: some make two tokens of each."""
    slash = MeaninglessTokens("/", count=count).fitted(hooked)
    if slash.count != count:
        say(f'the tokenizer of {hooked.cfg.model_name} can\'t make {count} tokens of "/": {slash.count} are inserted')
    return slash


def _conditions(slash: MeaninglessTokens) -> dict[str, Condition]:
    """Meaningless tokens, and their matched control: a random sentence of as many tokens."""
    return {"slash": slash, "sentence": RandomSentence(count=slash.count)}


def _sections(
    hooked: Any, result: Result, prompts: Seq[Prompt], layer: int, heads: Seq[int], seed: int, command: str
) -> list[Section]:
    """The sections of one model."""
    name = model_caption(result)
    sections = [prompt_section(result, contents=name)]
    for chosen in (min(3, hooked.cfg.n_heads), list(heads)):
        sections.append(drawn_section(received_attention, result, {"layer": layer, "heads": chosen}, command))
    text = received_text(result, layer, heads)
    sections.append(view_section(text, f"{name}: where the attention of the first prompt goes", READ_TEXT))
    short = {"slash": MeaninglessTokens("/", count=VIEW_TOKENS).fitted(hooked)}
    shortest = min(prompts, key=lambda prompt: len(prompt.question))
    one = run(hooked, shortest, short, [AttentionMap()], layers=layer, seed=seed, progress=False)
    with_them = f"with {VIEW_TOKENS} “/”, so that the cells can be seen"
    note = f"The shortest of the prompts {with_them}. Click a head to enlarge it."
    title = f"{name}: one prompt's attention, {VIEW_TOKENS} “/”"
    sections.append(view_section(attention_pattern(one, layer, heads, "slash"), title, note))
    difference = pattern_difference(one, layer, heads)
    note = "The same prompt: what each original token pays to each, with the inserted tokens less without them."
    return [*sections, view_section(difference, f"{name}: how {VIEW_TOKENS} “/” change one prompt's attention", note)]
