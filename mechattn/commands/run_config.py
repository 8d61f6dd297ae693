"""The commands ``mechattn run`` and ``mechattn evaluate``: check a config file, then run it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal

from mechattn.axes import BASELINE
from mechattn.commands import config as configs
from mechattn.commands.config_file import Config, Figure
from mechattn.errors import OptionError
from mechattn.evaluation.evaluate import evaluate
from mechattn.evaluation.evaluation import Evaluation
from mechattn.jobs.chunks import WHOLE, computed, parse_shard, shard_place
from mechattn.jobs.executor import ExecutorName, executor_named
from mechattn.jobs.job import Job
from mechattn.jobs.kinds import made_analyses, made_conditions
from mechattn.model.hooked import HookedModel
from mechattn.model.load import dtype_named, layers_and_heads, load_model, tokenizer_named
from mechattn.pages.page import results_page
from mechattn.prompts.datasets import load_prompts
from mechattn.prompts.prompt import Prompt
from mechattn.render.html import check_page_place
from mechattn.render.received_figures import check_heads
from mechattn.results.provenance import command_of
from mechattn.stats.intervals import FEWEST
from mechattn.store.atomic_writes import check_writable
from mechattn.store.file_names import file_names
from mechattn.store.saving import check_result_place


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
) -> list[Path | str]:
    """Run a config file, or one part of its chunks; return what was written."""
    config = configs.read_config(path)
    config = config.model_copy(update={} if values is None else {"values": values})
    command = command_of(words, config.paths) if words else ""
    output, part = config.output, parse_shard(shard)
    where = executor_named(executor or config.executor, address or config.address, workers or config.workers)
    files = file_names(config.models)
    places = {name: output.result.replace("{model}", file) for name, file in files.items()}
    for place in places.values():
        check_result_place(shard_place(place, part), used=not fresh)
    if output.page is not None:
        check_page_place(output.page, force)
    shown = _shown(config)
    prompts = load_prompts(**config.prompts.model_dump())
    for section in shown:
        check_enough(len(prompts), by_half=_chooses(section))
    for name in config.models:
        check_in_model(name, config.layers, shown)
    written: list[Path | str] = []
    with ExitStack() as stack:  # finished chunks are kept until the page is drawn
        results = []
        for name, place in places.items():
            job = _job(config, name, prompts, shown, command)
            made = stack.enter_context(computed(job, place, part, where, fresh))
            results.append(made.result)
            written += [as_written(made.path)] if made.now else []
        if output.page and part == WHOLE:
            figures = [(configs.FIGURES[section.kind], section.options) for section in shown]
            written.append(results_page(results, output.page, figures, command, force=force))
    return written


def as_written(place: str | Path) -> Path | str:
    """A path; an address is left unchanged."""
    return place if "://" in str(place) else Path(place)


def _job(config: Config, model: str, prompts: Seq[Prompt], shown: Seq[Figure], command: str) -> Job:
    """The job that a config describes for one of its models."""
    by_half = any(map(_chooses, shown))
    return Job(
        model=model,
        prompts=prompts,
        conditions=made_conditions(config.conditions, partial(tokenizer_named, model)),
        analyses=made_analyses(config.analyses),
        layers=config.layers,
        seed=config.seed,
        positions="prompts" if by_half else "moments",
        memory=config.memory,
        engine=config.engine,
        dtype=config.dtype,
        device=config.device,
        verify=config.verify,
        chunk=config.chunk,
        threads=config.threads,
        values=config.values,
        require=partial(_check_all_shown, shown),
        command=command,
        paths=config.paths,
    )


def evaluate_from_config(path: Path, **at: str | None) -> tuple[dict[str, Evaluation], list[Path]]:
    """Run the [evaluation] section of a config file; return each model's evaluation, and what was written."""
    config = configs.read_config(path)
    if config.evaluation is None:
        raise OptionError(f'{path} has no section [evaluation]: add one with at least out = "answers.jsonl"')
    options = config.evaluation.model_dump() | {name: value for name, value in at.items() if value is not None}
    if options["server"] is not None and len(config.models) > 1:
        raise OptionError(
            f"{path} names {len(config.models)} models, but a server has only one model: evaluate each separately"
        )
    files = file_names(config.models)
    places = {name: Path(options["out"].replace("{model}", file)) for name, file in files.items()}
    for place in places.values():
        check_writable(place)
    prompts = load_prompts(**config.prompts.model_dump())
    found = {}
    for name, place in places.items():
        if options["server"] is None:
            model = load_model(name, dtype=dtype_named(config.dtype), device=config.device, verify=config.verify)
            conditions = made_conditions(config.conditions, partial(getattr, model, "tokenizer"))
        else:
            model, options["verify_server"] = name, config.verify
            conditions = made_conditions(config.conditions, partial(tokenizer_named, name))
        found[name] = evaluate(model, prompts, conditions, seed=config.seed, **(options | {"out": place}))
    return found, list(places.values())


def _shown(config: Config) -> list[Figure]:
    """The figures of the page; without [[figures]] received attention under each condition."""
    if config.output.page is None:
        return []
    if config.figures is not None:
        return config.figures
    layer = config.layers[0] if config.layers and config.output.layer is None else config.output.layer or 0
    heads = config.output.heads
    options = {"layer": layer} | ({"choose": config.output.choose} if heads is None else {"heads": heads})
    names = list(made_conditions(config.conditions)) or [BASELINE]
    shown = [{"kind": "received_attention", "condition": name, **options} for name in names]
    return [Figure.model_validate(section) for section in shown]


def check_in_model(name: str, layers: Seq[int] | None, shown: Seq[Figure]) -> None:
    """Check before loading that the requested layers and heads exist, as far as the model's config says."""
    size = layers_and_heads(name)
    if size is None:
        return
    for layer in layers or []:
        if not 0 <= layer < size[0]:
            raise OptionError(f"layer {layer} is out of range: {name} has layers 0 to {size[0] - 1}")
    for section in shown:
        _check_shown(section, list(layers or range(size[0])), size[1])


def _check_all_shown(shown: Seq[Figure], model: HookedModel, layers: list[int]) -> None:
    """Check that everything on the page is measured with this model."""
    for section in shown:
        _check_shown(section, layers, model.cfg.n_heads)


def _check_shown(section: Figure, layers: list[int], heads: int) -> None:
    """Check that the layers and heads of a figure exist and are measured."""
    options = configs.shown_options(section)
    shown = [options[name] for name in ("layer",) if options.get(name) is not None]
    for layer in [*shown, *(options.get("layers") or [])]:
        if layer not in layers:
            raise OptionError(f"{section.kind} shows layer = {layer}, which is not among those measured, {layers}")
    named = [*([options["head"]] if "head" in options else [])]
    given = options.get("heads") or []
    check_heads([*named, *([] if isinstance(given, int) else given)] or [0], heads)


def _chooses(section: Figure) -> bool:
    """Whether the heads of a figure are chosen by the data."""
    return section.options.get("choose") is not None


def check_enough(prompts: int, by_half: bool) -> None:
    """Check for at least 3 prompts, the least for an interval, or 3 in each half if the data choose the heads."""
    needed = 2 * FEWEST if by_half else FEWEST
    if prompts < needed:
        why = "the heads are chosen on one half and shown on the other" if needed > FEWEST else "it shows intervals"
        raise OptionError(f"a page needs at least {needed} prompts, since {why}; there are only {prompts}")
