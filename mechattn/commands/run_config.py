"""The command ``mechattn run``: checks a config file, then runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
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
from mechattn.jobs.executors import executor_for
from mechattn.jobs.job import Job
from mechattn.jobs.resumable_run import (
    WHOLE,
    compute,
    parse_shard,
    shard_location,
)
from mechattn.model.checkpoint import layers_and_heads, tokenizer_named
from mechattn.model.hooked import HookedModel
from mechattn.pages.page import results_page
from mechattn.pages.sections import HeadChoice
from mechattn.prompts.datasets import load_prompts
from mechattn.prompts.prompt import Prompt, Template
from mechattn.render.figure_declaration import FIGURES, check_heads
from mechattn.render.html_views import check_page_place
from mechattn.results.provenance import command_of, file_names
from mechattn.stats.intervals import FEWEST
from mechattn.store.writing import check_result_location, check_result_or_location
from mechattn.toml_sections import Config, FigureSection, OutputSection, TemplateWord, read_sections

DRAW_FUNCTIONS: dict[str, Callable] = {
    kind: declared.draw for kind, declared in FIGURES.items() if declared.draws_results
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
    """Run a config file, or one shard of it. The page is written only for a whole run.

    The options ``executor``, ``address``, ``workers``, ``values``, ``system`` and ``template``
    replace what the file says.

    Args:
        path: The TOML file.
        words: The words of the command line, which results and the page record.
        shard: Which shard, such as "3/16"; the whole run by default.
        executor: Where chunks are computed: "local" or "ray".
        address: The address of a Ray cluster.
        workers: The number of workers in the cluster.
        values: How per-prompt values are stored: "float32" or "float16".
        fresh: Whether to recompute stored results, and discard kept chunks.
        force: Whether a page that mechattn did not write is replaced.
        system: The text before each question.
        template: The template of the prompts.

    Returns:
        The results that were computed now, then the page.

    Raises:
        MechattnError: Something in the file cannot be used, or the run was interrupted.
    """
    config = with_options(
        read_config(path),
        system=system,
        template=template,
        executor=executor,
        address=address,
        workers=workers,
        values=values,
    )
    command = command_of(words, config.paths) if words else ""
    chosen_shard = parse_shard(shard)
    chosen_executor = executor_for(config.executor, config.address, config.workers)
    output = output_of(config)
    figures = checked_figures(config, output)

    # Everything is checked that can be, before the first model is loaded.
    check_location = check_result_location if fresh else check_result_or_location
    locations = {}
    for model, location in locations_of(config, output.result).items():
        locations[model] = shard_location(location, chosen_shard)
        check_location(locations[model])
    if output.page is not None:
        check_page_place(output.page, force)
    read_tokenizer = cache(tokenizer_named)  # each is read once
    chooses_heads = page_chooses_heads(config, output)
    prompts = checked_prompts(config, read_tokenizer, figures, chooses_heads)
    # Heads are chosen on one half of the prompts and shown on the other.
    keep: Literal["prompts", "moments"] = "prompts" if chooses_heads else "moments"

    written: list[Path | str] = []
    results = []
    for model, location in locations.items():
        job = Job(
            model,
            prompts[model],
            build_conditions(config.conditions, read_tokenizer(model)),
            build_analyses(config.analyses),
            RunOptions(
                layers=config.layers,
                seed=config.seed,
                keep=keep,
                memory=config.memory,
                engine=config.engine,
            ),
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
        result, is_new = compute(job, location, chosen_shard, chosen_executor, fresh=fresh)
        results.append(result)
        if is_new:
            # A Path would make "s3:/bucket" of "s3://bucket".
            written.append(location if "://" in location else Path(location))

    if output.page is None or chosen_shard != WHOLE:
        return written
    drawings = []
    for figure in further_figures(config, output):
        drawings.append((DRAW_FUNCTIONS[figure.kind], figure.options))
    choice = head_choice(output)
    page = results_page(results, output.page, drawings, command, force=force, choice=choice)
    return [*written, page]


def output_of(config: Config) -> OutputSection:
    """The section [output] of a config, which every command but ``evaluate`` needs.

    Raises:
        OptionError: The config has no such section.
    """
    if config.output is None:
        raise OptionError(
            "the config does not say where to store the result: add a section [output] with"
            ' result = "…"'
        )
    return config.output


def head_choice(output: OutputSection) -> HeadChoice:
    """The heads of the lines that lead the page."""
    heads = None if output.heads is None else _listed(output.heads)
    return HeadChoice(output.layer, heads, output.top)


def checked_prompts(
    config: Config,
    read_tokenizer: Callable[[str], Any],
    figures: Sequence[FigureSection],
    chooses_heads: bool,
) -> dict[str, list[Prompt]]:
    """Load the prompts of each model, after checking everything about figures that needs no model.

    Args:
        config: The config.
        read_tokenizer: Reads the tokenizer of a model.
        figures: The figures that are checked; none without a page.
        chooses_heads: Whether the data choose the heads that are shown.

    Returns:
        The prompts of each model, by its name.

    Raises:
        MechattnError: A layer or head does not exist, the prompts cannot be loaded, or there are
            too few for a page.
    """
    for model in config.models:
        check_in_model(model, config.layers, figures)

    prompts = prompts_by_model(config, read_tokenizer)
    count = len(prompts[config.models[0]])  # every model has the same
    fewest = FEWEST
    reason = "it shows intervals"
    if chooses_heads:
        fewest = 2 * FEWEST
        reason = "heads are chosen on one half of them and shown on the other"
    if figures and count < fewest:
        raise OptionError(
            f"a page needs at least {fewest} prompts, since {reason}; there are only {count}"
        )
    return prompts


def locations_of(config: Config, pattern: str) -> dict[str, str]:
    """The output of each model: the pattern, with the model's name in place of "{model}".

    Raises:
        OptionError: There are several models, and the pattern has no "{model}".
    """
    if len(config.models) > 1 and "{model}" not in pattern:
        raise OptionError(
            f'{pattern}: {len(config.models)} models need "{{model}}" in this path, to give each an'
            " output of its own"
        )
    names = file_names(config.models)
    return {model: pattern.replace("{model}", name) for model, name in names.items()}


def prompts_by_model(
    config: Config, read_tokenizer: Callable[[str], Any]
) -> dict[str, list[Prompt]]:
    """The prompts of each model, by its name, with the template that the config chooses for it.

    Args:
        config: The config.
        read_tokenizer: Reads the tokenizer of a model.

    Raises:
        MechattnError: The prompts cannot be loaded, or the config chooses a chat template that a
            tokenizer does not have.
    """
    options = config.prompts.model_dump()
    template_word = options.pop("template")
    prompts = load_prompts(**options)  # once for all models, as a dataset may be large
    prompts_of_models = {}
    for model in config.models:
        template = template_of(model, template_word, read_tokenizer)
        prompts_of_models[model] = [replace(prompt, template=template) for prompt in prompts]

    return prompts_of_models


def template_of(
    model: str, template_word: TemplateWord, read_tokenizer: Callable[[str], Any]
) -> Template:
    """The template of a model's prompts. "auto" is its chat template, or "plain" if it has none.

    Raises:
        OptionError: ``template_word`` is "chat", but the tokenizer has no chat template.
    """
    if template_word in ("plain", "joined"):
        return template_word

    if getattr(read_tokenizer(model), "chat_template", None):
        return "chat"
    if template_word == "chat":
        raise OptionError(
            f"the tokenizer of {model} has no chat template; give --no-chat-template, or "
            'template = "plain"'
        )
    return "plain"


def with_options(
    config: Config, *, system: str | None, template: TemplateWord | None, **options: Any
) -> Config:
    """A config with the options of the command line in place of those of the file.

    Args:
        config: The config of the file.
        system: The text before each question; None keeps that of the file, as for all options.
        template: The template of the prompts.
        options: Keys at the top of the file.
    """
    prompts = config.prompts.model_copy(update=without_none(system=system, template=template))
    return config.model_copy(update={**without_none(**options), "prompts": prompts})


def without_none(**options: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def checked_figures(config: Config, output: OutputSection) -> list[FigureSection]:
    """The figures whose layers and heads are checked before the run: [[figures]], and received
    attention as [output] asks for it, which leads every page. Without a page there are none."""
    if output.page is None:
        return []
    return [*received_figures(config, output), *(config.figures or [])]


def further_figures(config: Config, output: OutputSection) -> list[FigureSection]:
    """The figures after those that lead the page: [[figures]], or received attention under each
    condition but the first, whose figure leads every page."""
    if config.figures is not None:
        return config.figures
    return received_figures(config, output)[1:]


def page_chooses_heads(config: Config, output: OutputSection) -> bool:
    """Whether the data choose the heads of [[figures]] or, without them, of received attention."""
    if output.page is None:
        return False
    if config.figures is None:
        return output.heads is None
    return any(_chooses_heads(figure) for figure in config.figures)


def received_figures(config: Config, output: OutputSection) -> list[FigureSection]:
    """Received attention under each condition, with the layer and heads of [output]."""
    layer = output.layer
    if layer is None:
        measured_layers = config.layers or [0]
        layer = measured_layers[0]
    options: dict[str, Any] = {"layer": layer, "heads": output.heads}
    if output.heads is None:
        options = {"layer": layer, "top": output.top}

    figures = []
    for condition in build_conditions(config.conditions) or [BASELINE]:
        section = {"kind": "received_attention", "condition": condition, **options}
        figures.append(FigureSection.model_validate(section))
    return figures


def check_in_model(
    name: str, layers: Sequence[int] | None, figures: Sequence[FigureSection]
) -> None:
    """Check that layers and heads exist, before the model is loaded. If its config does not say how
    many it has, nothing is checked.

    Raises:
        OptionError: A layer or head does not exist, or a figure shows a layer that is not measured.
    """
    size = layers_and_heads(name)
    if size is None:
        return

    layer_count, head_count = size
    shown_layers = [layer for figure in figures for layer in _layers_of(figure)]
    for layer in [*(layers or []), *shown_layers]:
        if not 0 <= layer < layer_count:
            raise OptionError(
                f"layer {layer} is out of range: {name} has layers 0 to {layer_count - 1}"
            )

    _check_layers_and_heads(figures, list(layers or range(layer_count)), head_count)


def read_config(path: str | Path) -> Config:
    """Read a TOML file, and check its conditions, analyses and figures.

    Raises:
        OptionError: A name in it is unknown or a value is not allowed; the message names the file.
    """
    config = read_sections(path)
    try:
        conditions = build_conditions(config.conditions)
        build_analyses(config.analyses)
        _check_figures(config, list(conditions))
        file_names(config.models)  # refuses two models with one file name
    except RecursionError:
        raise OptionError(f"{path} is nested too deeply") from None
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from None

    return config


def shown_options(figure: FigureSection, where: str = "figures") -> dict[str, Any]:
    """The options of a figure, including defaults."""
    draw = known_kind(DRAW_FUNCTIONS, figure.kind, where)
    return checked_options(draw, figure.options, where)


def _chooses_heads(figure: FigureSection) -> bool:
    """Whether the data choose the heads of a figure."""
    if figure.options.get("top") is not None:
        return True

    lists_heads = figure.options.get("heads") is not None
    return FIGURES[figure.kind].chooses_heads and not lists_heads


def _listed(numbers: list[int] | int | None) -> list[int]:
    """The layers or heads of an option as a list, whether it is one number, several or None."""
    if numbers is None:
        return []
    if isinstance(numbers, int):
        return [numbers]
    return numbers


def _layers_of(figure: FigureSection) -> list[int]:
    """The layers that a figure shows; [] if it does not show single layers."""
    return _listed(shown_options(figure).get("layer"))


def _check_layers_and_heads(
    figures: Sequence[FigureSection], layers: list[int], head_count: int
) -> None:
    """Check that the layers of figures are among those measured, and that their heads exist."""
    for figure in figures:
        for layer in _layers_of(figure):
            if layer not in layers:
                raise OptionError(
                    f"{figure.kind} shows layer = {layer}, which is not among those measured,"
                    f" {layers}"
                )
        heads = shown_options(figure).get("heads")
        if heads is not None:
            check_heads(_listed(heads), range(head_count))


def _check_figures(config: Config, conditions: list[str]) -> None:
    """Check that each figure is known, that its options are valid, and that the config has the
    condition and analysis that it shows."""
    analyses = {section.kind for section in config.analyses}
    known_conditions = [BASELINE, *conditions]
    for index, figure in enumerate(config.figures or []):
        where = f"figures[{index}]"
        options = shown_options(figure, where)
        shown_conditions = [options.get("condition"), *(options.get("conditions") or [])]
        for name in shown_conditions:
            if name and name not in known_conditions:
                raise OptionError(
                    f"{where}: there is no condition {name!r}; the conditions are "
                    f"{', '.join(known_conditions)}"
                )

        needed = _analyses_for(figure, options, where)
        if not analyses.intersection(needed):
            raise OptionError(
                f"{where}: {figure.kind} shows {needed[0]}, which is not among the analyses"
            )


def _check_figures_of_model(
    figures: Sequence[FigureSection], model: HookedModel, layers: list[int]
) -> None:
    """Check that the layers and heads of figures are measured in a loaded model."""
    _check_layers_and_heads(figures, layers, model.cfg.n_heads)


def _analyses_for(figure: FigureSection, options: Mapping[str, Any], where: str) -> list[str]:
    """The analyses that measure what a figure shows; it needs one of them.

    Raises:
        OptionError: No analysis measures the quantity of the figure.
    """
    declaration = FIGURES[figure.kind]
    if declaration.needs:
        dataset = declaration.analysis(options)
        return [
            kind for kind, analysis_class in ANALYSES.items() if analysis_class().name == dataset
        ]

    quantity = options["quantity"]
    kinds = [
        kind
        for kind, analysis_class in ANALYSES.items()
        if quantity in {name.removesuffix("_by_segment") for name in analysis_class().quantities}
    ]
    if not kinds:
        raise OptionError(f"{where}.quantity = {quantity!r}: no analysis measures it")
    return kinds
