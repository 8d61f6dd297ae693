"""The command line. Heavy imports happen only when a command runs, so that --help is fast."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from mechattn.errors import Interrupted, MechattnError, OptionError, shown

FIRST_LOOK = """\
mechattn measures what attention does inside a language model, with and without meaningless tokens
before the question.

  mechattn figures                               a small real model on real questions; a page
  mechattn figures --model Qwen/Qwen2.5-1.5B     your model, from the hub or a directory
  mechattn verify toy:falcon                     check that the hooked model equals the model
  mechattn paper --model YOURS                   what arXiv:2510.01032 published, beside your model
  mechattn run experiments/first/config.toml     a whole experiment from a file
  mechattn run CONFIG.toml --shard 3/16          one of 16 parts; then: mechattn merge
  mechattn evaluate CONFIG.toml                  the effect on the model's answers
  mechattn show RESULT.zarr                      a stored result, in the terminal
  mechattn report RESULT.zarr                    the same as a page: every head, and the figures
  mechattn export RESULT.zarr --csv heads.csv    every number of every head as a table
  mechattn export-netcdf RESULT.zarr RESULT.nc   all its arrays as one file, for other programs

Each takes --help. In Python: import mechattn as ma.
Completion for your shell: mechattn --install-completion
"""
DEFAULT_MODEL = "real:smollm2"
# The system prompt before the questions of GSM8K.
REASON = "Please reason step by step and put your final answer within \\boxed{}."

# The options that several commands have.
Models = Annotated[
    list[str],
    typer.Option(help="A checkpoint directory, a hub name or a toy; repeat for several."),
]
Source = Annotated[
    str, typer.Option(help='"gsm8k", "word-problems", a .jsonl file, or a hub dataset.')
]
Field = Annotated[str, typer.Option(help="The field of a file or dataset with the question.")]
System = Annotated[
    str | None,
    typer.Option(help="The text before each question; the default is the prompts' own, if any."),
]
ChatTemplate = Annotated[
    bool | None,
    typer.Option(
        "--chat-template/--no-chat-template",
        help="Use the model's chat template; by default where its tokenizer has one.",
    ),
]
Device = Annotated[
    str | None, typer.Option(help='Torch device: "cpu", "cuda:1". Default: first GPU, if any.')
]
Dtype = Annotated[
    str, typer.Option(help="float32, bfloat16 or float16; by default the checkpoint's.")
]
Seed = Annotated[int, typer.Option(help="The seed of all random draws.")]
Address = Annotated[
    str | None, typer.Option(help="Address of a Ray cluster; by default a local one.")
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Workers in a cluster; by default one per GPU or core.")
]
Memory = Annotated[
    str, typer.Option(help="How much memory each table or figure of a result may take.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace a page that mechattn did not write.")]
app = typer.Typer(
    no_args_is_help=False,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # the default mode drops "[evaluation]" from help texts
    help=(
        "Measure what attention does, with and without meaningless tokens. Start with: mechattn"
        " figures"
    ),
)


@app.callback(invoke_without_command=True)
def first_look(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Print the version or, without a command, an overview of all commands."""
    if version:
        import mechattn

        _say(f"mechattn {mechattn.__version__}")
    elif context.invoked_subcommand is None:
        _say(FIRST_LOOK)


@app.command()
def figures(
    out: Annotated[Path, typer.Option(help="The folder for the page.")] = Path("out/figures"),
    model: Models = [DEFAULT_MODEL],  # noqa: B006
    prompts: Source = "gsm8k",
    field: Field = "question",
    answer_field: Annotated[
        str | None,
        typer.Option(help="The field with an answer to read after the question; none by default."),
    ] = None,
    system: System = None,
    chat_template: ChatTemplate = None,
    limit: Annotated[int, typer.Option(help="The largest number of prompts.")] = 16,
    layer: Annotated[
        int | None,
        typer.Option(
            help="The layer to draw, from 0; by default that of the head that changes most."
        ),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(help="The heads to draw, such as 2,3,4; by default those that change most."),
    ] = None,
    text: Annotated[str, typer.Option(help="The meaningless text to repeat.")] = "/",
    separator: Annotated[
        str, typer.Option(help='The text between two repetitions; "" for none.')
    ] = " ",
    count: Annotated[
        int,
        typer.Option(
            help="The number of inserted tokens, or the nearest that a tokenizer can make."
        ),
    ] = 55,
    place: Annotated[
        str,
        typer.Option(
            help="before_question, start, middle, after_question, before_answer or random."
        ),
    ] = "before_question",
    device: Device = None,
    dtype: Dtype = "auto",
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Draw attention with and without meaningless tokens, on one page that opens offline.

    Heads are chosen by their change on one half of the prompts, and drawn on the other half.
    """
    from mechattn.commands.figures import make_figures
    from mechattn.toml_sections import config_from_values

    if system is None and prompts == "gsm8k":
        system = REASON
    prompt_section = {
        "source": prompts,
        "limit": limit,
        "field": field,
        "system": system,
        "template": _template(chat_template) or "auto",
    }
    if answer_field:
        prompt_section |= {"answer": answer_field, "with_answer": True}
    inserted = {"text": text, "count": count, "place": place, "separator": separator}
    output = {
        "result": str(out / "{model}.zarr"),
        "page": str(out / "index.html"),
        "layer": layer,
        "heads": _head_numbers(heads),
    }
    config = config_from_values(
        {
            "model": model,
            "prompts": prompt_section,
            "conditions": {"slash": inserted},
            "output": output,
            "seed": seed,
            "device": device,
            "dtype": dtype,
        }
    )
    page = make_figures(config, _command(), force)
    _say(f"Open {page} in a browser; it works offline.")


@app.command("paper")
def beside_the_paper(
    model: Models = [DEFAULT_MODEL],  # noqa: B006
    out: Annotated[Path, typer.Option(help="The folder for page, table and runs.")] = Path(
        "out/paper"
    ),
    prompts: Source = "gsm8k",
    field: Field = "question",
    answer_field: Annotated[
        str | None,
        typer.Option(help="The field with the solution; by default “solution” or “answer”."),
    ] = None,
    limit: Annotated[int, typer.Option(help="Number of prompts to measure attention on.")] = 64,
    draws: Annotated[int, typer.Option(help="Number of models with untrained weights.")] = 3,
    problems: Annotated[int, typer.Option(help="Number of problems to answer; 0 for none.")] = 0,
    new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 512,
    device: Device = None,
    dtype: Dtype = "auto",
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Show what arXiv:2510.01032 published beside what models and untrained weights show."""
    from mechattn.published.paper import paper

    comparison = paper(
        model,
        out,
        prompts=prompts,
        field=field,
        answer_field=answer_field,
        limit=limit,
        draws=draws,
        problems=problems,
        new_tokens=new_tokens,
        seed=seed,
        dtype=dtype,
        device=device,
        command=_command(),
        force=force,
    )
    _say(f"{comparison}\n\nOpen {out / 'index.html'} in a browser; it works offline.")


@app.command("run")
def run_config(
    config: Annotated[Path, typer.Argument(help="A TOML file; the README shows one.")],
    shard: Annotated[
        str | None, typer.Option(help='"3/16" computes the third of 16 parts; see mechattn merge.')
    ] = None,
    executor: Annotated[str | None, typer.Option(help='"local", or "ray" for a cluster.')] = None,
    address: Address = None,
    workers: Workers = None,
    values: Annotated[
        str | None, typer.Option(help='"float16" stores single prompts\' values in half the space.')
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Compute again, ignoring stored results and chunks.")
    ] = False,
    system: System = None,
    chat_template: ChatTemplate = None,
    force: Force = False,
) -> None:
    """Run a config file; write the result and, if configured, a page. Resumes where it stopped."""
    from mechattn.toml_sections import read_sections

    read_sections(config)  # errors in the file are reported before torch is loaded
    from mechattn.commands.run_config import run_from_config

    written = run_from_config(
        config,
        sys.argv[1:],
        shard=shard,
        executor=executor,
        address=address,
        workers=workers,
        values=values,
        fresh=fresh,
        force=force,
        system=system,
        template=_template(chat_template),
    )
    for path in written:
        _say(f"Wrote {path}")


@app.command()
def merge(
    out: Annotated[str, typer.Argument(help="The merged result: a .zarr folder.")],
    results: Annotated[
        list[str], typer.Argument(help="Results of parts of the prompts, such as from --shard.")
    ],
) -> None:
    """Merge the results of shards into one."""
    from mechattn.store.writing import merge_stored

    merge_stored(out, results)
    _say(f"Wrote {out}")


@app.command("evaluate")
def evaluate_config(
    config: Annotated[Path, typer.Argument(help="A TOML file with a section [evaluation].")],
    server: Annotated[
        str | None, typer.Option(help='Server that generates the answers: "http://host:8000/v1".')
    ] = None,
    served_model: Annotated[
        str | None, typer.Option(help="Name of the model on the server; by default its only model.")
    ] = None,
    server_key: Annotated[
        str | None, typer.Option(help="Environment variable with the server's key.")
    ] = None,
    system: System = None,
    chat_template: ChatTemplate = None,
) -> None:
    """Generate and grade answers under each condition; print accuracy with intervals. Resumes where
    it stopped."""
    from mechattn.toml_sections import read_sections

    read_sections(config)  # errors in the file are reported before torch is loaded
    _say("Loading; a bar shows the first tokens, within a minute or two.", err=True)
    from mechattn.commands.evaluate import accuracy_table, evaluate_from_config

    evaluations, written = evaluate_from_config(
        config,
        server=server,
        served_model=served_model,
        server_key=server_key,
        system=system,
        template=_template(chat_template),
    )
    for model, evaluation in evaluations.items():
        _say(f"{model}\n{accuracy_table(evaluation)}\n")
    for path in written:
        _say(f"Wrote {path}")


@app.command()
def verify(
    model: Annotated[str, typer.Argument(help="A toy, a checkpoint directory or a hub name.")],
    dtype: Dtype = "auto",
    length: Annotated[
        int, typer.Option(help="Tokens of the probe; to test a window, more than its width.")
    ] = 24,
) -> None:
    """Verify a hooked model against the model's own attention."""
    from mechattn.model.load import dtype_named, verify_model

    report = verify_model(model, dtype=dtype_named(dtype), length=length)
    _say(str(report))
    if not report.passed:
        raise typer.Exit(1)


@app.command()
def show(result: Annotated[str, typer.Argument(help="A stored result.")]) -> None:
    """Print a stored result: verdicts, quantities and provenance."""
    from mechattn.commands.stored_results import summary
    from mechattn.store.reading import load_result

    _say(summary(load_result(result)))


@app.command()
def report(
    results: Annotated[
        list[str], typer.Argument(help="Stored results; several are shown side by side.")
    ],
    out: Annotated[Path, typer.Option(help="The page.")] = Path("out/report.html"),
    layer: Annotated[
        int | None,
        typer.Option(
            help="The layer to draw; by default lines show that of the head that changes most, and"
            " other figures the first that was measured."
        ),
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="The heads, such as 2,3,4; by default chosen by the data.")
    ] = None,
    top: Annotated[
        int, typer.Option(help="Heads to choose on one half of the prompts and show on the other.")
    ] = 3,
    memory: Memory = "2GiB",
    force: Force = False,
) -> None:
    """Write a page of stored results with all their figures; it opens offline."""
    from mechattn.commands.stored_results import report as write_report

    missing = write_report(
        results,
        out,
        layer=layer,
        heads=_head_numbers(heads),
        top=top,
        command=_command(),
        memory=memory,
        force=force,
    )
    for sentence in missing:
        _say(f"Not shown: {sentence}", err=True)
    _say(f"Open {out} in a browser; it works offline.")


@app.command()
def export(
    results: Annotated[
        list[str], typer.Argument(help="Stored results; their rows are in one table.")
    ],
    csv: Annotated[
        Path, typer.Option(help="The table of every head, from the current folder.")
    ] = Path("out/heads.csv"),
    memory: Memory = "2GiB",
) -> None:
    """Write every quantity of every head, its change, its null and its q, as one CSV file."""
    from mechattn.commands.stored_results import export_csv

    missing = export_csv(results, csv, memory)
    for sentence in missing:
        _say(f"Without rows: {sentence}", err=True)
    _say(f"Wrote {csv}")


@app.command("export-netcdf")
def export_arrays(
    result: Annotated[str, typer.Argument(help="A stored result.")],
    out: Annotated[Path, typer.Argument(help="The file, which ends with .nc.")],
) -> None:
    """Write all arrays of a result as one NetCDF file."""
    from mechattn.commands.stored_results import export_netcdf

    export_netcdf(result, out)
    _say(f"Wrote {out}")


def main() -> None:
    """Run the command. A MechattnError is printed as a message, without a traceback."""
    # Torch threads that wait then sleep. By default they spin, and a toy's run takes five times as
    # long if another program needs the same core. OpenMP reads this once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        app()
    except MechattnError as error:
        _say(f"mechattn: {error}", err=True)
        # 130 is the exit code of a program that Ctrl-C stops, 2 that of a command that is misused.
        sys.exit(130 if isinstance(error, Interrupted) else 2)


def _say(text: str, err: bool = False) -> None:
    """Print a text without control characters, as it may quote files of others. All commands print
    through this function."""
    typer.echo(shown(text), err=err)


def _template(chat_template: bool | None) -> Literal["chat", "plain"] | None:
    """The template that --chat-template or --no-chat-template chooses; None without either."""
    if chat_template is None:
        return None
    if chat_template:
        return "chat"
    return "plain"


def _head_numbers(text: str | None) -> list[int] | None:
    """The heads that --heads names; None if it is omitted, and the data choose them."""
    if text is None:
        return None
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise OptionError(f"--heads {text!r}: give heads such as 2,3,4") from None


def _command() -> str:
    """The command line, as results and pages record it."""
    from mechattn.results.provenance import command_of

    return command_of(sys.argv[1:])
