"""The command ``mechattn run``: check a config file, then run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mechattn.axes import BASELINE
from mechattn.commands.from_config import (
    ANALYSES,
    build_analyses,
    build_conditions,
    checked_options,
    known_kind,
)
from mechattn.engine.run import RunOptions
from mechattn.errors import OptionError
from mechattn.jobs.executors import executor_named
from mechattn.jobs.job import Job
from mechattn.jobs.resumable_run import WHOLE, Shard, compute, parse_shard, shard_place
from mechattn.model.checkpoint import layers_and_heads, tokenizer_named
from mechattn.model.hooked import HookedModel
from mechattn.pages.page import results_page
from mechattn.pages.sections import HeadChoice
from mechattn.prompts.datasets import load_prompts
from mechattn.prompts.prompt import Prompt, Template
from mechattn.render.figure_declaration import FIGURES as DECLARED
from mechattn.render.figure_declaration import check_heads
from mechattn.render.html_views import check_page_place
from mechattn.results.provenance import command_of, file_names
from mechattn.stats.intervals import FEWEST
from mechattn.store.writing import check_result_or_place, check_result_place
from mechattn.toml_sections import Config, Figure, read_sections

TemplateWord = Literal["auto", "plain", "chat", "joined"]
FIGURES: dict[str, Callable] = {
    name: declared.draw for name, declared in DECLARED.items() if declared.draws_results
}


def run_from_config(
    path: Path,
    words: Sequence[str] = (),
    *,
    shard: str | None = None,
    executor: str | None = None,
    address: str | None = None,
    workers: int | None = None,
    values: str | None = None,
    fresh: bool = False,
    force: bool = False,
    system: str | None = None,
    template: TemplateWord | None = None,
) -> list[Path | str]:
    """Run a config file, or one part of its chunks.

    Args:
        path: The TOML file.
        words: The words of the command line, which the page repeats.
        shard: Which part, such as "3/16"; all by default.
        executor: Where chunks are computed, in place of what the file says.
        address: The address of a cluster, in place of the file's.
        workers: The number of workers in it, in place of the file's.
        values: How single prompts' values are stored, in place of what the file says.
        fresh: Whether stored results and chunks are ignored.
        force: Whether a page that mechattn did not write is replaced.
        system: The text before each question, in place of the file's.
        template: The template of the prompts, in place of the file's.

    Returns:
        What was written: results, then the page.
    """
    config = with_prompt_options(read_config(path), system, template)
    if values is not None:
        config = config.model_copy(update={"values": values})
    command = command_of(words, config.paths) if words else ""
    number_and_count = parse_shard(shard)
    chosen_executor = executor_named(
        executor or config.executor,
        address or config.address,
        workers or config.workers,
    )

    figures = _page_figures(config)
    places, prompts = prepared(config, force, shard=number_and_count, used=not fresh)

    written: list[Path | str] = []
    results = []
    for model, place in places.items():
        job = _job(config, model, prompts[model], figures, command)
        result, is_new = compute(job, place, number_and_count, chosen_executor, fresh)
        results.append(result)
        if is_new:
            result_path = shard_place(place, number_and_count)
            is_remote = "://" in str(result_path)
            written.append(result_path if is_remote else Path(result_path))

    if config.output.page and number_and_count == WHOLE:
        further_figures = figures
        if config.figures is None:
            # By default there is a figure for each condition, and that of the first leads the page.
            further_figures = figures[1:]
        drawings = [(FIGURES[figure.kind], figure.options) for figure in further_figures]
        page = results_page(
            results,
            config.output.page,
            drawings,
            command,
            force=force,
            choice=head_choice(config),
        )
        written.append(page)

    return written


def head_choice(config: Config) -> HeadChoice:
    """Which heads the lines show that lead the page of a config."""
    heads = config.output.heads
    if isinstance(heads, int):
        heads = [heads]
    return HeadChoice(config.output.layer, heads, config.output.top)


def prepared(
    config: Config,
    force: bool,
    *,
    shard: Shard = WHOLE,
    used: bool = False,
    chooses_heads: bool = False,
) -> tuple[dict[str, str], dict[str, list[Prompt]]]:
    """Each model's place for its result, and its prompts, after all checks that need no model.

    Args:
        config: The config.
        force: Whether a page that mechattn did not write is replaced.
        shard: The number of a shard, and how many there are.
        used: Whether a result that is stored there may be used, so that nothing is written.
        chooses_heads: Whether heads are chosen by the data, beyond those of the config's figures.

    Returns:
        The place of each model's result, and the prompts of each, by the model's name.

    Raises:
        MechattnError: The config names no place, a place cannot be written to, a layer or head does
            not exist, or there are too few prompts for a page.
    """
    if not config.output.result:
        raise OptionError(
            'the config names no place for the result: add a section [output] with result = "…"'
        )

    figures = _page_figures(config)
    places = places_of(config, config.output.result)
    if config.output.page is not None:
        check_page_place(config.output.page, force)
    for place in places.values():
        stored_at = shard_place(place, shard)
        if used:
            check_result_or_place(stored_at)
        else:
            check_result_place(stored_at)
    for model in config.models:
        check_in_model(model, config.layers, figures)

    prompts = prompts_by_model(config)
    first_model = config.models[0]
    count = len(prompts[first_model])  # every model has the same
    needed = FEWEST
    reason = "it shows intervals"
    if chooses_heads or any(map(_chooses_heads, figures)):
        needed = 2 * FEWEST
        reason = "the heads are chosen on one half and shown on the other"
    if figures and count < needed:
        raise OptionError(
            f"a page needs at least {needed} prompts, since {reason}; there are only {count}"
        )
    return places, prompts


def places_of(config: Config, pattern: str) -> dict[str, str]:
    """Each model's file, with its name in place of "{model}"."""
    names = file_names(config.models)
    return {model: pattern.replace("{model}", name) for model, name in names.items()}


def prompts_by_model(config: Config) -> dict[str, list[Prompt]]:
    """The prompts of a config as each model reads them: in its chat template, where it has one."""
    options = config.prompts.model_dump()
    word = options.pop("template")
    prompts = load_prompts(**options)  # once, as a file may be large and a data set far away
    by_model = {}
    for model in config.models:
        template = template_of(model, word)
        by_model[model] = [replace(prompt, template=template) for prompt in prompts]

    return by_model


def template_of(model: str, word: TemplateWord) -> Template:
    """The template of a model's prompts; "auto" is its chat template, or "plain" where it has none.

    Raises:
        OptionError: The chat template is asked for, and the tokenizer has none.
    """
    if word in ("plain", "joined"):
        return word

    tokenizer = tokenizer_named(model)
    if getattr(tokenizer, "chat_template", None):
        return "chat"
    if word == "chat":
        raise OptionError(
            f"the tokenizer of {model} has no chat template; give --no-chat-template, or "
            'template = "plain"'
        )
    return "plain"


def with_prompt_options(
    config: Config, system: str | None, template: TemplateWord | None
) -> Config:
    """A config whose prompts have another text before the question, or another template."""
    options = {"system": system, "template": template}
    given_options = {name: value for name, value in options.items() if value is not None}

    prompts = config.prompts.model_copy(update=given_options)
    return config.model_copy(update={"prompts": prompts})


def _job(
    config: Config, model: str, prompts: Sequence[Prompt], figures: Sequence[Figure], command: str
) -> Job:
    """The job that a config describes for one of its models."""
    keep: Literal["prompts", "moments"] = "moments"
    if any(map(_chooses_heads, figures)):
        keep = "prompts"  # heads are chosen on some of them and shown on others

    conditions = build_conditions(config.conditions, partial(tokenizer_named, model))
    analyses = build_analyses(config.analyses)
    return Job(
        model,
        prompts,
        conditions,
        analyses,
        RunOptions(config.layers, config.seed, keep, config.memory, config.engine),
        dtype=config.dtype,
        device=config.device,
        verify=config.verify,
        chunk=config.chunk,
        threads=config.threads,
        require=partial(_check_figures_of_model, figures),
        command=command,
        paths=config.paths,
        values=config.values,
    )


def _page_figures(config: Config) -> list[Figure]:
    """The figures of the page; without [[figures]] received attention under each condition."""
    output = config.output
    if output.page is None:
        return []
    if config.figures is not None:
        return config.figures

    layer = output.layer
    if layer is None:
        measured_layers = config.layers or [0]
        layer = measured_layers[0]
    section: dict[str, Any] = {"kind": "received_attention", "layer": layer}
    if output.heads is None:
        section["top"] = output.top
    else:
        section["heads"] = output.heads

    conditions = list(build_conditions(config.conditions)) or [BASELINE]
    return [Figure.model_validate(section | {"condition": name}) for name in conditions]


def check_in_model(name: str, layers: Sequence[int] | None, figures: Sequence[Figure]) -> None:
    """Check before loading that layers and heads exist, as far as the model's config says."""
    size = layers_and_heads(name)
    if size is None:
        return

    layer_count, head_count = size
    layers_to_check = list(layers or [])
    for figure in figures:
        layers_to_check += _layers_of(figure)

    for layer in layers_to_check:
        if not 0 <= layer < layer_count:
            raise OptionError(
                f"layer {layer} is out of range: {name} has layers 0 to {layer_count - 1}"
            )

    measured_layers = list(layers or range(layer_count))
    for figure in figures:
        _check_layers_and_heads(figure, measured_layers, head_count)


def _check_figures_of_model(
    figures: Sequence[Figure], model: HookedModel, layers: list[int]
) -> None:
    """Check, now that the model is loaded, that its figures' layers and heads are measured."""
    head_count = model.cfg.n_heads
    for figure in figures:
        _check_layers_and_heads(figure, layers, head_count)


def _check_layers_and_heads(figure: Figure, layers: list[int], head_count: int) -> None:
    """Check that the layers and heads of a figure exist and are measured."""
    for layer in _layers_of(figure):
        if layer not in layers:
            raise OptionError(
                f"{figure.kind} shows layer = {layer}, which is not among those measured, {layers}"
            )

    heads = shown_options(figure).get("heads")
    if isinstance(heads, int):
        heads = [heads]
    if heads is not None:
        check_heads(heads, head_count)


def _layers_of(figure: Figure) -> list[int]:
    """The layers that a figure shows, if it shows single ones."""
    layer = shown_options(figure).get("layer")
    if layer is None:
        return []
    if isinstance(layer, list):
        return layer
    return [layer]


def _chooses_heads(figure: Figure) -> bool:
    """Whether the heads of a figure are chosen by the data."""
    if figure.options.get("top") is not None:
        return True

    lists_heads = figure.options.get("heads") is not None
    return DECLARED[figure.kind].chooses_heads and not lists_heads


def read_config(path: str | Path) -> Config:
    """Read a TOML file, with its conditions, analyses and figures checked.

    Raises:
        OptionError: Something in it is unknown or does not fit; the message names the file.
    """
    config = read_sections(path)
    try:
        build_conditions(config.conditions)
        build_analyses(config.analyses)
        _check_figures(config)
        file_names(config.models)
    except RecursionError:
        raise OptionError(f"{path} is nested too deeply") from None
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from None

    if len(config.models) > 1:
        needs = f'{path}: {len(config.models)} models need "{{model}}" in'
        if config.output.result and "{model}" not in config.output.result:
            raise OptionError(f"{needs} output.result, to give each its own result")
        if config.evaluation and "{model}" not in config.evaluation.out:
            raise OptionError(f"{needs} evaluation.out, to give each its own file")
    return config


def shown_options(figure: Figure, where: str = "figures") -> dict[str, Any]:
    """The options of a figure, including defaults."""
    draw = known_kind(FIGURES, figure.kind, where)
    return checked_options(draw, figure.options, where)


def _check_figures(config: Config) -> None:
    """Check that each figure is known, gets valid options, and shows conditions and analyses."""
    conditions = list(build_conditions(config.conditions))
    analyses = {section.kind for section in config.analyses}
    for index, figure in enumerate(config.figures or []):
        where = f"figures[{index}]"
        options = shown_options(figure, where)
        shown_conditions = [options.get("condition"), *(options.get("conditions") or [])]
        for name in shown_conditions:
            if name and name not in (*conditions, BASELINE):
                raise OptionError(
                    f"{where}: there is no condition {name!r}; the conditions are "
                    f"{', '.join(conditions)}"
                )

        needed = _analyses_for(figure, options, where)
        if not analyses.intersection(needed):
            raise OptionError(
                f"{where}: {figure.kind} shows {needed[0]}, which is not among the analyses"
            )


def _analyses_for(figure: Figure, options: Mapping[str, Any], where: str) -> list[str]:
    """The analyses of which a figure needs one."""
    declared = DECLARED[figure.kind]
    instances = {kind: analysis_class() for kind, analysis_class in ANALYSES.items()}
    if declared.needs:
        dataset = declared.analysis(options)
        return [kind for kind, analysis in instances.items() if analysis.name == dataset]

    kinds = []
    for kind, analysis in instances.items():
        quantities = {name.removesuffix("_by_segment") for name in analysis.quantities}
        if options["quantity"] in quantities:
            kinds.append(kind)
    if not kinds:
        raise OptionError(f"{where}.quantity = {options['quantity']!r}: no analysis measures it")
    return kinds
