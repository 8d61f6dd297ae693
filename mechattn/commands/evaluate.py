"""The command ``mechattn evaluate``: answers under each condition, and their accuracy as a Markdown
table."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mechattn.axes import BASELINE
from mechattn.commands.from_config import build_conditions
from mechattn.commands.run_config import (
    locations_of,
    prompts_by_model,
    read_config,
    with_options,
    without_none,
)
from mechattn.errors import OptionError
from mechattn.evaluation.evaluate import evaluate
from mechattn.evaluation.evaluation import Evaluation
from mechattn.evaluation.server import Server
from mechattn.markup import markdown_table
from mechattn.model.checkpoint import tokenizer_named
from mechattn.model.hooked import HookedModel
from mechattn.model.load import dtype_named, load_model
from mechattn.store.atomic_writes import check_writable
from mechattn.toml_sections import ServerSection, TemplateWord

HEADER = (
    "condition",
    "right",
    "95 %",
    "against the baseline, points",
    "p",
    "gained, lost",
    "detectable, points",
    "unread",
    "unfinished",
)

# How the methods under the table name each test, and the intervals that go with it.
TESTS = {
    "mcnemar": "Wilson's and Newcombe's intervals, McNemar's test (mid-p)",
    "sign_flip": "score and t intervals, sign flips, over {unit}",
}


def evaluate_from_config(
    path: Path,
    *,
    server: str | None = None,
    served_model: str | None = None,
    server_key: str | None = None,
    system: str | None = None,
    template: TemplateWord | None = None,
) -> tuple[dict[str, Evaluation], list[Path]]:
    """Run the section [evaluation] of a config file. Each option replaces what the file says.

    Args:
        path: The TOML file.
        server: The address of a server that generates the answers.
        served_model: The name of the model on the server.
        server_key: The environment variable with the server's key.
        system: The text before each question.
        template: The template of the prompts.

    Returns:
        The evaluation of each model, and the files that were written.

    Raises:
        MechattnError: There is no such section, one server for several models, or something else
            that cannot be used; or the evaluation was interrupted.
    """
    config = with_options(read_config(path), system=system, template=template)
    if config.evaluation is None:
        raise OptionError(
            f'{path} has no section [evaluation]: add one with at least out = "answers.jsonl"'
        )

    section = config.evaluation.server
    chosen_server = _server(section, server, served_model, server_key)
    if chosen_server is not None and len(config.models) > 1:
        raise OptionError(
            f"{path} names {len(config.models)} models, but only one model is evaluated on a"
            " server: evaluate each separately"
        )

    # All files are checked before the first model is loaded.
    files = {}
    for name, location in locations_of(config, config.evaluation.out).items():
        files[name] = Path(location)
        check_writable(files[name])
    read_tokenizer = cache(tokenizer_named)  # each is read once
    prompts = prompts_by_model(config, read_tokenizer)
    dtype = dtype_named(config.dtype)
    if config.threads is not None:
        torch.set_num_threads(config.threads)

    loads_weights = chosen_server is None or (section is not None and section.weights)
    options = config.evaluation.model_dump(exclude={"out", "server"})
    evaluations = {}
    for name in config.models:
        tokenizer = read_tokenizer(name)
        conditions = build_conditions(config.conditions, tokenizer)
        model: str | HookedModel = name
        if loads_weights:
            model = load_model(
                name,
                tokenizer=tokenizer,
                dtype=dtype,
                device=config.device,
                verify=config.verify,
            )
        evaluations[name] = evaluate(
            model,
            prompts[name],
            conditions,
            out=files[name],
            seed=config.seed,
            server=chosen_server,
            **options,
        )

    return evaluations, list(files.values())


def accuracy_table(evaluation: Evaluation) -> str:
    """The accuracy of each condition as a Markdown table, after cautions and before the methods."""
    accuracies = evaluation.accuracy()
    unit = accuracies.attrs["unit"]
    figures_by_condition = accuracies.set_index("condition").to_dict("index")
    test_name = None
    rows = []
    for condition, figures in figures_by_condition.items():
        cells = {
            "condition": condition,
            "right": f"{100 * figures['accuracy']:.1f} %",
            "95 %": f"{100 * figures['low']:.1f} to {100 * figures['high']:.1f}",
            "unread": figures["unread"],
            "unfinished": figures["unfinished"],
        }
        if condition != BASELINE:
            change = evaluation.compare(condition)
            test_name = change["test"]  # every condition has the same
            cells |= _change_cells(change)
        rows.append([cells.get(heading, "") for heading in HEADER])

    baseline = figures_by_condition[BASELINE]
    methods = f"n = {baseline['n']}; score interval, over {unit}."
    if test_name is not None:
        tests = TESTS[test_name].format(unit=unit)
        methods = (
            f"n = {baseline['n']}; {tests}; detectable: found with 80 % power. The baseline can"
            f" fall by {100 * baseline['accuracy']:.1f} points."
        )
    cautions = [f"**{caution}**" for caution in evaluation.cautions]
    return "\n\n".join([*cautions, markdown_table(HEADER, rows), methods])


def _server(
    section: ServerSection | None, address: str | None, model: str | None, key: str | None
) -> Server | None:
    """The server of a config, with the options of the command line; None if neither names one.

    Raises:
        OptionError: The command line names a model or key, but there is no address.
    """
    options = without_none(address=address, model=model, key=key)
    if section is not None:
        options = section.model_dump(exclude={"weights"}) | options
    if not options:
        return None
    if "address" not in options:
        raise OptionError(
            "--served-model and --server-key need a server: give --server http://host:8000/v1 too"
        )
    return Server(**options)


def _change_cells(change: Mapping[str, Any]) -> dict[str, str]:
    """The cells that compare a condition with the baseline, by their headings."""
    difference = f"{100 * change['difference']:+.1f}"
    interval = f"[{100 * change['low']:+.1f}, {100 * change['high']:+.1f}]"
    cells = {
        "against the baseline, points": f"{difference} {interval}",
        "p": f"{change['p']:.2g}",
        "detectable, points": f"{100 * change['detectable']:.1f}",
    }
    if "only_first" in change:  # as with one answer per problem
        cells["gained, lost"] = f"{change['only_first']}, {change['only_second']}"
    return cells
