"""Measures in the user's models what a paper published, and writes the table and the page."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mechattn.errors import OptionError, check_counts
from mechattn.model.checkpoint import architecture_named
from mechattn.model.load import check_device, dtype_named
from mechattn.prompts.datasets import load_prompts
from mechattn.prompts.prompt import Prompt
from mechattn.published.comparison import Cell, Comparison
from mechattn.published.measure import UNTRAINED_PROMPTS, ModelRuns, Settings
from mechattn.published.page import write_comparison
from mechattn.published.statements import Statements, read_statements
from mechattn.render.html_views import check_page_place
from mechattn.results import provenance
from mechattn.results.provenance import file_names
from mechattn.results.result import Result
from mechattn.stats.intervals import FEWEST
from mechattn.store.atomic_writes import write_text
from mechattn.store.reading import load_result


def paper(
    models: Iterable[str | Path] | str | Path,
    out: str | os.PathLike[str] = "out/paper",
    *,
    prompts: str = "gsm8k",
    field: str = "question",
    answer_field: str | None = None,
    limit: int = 64,
    draws: int = 3,
    problems: int = 0,
    new_tokens: int = 512,
    seed: int = 0,
    dtype: str = "auto",
    device: str | None = None,
    command: str = "",
    force: bool = False,
) -> Comparison:
    """Compare what arXiv:2510.01032 published with what models show, and with what untrained
    weights show.

    Prompts have the paper's form: its system prompt, the inserted tokens and the question are
    concatenated. The folder gets ``index.html``, ``paper.md`` and ``paper.json``. It also keeps
    every finished run, so that the same call resumes where an earlier one stopped.

    Args:
        models: Names, directories or files that ``load_model`` takes; the page has a column for
            each.
        out: The folder.
        prompts: The prompts, as the ``source`` of ``load_prompts``.
        field: The field of a file or dataset with the question.
        answer_field: The field with the solution; by default "solution" or "answer".
        limit: The number of prompts on which attention is measured, at least 3.
        draws: How many times each model is also measured with untrained weights, on the first 8
            prompts.
        problems: The number of problems to answer; 0 leaves accuracy out.
        new_tokens: The longest answer, in tokens.
        seed: The seed of the prompts, the conditions, the answers and the untrained weights.
        dtype: "auto", "float32", "bfloat16" or "float16".
        device: The torch device.
        command: The command line, for the record.
        force: Whether to replace a page that mechattn did not write.

    Returns:
        The comparison; ``table()`` has a row for each statement and model.

    Raises:
        MechattnError: A model, the prompts, an option or the folder cannot be used.
    """
    folder = Path(out)
    file_name_of = _checked_models(models)
    check_counts(FEWEST, limit=limit)
    check_counts(0, draws=draws, problems=problems)
    check_counts(new_tokens=new_tokens)
    dtype_named(dtype)  # raises if there is no such dtype
    check_device(device)
    check_page_place(folder / "index.html", force)

    statements = read_statements()
    loaded_prompts = load_prompts(
        prompts,
        limit=max(limit, problems),
        field=field,
        system=statements.system,
        template="joined",
        seed=seed,
        answer=answer_field,
    )
    prompts_name = provenance.name_of(prompts)
    _check_prompts(loaded_prompts, prompts_name, problems)
    folder.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        prompts=loaded_prompts[:limit],
        problems=loaded_prompts[:problems],
        draws=draws,
        new_tokens=new_tokens,
        seed=seed,
        dtype=dtype,
        device=device,
        folder=folder,
    )

    cells, results, seconds = _measure_models(file_name_of, statements, settings)
    about = {
        "made": provenance.now(),
        "command": command,
        "prompts": prompts_name,
        "limit": len(settings.prompts),
        "draws": draws,
        "untrained_prompts": min(UNTRAINED_PROMPTS, len(settings.prompts)),
        "problems": len(settings.problems),
        "new_tokens": new_tokens,
        "seed": seed,
        "seconds": seconds,
        "versions": provenance.versions(),
    }
    comparison = Comparison(statements, cells, about)
    write_text(folder / "paper.json", comparison.to_json())
    write_text(folder / "paper.md", comparison.to_markdown() + "\n")
    write_comparison(comparison, results, folder / "index.html", force)
    return comparison


def _checked_models(models: object) -> dict[str, str]:
    """The start of the names of each model's files, by the name of the model.

    Raises:
        OptionError: No names are given, or two models would write to the same files or have the
            same name on the page.
        ModelError: A name is not the name of a model.
    """
    if isinstance(models, (str, Path)):
        models = [models]
    names = list(map(str, models)) if isinstance(models, Iterable) else []
    if not names:
        raise OptionError(
            'give the name of a model, such as ma.paper("real:smollm2") or --model real:smollm2'
        )
    file_name_of = file_names(names)
    model_of: dict[str, str] = {}  # by the name on the page
    for name in file_name_of:
        short_name = provenance.name_of(name)
        namesake = model_of.setdefault(short_name, name)
        if namesake != name:
            raise OptionError(
                f"the models {namesake!r} and {name!r} would both be called {short_name!r} on the"
                " page: compare them in separate calls, each with a folder of its own"
            )
    for name in file_name_of:
        architecture_named(name)  # raises if there is no such model
    return file_name_of


def _check_prompts(prompts: Sequence[Prompt], source: str, problem_count: int) -> None:
    """Refuse fewer than three prompts, and problems without a solution. The first prompts are the
    problems to be answered.

    Raises:
        OptionError: There are too few prompts, or a problem that is to be answered has no solution.
    """
    if len(prompts) < FEWEST:
        raise OptionError(f"{source} has {len(prompts)} prompts; intervals need at least {FEWEST}")
    for prompt in prompts[:problem_count]:
        if prompt.solution is None:
            raise OptionError(
                f"{problem_count} problems are to be answered, but {prompt.where} of {source} has"
                " no solution, so no answer can be graded; name the field with the solution"
                " (answer_field=…, --answer-field), or leave problems out"
            )


def _measure_models(
    file_name_of: Mapping[str, str], statements: Statements, settings: Settings
) -> tuple[dict[str, dict[str, Cell]], list[Result], dict[str, float]]:
    """Measure each model.

    Args:
        file_name_of: The start of the names of a model's files, by the name of the model.
        statements: The statements.
        settings: The other settings of the measurement.

    Returns:
        The cells by statement and model, the results that the page draws, and the seconds that each
        model took.
    """
    results = []
    seconds = {}
    cells: dict[str, dict[str, Cell]] = {statement.key: {} for statement in statements.statements}
    for name, file_name in file_name_of.items():
        short_name = provenance.name_of(name)
        runs = ModelRuns(name, file_name, statements, settings)
        start = time.monotonic()
        for key, cell in runs.cells().items():
            cells[key][short_name] = cell
        results.append(load_result(runs.result_place))
        seconds[short_name] = round(time.monotonic() - start, 1)
    return cells, results, seconds
