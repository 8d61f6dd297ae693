"""The commands ``mechattn run`` and ``mechattn evaluate``: what a config file says, checked before the work."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

from mechattn import config as configs
from mechattn.engine.run import run
from mechattn.errors import OptionError
from mechattn.evaluation.evaluate import evaluate
from mechattn.evaluation.evaluation import Evaluation
from mechattn.model.hooks import chosen_layers
from mechattn.model.load import dtype_named, load_model
from mechattn.page import results_page
from mechattn.prompts.datasets import load_prompts
from mechattn.render.received_attention import check_heads
from mechattn.results.storage import check_result_place, check_writable
from mechattn.stats.intervals import FEWEST


def run_from_config(path: Path, command: str = "") -> list[Path]:
    """Run a config file; returns what was written.

    Raises:
        MechattnError: The config, the prompts, the model or the output cannot be used; found before the work.
    """
    config = configs.read_config(path)
    output = config.output
    places = {name: Path(output.result.replace("{model}", file_name(name))) for name in config.models}
    for place in places.values():
        check_result_place(place)
    if output.page is not None:
        check_writable(output.page)
        if not config.conditions:
            raise OptionError(
                f"{path}: a page compares a condition with the baseline, and there is none under [conditions]"
            )
    shown = _shown(config)
    prompts = load_prompts(**config.prompts.model_dump())
    for section in shown:
        check_enough(len(prompts), section.options.get("heads", [0]) if section.kind == "received_attention" else [0])
    by_half = any(isinstance(section.options.get("heads"), int) for section in shown)
    results = []
    for name, place in places.items():
        model = load_model(name, dtype=dtype_named(config.dtype), verify=config.verify)
        layers = chosen_layers(model, config.layers)
        for section in shown:
            _check_shown(section, layers, model.cfg.n_heads)
        result = run(
            model,
            prompts,
            config.made_conditions(),
            config.made_analyses(),
            layers=layers,
            positions="prompts" if by_half else "moments",
            seed=config.seed,
            memory=config.memory,
            engine=config.engine,
        )
        result.save(place)
        results.append(result)
    written = list(places.values())
    if output.page:
        figures = [(configs.FIGURES[section.kind], section.options) for section in shown]
        written.append(results_page(results, output.page, figures, command))
    return written


def evaluate_from_config(path: Path) -> tuple[dict[str, Evaluation], list[Path]]:
    """Evaluate what a config file says under [evaluation]; returns the evaluation of each model, and what was written.

    Raises:
        MechattnError: The config, the prompts, the model or the output cannot be used; found before the work.
    """
    config = configs.read_config(path)
    if config.evaluation is None:
        raise OptionError(f'{path} has no section [evaluation]: give one with out = "answers.jsonl" at least')
    options = config.evaluation.model_dump()
    places = {name: Path(options["out"].replace("{model}", file_name(name))) for name in config.models}
    for place in places.values():
        check_writable(place)
    prompts = load_prompts(**config.prompts.model_dump())
    found = {}
    for name, place in places.items():
        model = load_model(name, dtype=dtype_named(config.dtype), verify=config.verify)
        conditions = config.made_conditions()
        found[name] = evaluate(model, prompts, conditions, seed=config.seed, **(options | {"out": place}))
    return found, list(places.values())


def _shown(config: configs.Config) -> list[configs.Figure]:
    """The figures of the page; without [[figures]] received attention under each condition."""
    if config.output.page is None:
        return []
    if config.figures is not None:
        return config.figures
    layer = config.layers[0] if config.layers and config.output.layer is None else config.output.layer or 0
    options = {"layer": layer, "heads": config.output.heads}
    shown = [{"kind": "received_attention", "condition": name, **options} for name in config.made_conditions()]
    return [configs.Figure.model_validate(section) for section in shown]


def _check_shown(section: configs.Figure, layers: list[int], heads: int) -> None:
    """The layers and heads that a figure shows are measured, and there."""
    options = configs.shown_options(section)
    shown = [options[name] for name in ("layer",) if options.get(name) is not None]
    for layer in [*shown, *(options.get("layers") or [])]:
        if layer not in layers:
            raise OptionError(f"{section.kind} shows layer = {layer}, which is not among those measured, {layers}")
    named = [*([options["head"]] if "head" in options else [])]
    given = options.get("heads", [])
    check_heads([*named, *([] if isinstance(given, int) else given)] or [0], heads)


def check_enough(prompts: int, heads: Seq[int] | int) -> None:
    """A page needs intervals over at least 3 prompts, and as many in each half where the data choose the heads."""
    needed = 2 * FEWEST if isinstance(heads, int) else FEWEST
    if prompts < needed:
        why = "the heads are chosen on one half and shown on the other" if needed > FEWEST else "it shows intervals"
        raise OptionError(f"a page needs at least {needed} prompts, since {why}; there are {prompts}")


def file_name(model: str) -> str:
    """A name for the files of a model: "toy:llama" gives "toy-llama", "/a/folder/" gives "folder"."""
    last = model.rstrip("/").rsplit("/", 1)[-1]
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in last)
