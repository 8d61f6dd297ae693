"""The commands ``mechattn run`` and ``mechattn evaluate``: check a config file before the run, then run it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mechattn.axes import BASELINE
from mechattn.commands.from_config import ANALYSES, made_analyses, made_conditions
from mechattn.engine.run import RunOptions
from mechattn.errors import OptionError
from mechattn.evaluation.evaluate import evaluate
from mechattn.evaluation.evaluation import Evaluation
from mechattn.evaluation.server import Server
from mechattn.jobs.executors import ExecutorName, executor_named
from mechattn.jobs.job import Job
from mechattn.jobs.resumable_run import WHOLE, Shard, compute, parse_shard, shard_place
from mechattn.model.checkpoint import layers_and_heads, tokenizer_named
from mechattn.model.hooked import HookedModel
from mechattn.model.load import dtype_named, load_model
from mechattn.pages.lead_figures import Shown
from mechattn.pages.page import results_page
from mechattn.prompts.datasets import load_prompts
from mechattn.prompts.prompt import Prompt, Template
from mechattn.render.figure_declaration import FIGURES as DECLARED
from mechattn.render.figure_declaration import check_heads
from mechattn.render.html_views import check_page_place
from mechattn.results.provenance import command_of, file_names
from mechattn.stats.intervals import FEWEST
from mechattn.store.atomic_writes import check_writable
from mechattn.store.writing import check_result_place
from mechattn.toml_sections import Config, Figure, near, no_such_key, read_sections

TemplateWord = Literal["auto", "plain", "chat", "joined"]
FIGURES: dict[str, Callable] = {
    name: one.draw for name, one in DECLARED.items() if one.draws_results
}


def run_from_config(
    path: Path,
    words: Seq[str] = (),
    *,
    shard: str | None = None,
    executor: ExecutorName | None = None,
    address: str | None = None,
    workers: int | None = None,
    values: Literal["float32", "float16"] | None = None,
    fresh: bool = False,
    force: bool = False,
    system: str | None = None,
    template: TemplateWord | None = None,
) -> list[Path | str]:
    """Run a config file, or one part of its chunks; return what was written.

    ``system`` and ``template`` replace what the file says of its prompts.
    """
    config = with_prompt_options(read_config(path), system, template)
    config = config.model_copy(update={} if values is None else {"values": values})
    command = command_of(words, config.paths) if words else ""
    part = parse_shard(shard)
    where = executor_named(
        executor or config.executor, address or config.address, workers or config.workers
    )
    shown = _shown(config)
    places, prompts = prepared(config, force, part=part, used=not fresh)
    written: list[Path | str] = []
    results = []
    for name, place in places.items():
        job = _job(config, name, prompts[name], shown, command)
        result, is_new = compute(job, place, part, where, fresh)
        results.append(result)
        if is_new:
            result_path = shard_place(place, part)
            written.append(result_path if "://" in str(result_path) else Path(result_path))
    if config.output.page and part == WHOLE:
        # Without [[figures]], those of the first condition lead the page in any case.
        more = shown if config.figures is not None else shown[1:]
        figures = [(FIGURES[section.kind], section.options) for section in more]
        heads = config.output.heads
        heads = [heads] if isinstance(heads, int) else heads
        lines = Shown(config.output.layer, heads, config.output.top)
        page = results_page(results, config.output.page, figures, command, force=force, shown=lines)
        written.append(page)
    return written


def prepared(
    config: Config, force: bool, *, part: Shard = WHOLE, used: bool = False, by_half: bool = False
) -> tuple[dict[str, str], dict[str, list[Prompt]]]:
    """Each model's place for its result, and its prompts; all is checked that can be before a model is loaded."""
    shown = _shown(config)
    places = {
        name: config.output.result.replace("{model}", file)
        for name, file in file_names(config.models).items()
    }
    if config.output.page is not None:
        check_page_place(config.output.page, force)
    for place in places.values():
        check_result_place(shard_place(place, part), used=used)
    for name in config.models:
        check_in_model(name, config.layers, shown)
    prompts = prompts_by_model(config)
    count = len(prompts[config.models[0]])
    halves = by_half or any(map(_chooses, shown))
    needed = 2 * FEWEST if halves else FEWEST  # the least for an interval, of each half
    if shown and count < needed:
        why = (
            "the heads are chosen on one half and shown on the other"
            if halves
            else "it shows intervals"
        )
        raise OptionError(
            f"a page needs at least {needed} prompts, since {why}; there are only {count}"
        )
    return places, prompts


def prompts_by_model(config: Config) -> dict[str, list[Prompt]]:
    """The prompts of a config as each of its models reads them: in its chat template, where it has one."""
    options = config.prompts.model_dump()
    wanted = options.pop("template")
    prompts = load_prompts(**options)  # once, as a file may be large and a data set far away
    by_model = {}
    for name in config.models:
        template = template_of(name, wanted)
        by_model[name] = [replace(prompt, template=template) for prompt in prompts]
    return by_model


def template_of(model: str, wanted: TemplateWord) -> Template:
    """The template of a model's prompts; "auto" is its chat template, or "plain" where it has none.

    Raises:
        OptionError: The chat template is asked for, and the tokenizer has none.
    """
    if wanted in ("plain", "joined"):
        return wanted
    if getattr(tokenizer_named(model), "chat_template", None):
        return "chat"
    if wanted == "chat":
        raise OptionError(
            f'the tokenizer of {model} has no chat template; give --no-chat-template, or template = "plain"'
        )
    return "plain"


def with_prompt_options(
    config: Config, system: str | None, template: TemplateWord | None
) -> Config:
    """A config whose prompts have another text before the question, or another template."""
    changed: dict[str, str] = {}
    if system is not None:
        changed["system"] = system
    if template is not None:
        changed["template"] = template
    return config.model_copy(update={"prompts": config.prompts.model_copy(update=changed)})


def _job(config: Config, model: str, prompts: Seq[Prompt], shown: Seq[Figure], command: str) -> Job:
    """The job that a config describes for one of its models."""
    by_half = any(map(_chooses, shown))
    positions: Literal["prompts", "moments"] = "prompts" if by_half else "moments"
    options = RunOptions(config.layers, config.seed, positions, config.memory, config.engine)
    conditions = made_conditions(config.conditions, partial(tokenizer_named, model))
    given = config.model_dump(
        include={"dtype", "device", "verify", "chunk", "threads", "values", "paths"}
    )
    require = partial(_check_all_shown, shown)
    analyses = made_analyses(config.analyses)
    return Job(
        model, prompts, conditions, analyses, options, require=require, command=command, **given
    )


def evaluate_from_config(
    path: Path,
    server: str | None = None,
    served_model: str | None = None,
    server_key: str | None = None,
    system: str | None = None,
    template: TemplateWord | None = None,
) -> tuple[dict[str, Evaluation], list[Path]]:
    """Run the [evaluation] section of a config file; return each model's evaluation, and what was written."""
    config = with_prompt_options(read_config(path), system, template)
    if config.evaluation is None:
        raise OptionError(
            f'{path} has no section [evaluation]: add one with at least out = "answers.jsonl"'
        )
    options = config.evaluation.model_dump()
    given = {"address": server, "model": served_model, "key": server_key}
    at = (options["server"] or {}) | {
        name: value for name, value in given.items() if value is not None
    }
    if at and "address" not in at:
        raise OptionError(
            "--served-model and --server-key need a server: give --server http://host:8000/v1 too"
        )
    options["server"] = Server(**at) if at else None
    if at and len(config.models) > 1:
        many = f"{path} names {len(config.models)} models"
        raise OptionError(f"{many}, but a server has only one model: evaluate each separately")
    files = file_names(config.models)
    places = {name: Path(options["out"].replace("{model}", file)) for name, file in files.items()}
    for place in places.values():
        check_writable(place)
    prompts = prompts_by_model(config)
    found = {}
    for name, place in places.items():
        model, tokenizer = name, partial(tokenizer_named, name)
        if not at:
            model = load_model(
                name, dtype=dtype_named(config.dtype), device=config.device, verify=config.verify
            )
            tokenizer = partial(getattr, model, "tokenizer")
        conditions = made_conditions(config.conditions, tokenizer)
        found[name] = evaluate(
            model, prompts[name], conditions, seed=config.seed, **(options | {"out": place})
        )
    return found, list(places.values())


def _shown(config: Config) -> list[Figure]:
    """The figures of the page; without [[figures]] received attention under each condition."""
    if config.output.page is None:
        return []
    if config.figures is not None:
        return config.figures
    layer = (
        config.layers[0]
        if config.layers and config.output.layer is None
        else config.output.layer or 0
    )
    heads = config.output.heads
    options = {"layer": layer} | ({"top": config.output.top} if heads is None else {"heads": heads})
    names = list(made_conditions(config.conditions)) or [BASELINE]
    shown = [{"kind": "received_attention", "condition": name, **options} for name in names]
    return [Figure.model_validate(section) for section in shown]


def check_in_model(name: str, layers: Seq[int] | None, shown: Seq[Figure]) -> None:
    """Check before loading that the requested layers and heads exist, as far as the model's config says."""
    size = layers_and_heads(name)
    if size is None:
        return
    for layer in [
        *(layers or []),
        *(layer for section in shown for layer in _shown_layers(section)),
    ]:
        if not 0 <= layer < size[0]:
            raise OptionError(
                f"layer {layer} is out of range: {name} has layers 0 to {size[0] - 1}"
            )
    for section in shown:
        _check_shown(section, list(layers or range(size[0])), size[1])


def _check_all_shown(shown: Seq[Figure], model: HookedModel, layers: list[int]) -> None:
    for section in shown:
        _check_shown(section, layers, model.cfg.n_heads)


def _check_shown(section: Figure, layers: list[int], heads: int) -> None:
    """Check that the layers and heads of a figure exist and are measured."""
    for layer in _shown_layers(section):
        if layer not in layers:
            raise OptionError(
                f"{section.kind} shows layer = {layer}, which is not among those measured, {layers}"
            )
    given = shown_options(section).get("heads") or []
    check_heads(([given] if isinstance(given, int) else given) or [0], heads)


def _shown_layers(section: Figure) -> list[int]:
    layer = shown_options(section).get("layer")
    return layer if isinstance(layer, list) else [] if layer is None else [layer]


def _chooses(section: Figure) -> bool:
    """Whether the heads of a figure are chosen by the data."""
    by_default = section.kind == "received_by_model" and section.options.get("heads") is None
    return by_default or section.options.get("top") is not None


def read_config(path: str | Path) -> Config:
    """Read a TOML file."""
    config = read_sections(path)
    try:
        made_conditions(config.conditions)
        made_analyses(config.analyses)
        _check_figures(config)
        file_names(config.models)
    except RecursionError:
        raise OptionError(f"{path} is nested too deeply") from None
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from None
    needs = f'{path}: {len(config.models)} models need "{{model}}" in'
    if len(config.models) > 1 and "{model}" not in config.output.result:
        raise OptionError(f"{needs} output.result, to give each its own result")
    if config.evaluation and len(config.models) > 1 and "{model}" not in config.evaluation.out:
        raise OptionError(f"{needs} evaluation.out, to give each its own file")
    return config


def shown_options(figure: Figure) -> dict[str, Any]:
    """The options of a figure, including defaults."""
    takes = DECLARED[figure.kind].takes
    return {
        name: default for name, default in takes.items() if default is not inspect.Parameter.empty
    } | figure.options


def _check_figures(config: Config) -> None:
    """Check that each figure is known, gets valid options, and shows conditions and analyses of the run."""
    conditions, analyses = (
        made_conditions(config.conditions),
        {section.kind for section in config.analyses},
    )
    for i, figure in enumerate(config.figures or []):
        where = f"figures[{i}]"
        if (kind := figure.kind) not in FIGURES:
            raise OptionError(
                f"{where}.kind = {kind!r}: choose one of {', '.join(FIGURES)}{near(kind, FIGURES)}"
            )
        takes = DECLARED[figure.kind].takes
        for name in figure.options:
            if name not in takes:
                raise OptionError(f"{where}.{name}: {no_such_key(name, list(takes))}")
        needed = [name for name, default in takes.items() if default is inspect.Parameter.empty]
        if missing := [name for name in needed if name not in figure.options]:
            raise OptionError(f"{where}: {figure.kind} needs {', '.join(missing)}")
        shown = shown_options(figure)
        names = shown.get("conditions") or []
        if not isinstance(names, (list, tuple)):
            raise OptionError(f"{where}.conditions = {names!r}: give a list")
        several = figure.kind == "received_attention" and isinstance(shown["layer"], list)
        if not all(
            isinstance(n, int) for n in (shown["layer"] if several else [shown.get("layer") or 0])
        ):
            raise OptionError(
                f"{where}.layer = {shown['layer']!r}: give one number{', or numbers' * several}"
            )
        for name in ("condition", "reading"):
            if not isinstance(shown.get(name), str | None):
                raise OptionError(f"{where}.{name} = {shown[name]!r}: give one name")
        if not all(isinstance(name, str) for name in names):
            raise OptionError(f"{where}.conditions = {names!r}: give names")
        for name in filter(None, [shown.get("condition"), *names]):
            if name not in (*conditions, BASELINE):
                there = (
                    f"there is no condition {name!r}; the conditions are {', '.join(conditions)}"
                )
                raise OptionError(f"{where}: {there}")
        needed = _analyses_for(figure, shown, where)
        if not set(needed) & analyses:
            raise OptionError(
                f"{where}: {figure.kind} shows {needed[0]}, which is not among the analyses"
            )


def _analyses_for(figure: Figure, shown: Mapping[str, Any], where: str) -> list[str]:
    """The analyses of which a figure needs one."""
    one = DECLARED[figure.kind]
    if isinstance(one.needs, Mapping) and shown["reading"] not in one.needs:
        raise OptionError(
            f"{where}.reading = {shown['reading']!r}: choose one of {', '.join(one.needs)}"
        )
    if one.needs:
        return [kind for kind, make in ANALYSES.items() if make().name == one.analysis(shown)]
    names = {
        kind: {name.removesuffix("_by_segment") for name in cls().quantities}
        for kind, cls in ANALYSES.items()
    }
    of = [kind for kind, quantities in names.items() if str(shown["quantity"]) in quantities]
    if not of:
        raise OptionError(f"{where}.quantity = {shown['quantity']!r}: no analysis measures it")
    return of
