"""The command ``mechattn figures``: a page on attention with and without inserted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mechattn.analysis.analysis import Analysis
from mechattn.analysis.attention_budget import AttentionBudget
from mechattn.analysis.received_attention import AttentionMap, ReceivedAttention
from mechattn.commands.from_config import build_conditions
from mechattn.commands.run_config import (
    checked_figures,
    checked_prompts,
    head_choice,
    locations_of,
    output_of,
)
from mechattn.engine.run import run
from mechattn.errors import plain, say
from mechattn.model.checkpoint import tokenizer_named
from mechattn.model.hooked import HookedModel
from mechattn.model.load import check_device, dtype_named, load_model
from mechattn.pages.first_screen import ShownModel
from mechattn.pages.page import PLACES, About, write_page
from mechattn.pages.sections import lead_sections, prompt_section
from mechattn.prompts.conditions import Condition, MeaninglessTokens, RandomSentence
from mechattn.prompts.prompt import Prompt
from mechattn.render.html_views import check_page_place
from mechattn.results.provenance import name_of
from mechattn.results.result import Result
from mechattn.store.writing import check_result_location
from mechattn.toml_sections import Config

# The number of tokens inserted into the prompt whose patterns are drawn: with more, single cells of
# the pattern could not be seen.
FEW_TOKENS = 16
# How the subtitle names each template.
TEMPLATES = {
    "chat": "in the model's chat template",
    "plain": "as plain text",
    "joined": "as joined text",
}


def make_figures(config: Config, command: str = "", force: bool = False) -> Path:
    """Run the models of a config, and write their page.

    The config has one condition, ``MeaninglessTokens``. A random sentence of equal length is added
    as its control.

    Args:
        config: The models, prompts, condition and output.
        command: The command line, which the page repeats.
        force: Whether a page that mechattn did not write is replaced.

    Returns:
        The path of the page.

    Raises:
        MechattnError: An option cannot be used with a model or its prompts. The error is raised
            before any model is loaded if the model's config says enough.
    """
    dtype = dtype_named(config.dtype)
    check_device(config.device)

    (condition,) = build_conditions(config.conditions).values()
    output = output_of(config)
    # The command line always gives this condition and a page.
    assert isinstance(condition, MeaninglessTokens)
    assert output.page is not None

    check_page_place(output.page, force)
    locations = locations_of(config, output.result)
    for location in locations.values():
        check_result_location(location)
    prompts = checked_prompts(
        config, tokenizer_named, checked_figures(config, output), chooses_heads=True
    )

    measurements = []
    for name, location in locations.items():
        count = len(prompts[name])
        say(f"{name}: {count} prompts with and without {condition.count} inserted tokens.")
        hooked = load_model(name, dtype=dtype, device=config.device)
        measurements.append(_measure(hooked, prompts[name], condition, config.seed, location))
        del hooked  # frees its memory for the next model

    choice = head_choice(output)
    models = []
    sections = []
    for measurement in measurements:
        head = choice.named_head(measurement.result)
        models.append(ShownModel(measurement.result, measurement.patterns, head))
        sections += lead_sections(measurement.result, choice)
    sections += [prompt_section(measurement.result) for measurement in measurements]

    title = f"What {_inserted_words(measurements)} do to attention"
    subtitle = _subtitle(config, measurements, prompts)
    about = About(title, subtitle, command)
    return write_page(Path(output.page), about, models, sections, force)


@dataclass(frozen=True)
class _Measurement:
    """What was measured in one model."""

    result: Result  # of all prompts
    patterns: Result  # of a short prompt
    condition: MeaninglessTokens  # with the number of tokens that the tokenizer can make


def _measure(
    hooked: HookedModel,
    prompts: Sequence[Prompt],
    condition: MeaninglessTokens,
    seed: int,
    location: str,
) -> _Measurement:
    """Run a model on all prompts and store the result; measure the patterns of the shortest."""
    fitted_condition = condition.fitted(hooked)
    if fitted_condition.count != condition.count:  # some tokenizers split each "/" in two
        say(
            f"the tokenizer of {hooked.cfg.model_name} cannot make {condition.count} tokens of "
            f"{condition.text!r}; {fitted_condition.count} are inserted"
        )

    name = _condition_name(condition)
    control = RandomSentence(count=fitted_condition.count, place=condition.place)
    conditions: dict[str, Condition] = {name: fitted_condition, "sentence": control}
    analyses: list[Analysis] = [ReceivedAttention(), AttentionBudget()]
    result = run(hooked, prompts, conditions, analyses, seed=seed, keep="prompts")
    result.save(location)

    shortest = min(prompts, key=lambda prompt: len(prompt.question))
    few_count = min(FEW_TOKENS, condition.count)
    short_condition = replace(condition, count=few_count).fitted(hooked)
    patterns = run(hooked, shortest, {name: short_condition}, [AttentionMap()], seed=seed)
    return _Measurement(result, patterns, fitted_condition)


def _inserted_words(measurements: Sequence[_Measurement]) -> str:
    """The inserted tokens, such as "55 “/”", or "55 or 56 “/”" if the counts of models differ."""
    counts = sorted({measurement.condition.count for measurement in measurements})
    count_words = " or ".join(str(count) for count in counts)
    text = plain(measurements[0].condition.text)
    return f"{count_words} “{text}”"


def _subtitle(
    config: Config, measurements: Sequence[_Measurement], prompts: dict[str, list[Prompt]]
) -> str:
    """What was inserted and where, and which prompts the models read."""
    condition = measurements[0].condition
    first_prompts = [model_prompts[0] for model_prompts in prompts.values()]
    templates = dict.fromkeys(TEMPLATES[prompt.template] for prompt in first_prompts)
    system = first_prompts[0].system
    system_words = f"after “{plain(system)}”" if system else "without a system prompt"
    count = len(next(iter(prompts.values())))  # every model has the same
    return (
        f"{_inserted_words(measurements)} ({_condition_name(condition)}), or the same number of"
        f" tokens of random sentences (sentence), {PLACES[condition.place]}. {count} prompts of "
        f"{name_of(config.prompts.source)}, {' or '.join(templates)}, {system_words}."
    )


def _condition_name(condition: MeaninglessTokens) -> str:
    """The name of the condition in figures."""
    if condition.text == "/":
        return "slash"
    return "meaningless"
