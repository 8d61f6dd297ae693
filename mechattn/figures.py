"""The two commands that end in a page: the figures of the first two seeds, and a run from a config file."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

from mechattn import config as configs
from mechattn.analysis.received_attention import ReceivedAttention
from mechattn.engine.collect import Positions
from mechattn.engine.run import run
from mechattn.errors import OptionError
from mechattn.look import pattern
from mechattn.model.hooks import chosen_layers
from mechattn.model.load import dtype_named, load_model, model_place
from mechattn.page import Section, figure_section, result_page, result_sections, view_section, write_page
from mechattn.prompts.conditions import MeaninglessTokens
from mechattn.prompts.datasets import load_prompts
from mechattn.render.received_attention import check_heads
from mechattn.results.result import Result
from mechattn.results.storage import check_result_place, check_writable
from mechattn.stats.intervals import FEWEST

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
    _check_enough(len(prompts), 3)
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


def file_name(model: str) -> str:
    """A name for the files of a model: "toy:llama" gives "toy-llama", "/a/folder/" gives "folder"."""
    last = model.rstrip("/").rsplit("/", 1)[-1]
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in last)


def run_from_config(path: Path, command: str = "") -> list[Path]:
    """Run a config file; returns what was written.

    Raises:
        MechattnError: The config, the prompts, the model or the output cannot be used; found before the work.
    """
    config = configs.read_config(path)
    output = config.output
    check_result_place(output.result)
    if output.page is not None:
        check_writable(output.page)
        if not config.conditions:
            raise OptionError(
                f"{path}: a page compares a condition with the baseline, and there is none under [conditions]"
            )
    prompts = load_prompts(**config.prompts.model_dump())
    if output.page:
        _check_enough(len(prompts), output.heads)
    model = load_model(config.model, dtype=dtype_named(config.dtype), verify=config.verify)
    layers = chosen_layers(model, config.layers)
    layer = layers[0] if output.layer is None else output.layer
    if output.page and not isinstance(output.heads, int):
        check_heads(output.heads, model.cfg.n_heads)
    if output.page and layer not in layers:
        raise OptionError(f"output.layer = {layer} is not among the layers that are measured, {layers}")
    conditions = {n: MeaninglessTokens(**c.model_dump(exclude={"kind"})) for n, c in config.conditions.items()}
    analyses = [ReceivedAttention(**a.model_dump(exclude={"kind"})) for a in config.analyses]
    positions: Positions = "prompts" if output.page and isinstance(output.heads, int) else "moments"
    options: dict[str, Any] = {"seed": config.seed, "memory": config.memory, "engine": config.engine}
    result = run(model, prompts, conditions, analyses, layers=layers, positions=positions, **options)
    result.save(output.result)
    written = [Path(output.result)]
    if output.page:
        written.append(result_page(result, output.page, layer, output.heads, command))
    return written


def _check_enough(prompts: int, heads: Seq[int] | int) -> None:
    """A page needs intervals over at least 3 prompts, and as many in each half where the data choose the heads."""
    needed = 2 * FEWEST if isinstance(heads, int) else FEWEST
    if prompts < needed:
        why = "the heads are chosen on one half and shown on the other" if needed > FEWEST else "it shows intervals"
        raise OptionError(f"a page needs at least {needed} prompts, since {why}; there are {prompts}")
