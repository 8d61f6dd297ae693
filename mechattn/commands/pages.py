"""The commands ``figures``, ``report``, ``show`` and ``export``: models and results as pages, text and tables."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr

from mechattn.analysis import ANALYSES
from mechattn.analysis.analysis import Analysis
from mechattn.analysis.attention_focus import AttentionFocus
from mechattn.analysis.received_attention import AttentionMap, ReceivedAttention
from mechattn.axes import BASELINE
from mechattn.commands.run_config import prepared
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.quantities import head_quantities, kept, segment_of, variable_of
from mechattn.engine.run import run
from mechattn.errors import MemoryOptionError, OptionError
from mechattn.jobs.from_config import made_conditions
from mechattn.markup import plain
from mechattn.model.hooked import HookedModel
from mechattn.model.hooks import chosen_layers
from mechattn.model.load import check_device, dtype_named, load_model
from mechattn.pages.first_screen import ShownModel, flat, verdict_sentences
from mechattn.pages.page import (
    About,
    Section,
    drawn_section,
    heads_options,
    prompt_section,
    results_page,
    view_section,
    write_page,
)
from mechattn.prompts.conditions import Condition, MeaninglessTokens, RandomSentence
from mechattn.prompts.prompt import Prompt
from mechattn.render.attention_figures import received_attention
from mechattn.render.figure_declaration import FIGURES, check_heads
from mechattn.render.html_views import check_page_place, pattern, received_text
from mechattn.render.words import model_caption
from mechattn.results.arrays import TEXT
from mechattn.results.provenance import name_of
from mechattn.results.result import MEMORY, Result
from mechattn.store.atomic_writes import check_writable, say, write_whole
from mechattn.store.reading import load_result
from mechattn.toml_sections import Config

COLUMNS = (
    "result", "model", "quantity", "segment", "units", "condition", "layer", "head", "value", "value_low",
    "value_high", "uniform", "baseline", "scale", "change_units", "change", "change_low", "change_high", "change_null",
    "difference", "difference_low", "difference_high", "null",
    "beyond", "beyond_low", "beyond_high", "p_beyond", "q_beyond", "p_difference", "q_difference", "level", "n", "n_of",
)  # fmt: skip
Figures = list[tuple[Callable, Mapping[str, Any]]]
VIEW_TOKENS = 16
WHERE = {  # a place, in words
    "before_question": "before the question", "start": "at the start", "middle": "in the middle of the question",
    "after_question": "after the question", "before_answer": "before the answer",
    "random": "at a random place in the question",
}  # fmt: skip
READ_TEXT = (
    "Each token is coloured by the average attention that it receives from the original tokens after it; both texts "
    "share one scale. Hover over a token for its number."
)


def report(
    places: Seq[str | Path], out: str | Path, layer: int | None = None, heads: Seq[int] | None = None,
    command: str = "", force: bool = False, top: int = 3, memory: str = MEMORY,
) -> list[str]:  # fmt: skip
    """Write a page of stored results with all their figures; return what could not be shown and why."""
    check_page_place(out, force)
    results = [load_result(place, memory=memory) for place in places]
    for result in results:
        measured, count = (
            result.provenance["measured_layers"],
            int(result.provenance["model"]["heads"]),
        )
        if layer is not None and layer not in measured:
            raise OptionError(f"layer {layer} was not measured; the result has {measured}")
        check_heads([0] if heads is None else heads, count)
    missing: list[str] = []
    results_page(results, out, figures_of(results[0], layer, heads, top), command, missing, force)
    return missing


def figures_of(
    result: Result, layer: int | None, heads: Seq[int] | None = None, top: int = 3
) -> Figures:
    """The figures for the analyses of a result, in the order of the analyses, with their options."""
    layer = int(result.provenance["measured_layers"][0]) if layer is None else layer
    given = {"layer": layer} | heads_options(result, heads, top)
    found = [
        (at, one, options) for one in FIGURES.values() for at, options in one.shown(result, given)
    ]
    order = [make().name for make in ANALYSES]
    found.sort(
        key=lambda each: (
            order.index(each[0]) if each[0] in order else len(order),
            each[1].compares,
        )
    )
    return [(one.draw, options) for _, one, options in found]


def summary(result: Result) -> str:
    """A text summary of a stored result: verdicts, quantities with their sizes, and provenance."""
    lines = [repr(result), "", *verdict_sentences(ShownModel(result)), ""]
    for name, dataset in result.datasets.items():
        lines.append(f"{name}: {', '.join(f'{dim} {size}' for dim, size in dataset.sizes.items())}")
        for quantity in sorted(map(str, dataset)):
            if not quantity.endswith(
                ("_variance", "_n")
            ):  # stored over prompts in addition to each mean
                about = dataset[quantity].attrs
                units = f" ({about['units']})" if "units" in about else ""
                what = f": {about['description']}" if "description" in about else ""
                lines.append(
                    f"  {quantity}{units} [{', '.join(map(str, dataset[quantity].dims))}]{what}"
                )
    provenance = [f"{name}: {value}" for name, value in flat(result.provenance)]
    return "\n".join([*lines, "", f"digest of the numbers: {result.digest()}", *provenance])


def export_csv(places: Seq[str | Path], out: Path, memory: str = MEMORY) -> tuple[Path, list[str]]:
    """Write a CSV row per result, quantity, condition, layer and head; return the file, and what has no row and why."""
    if out.suffix != ".csv":
        raise OptionError(f'"{out.name}" should end with .csv')
    check_writable(out)
    if out.exists():
        with (
            open(out, encoding="utf-8", errors="replace") if out.is_file() else StringIO() as there
        ):
            ours = there.readline().strip() == ",".join(COLUMNS)
        if not ours:
            raise OptionError(
                f"{out} exists and is not a mechattn export, so it is not replaced; choose another name"
            )
    tables, missing = [], []
    for place in places:
        result = load_result(place, memory=memory)
        table, lacking = heads_table(result)
        tables.append(table.assign(result=str(place), model=result.provenance["model"]["name"]))
        missing += [f"{place}: {words}" if len(places) > 1 else words for words in lacking]
    write_whole(out, lambda new: pd.concat(tables).to_csv(new, index=False))
    return out, missing


def export_netcdf(places: Seq[str | Path], out: Path) -> Path:
    """Write all arrays of a stored result, with its provenance, to one NetCDF file, a group for each analysis."""
    if len(places) > 1:
        raise OptionError(
            f"a NetCDF file holds one result, and {len(places)} are given; export each to its own file"
        )
    if out.suffix != ".nc":
        raise OptionError(f'"{out.name}" should end with .nc')
    check_writable(out)
    if out.exists():
        raise OptionError(f"{out} exists; choose another name, or delete it")
    try:
        import h5netcdf  # noqa: F401
    except ImportError:
        raise OptionError('a NetCDF file needs h5netcdf: pip install "mechattn[netcdf]"') from None
    result = load_result(places[0])
    datasets = {}
    for name, one in result.datasets.items():  # with texts of the kind that HDF5 takes
        texts = {n: v for n, v in one.variables.items() if v.dtype.kind in TEXT}
        made = {n: (v.dims, v.values.astype(object), v.attrs) for n, v in texts.items()}
        labels = {n: v for n, v in made.items() if n in one.coords}
        datasets[f"/{name}"] = one.assign_coords(labels).assign(
            {n: made[n] for n in made if n not in labels}
        )
    tree = xr.DataTree.from_dict(datasets)
    tree.attrs = {"provenance": json.dumps(result.provenance)}
    write_whole(out, lambda new: tree.to_netcdf(new, engine="h5netcdf"))
    return out


def heads_table(result: Result) -> tuple[pd.DataFrame, list[str]]:
    """Every quantity with one number per head, in every condition; and the quantities without rows, with the reason."""
    tables: list[pd.DataFrame] = []
    missing: list[str] = []
    for quantity in head_quantities(result):
        reference, variable = (
            kept(result, quantity, BASELINE, "question"),
            variable_of(result, quantity),
        )
        about = {
            "segment": segment_of(variable, "question"),
            "units": variable.attrs.get("units", ""),
        }
        for condition in result.conditions:
            of = (
                reference
                if condition == BASELINE
                else kept(result, quantity, condition, "question")
            )
            try:
                tables.append(_rows(of, reference, quantity, condition).assign(**about))
            except MemoryOptionError:
                raise
            except OptionError as error:
                missing.append(f"{quantity}, {condition}: {error}")
    if not tables:
        why = missing[0] if missing else "the run measured no numbers per head"
        raise OptionError(f"there is nothing to export: {why}")
    return pd.concat(tables, ignore_index=True).reindex(columns=list(COLUMNS)), missing


def _rows(of: Result, reference: Result, quantity: str, condition: str) -> pd.DataFrame:
    values = of.heads(quantity, None, condition=condition).sort_values(["layer", "head"])
    about = {"n_of": values.attrs["unit"], "level": values.attrs["level"]}
    values = values.rename(columns={quantity: "value", "low": "value_low", "high": "value_high"})
    values = values.assign(quantity=quantity, condition=condition, **about)
    if condition == BASELINE:
        return values
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a head without a comparison has empty cells
        changes = Contrast(of, condition, quantity=quantity, other=reference).table()
    given = (*values.columns.drop(["layer", "head"]), "segment")
    columns = [name for name in COLUMNS if name in changes and name not in given]
    changes = changes.rename(columns={"reference": "baseline"})[["baseline", *columns]]
    return values.merge(changes, on=["layer", "head"], how="left")


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
        say(
            f"{names}: {len(prompts)} prompts with and without {inserted.count} inserted tokens; {takes}."
        )
    looked: list[_Looked] = []
    for name, place in places.items():
        hooked = load_model(name, dtype=dtype, device=config.device)
        chosen_layers(hooked, config.output.layer)
        check_heads(_heads(config), hooked.cfg.n_heads)
        looked.append(_looked_at(hooked, config, prompts, inserted, Path(place), command))
    tokens = " or ".join(map(str, sorted({one.count for one in looked})))
    slash = f"{tokens} tokens of “{plain(inserted.text)}” ({_name(inserted)})"
    what = f"{slash}, or as many tokens of random sentences (sentence), are inserted {WHERE[inserted.place]}"
    subtitle = (
        f"Attention when {what}, for {len(prompts)} prompts of {name_of(config.prompts.source)}."
    )
    about = About("mechattn: attention under meaningless tokens", subtitle, command)
    each = [ShownModel(one.result, one.maps) for one in looked]
    page = Path(str(config.output.page))
    return write_page(
        page, about, each, [section for one in looked for section in one.sections], force
    )


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
    hooked: HookedModel,
    config: Config,
    prompts: Seq[Prompt],
    inserted: MeaninglessTokens,
    place: Path,
    command: str,
) -> _Looked:
    """Run one model on all prompts, and on the shortest one for its maps; store the result immediately."""
    fitted = inserted.fitted(hooked)  # some tokenizers split each "/" in two
    if fitted.count != inserted.count:
        cannot = f"the tokenizer of {hooked.cfg.model_name} cannot make {inserted.count} tokens of {inserted.text!r}"
        say(f"{cannot}; {fitted.count} are inserted")
    sentence = RandomSentence(count=fitted.count, place=fitted.place)  # the matched control
    conditions: dict[str, Condition] = {_name(fitted): fitted, "sentence": sentence}
    analyses: list[Analysis] = [ReceivedAttention(), AttentionFocus()]
    result = run(hooked, prompts, conditions, analyses, seed=config.seed, positions="prompts")
    result.save(place)
    layer, heads = config.output.layer or 0, _heads(config)
    one = min(prompts, key=lambda prompt: len(prompt.question))
    maps, views = _of_one(hooked, result, one, fitted, layer, heads, config.seed)
    options: list[dict[str, Any]] = [{"top": min(3, hooked.cfg.n_heads)}, {"heads": list(heads)}]
    drawn = [
        drawn_section(received_attention, result, {"layer": layer} | some, command)
        for some in options
    ]
    title = f"{model_caption(result)}: attention received in the first prompt"
    text = view_section(received_text(result, layer, heads), title, READ_TEXT)
    return _Looked(result, maps, [prompt_section(result), *drawn, text, *views], fitted.count)


def _name(inserted: MeaninglessTokens) -> str:
    return "slash" if inserted.text == "/" else "meaningless"


def _of_one(
    hooked: HookedModel, result: Result, prompt: Prompt, inserted: MeaninglessTokens, layer: int, heads: Seq[int],
    seed: int,
) -> tuple[Result, list[Section]]:  # fmt: skip
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
