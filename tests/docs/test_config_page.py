"""The page of config files names every key that there is, with its default, and no other."""

import inspect
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from mechattn.commands.from_config import ANALYSES, CONDITIONS, INTERVENTIONS
from mechattn.commands.run_config import read_config
from mechattn.toml_sections import (
    ConditionSection,
    Config,
    EvaluationSection,
    OutputSection,
    PromptsSection,
    ServerSection,
)

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "api" / "config.md").read_text(encoding="utf-8")
SECTIONS = {
    "At the top": Config,
    "[prompts]": PromptsSection,
    "[output]": OutputSection,
    "[conditions.NAME]": ConditionSection,
    "[evaluation]": EvaluationSection,
    "[evaluation.server]": ServerSection,
}


def rows(title, first="key"):
    """The rows of the table whose first heading says ``first``, in the part with this title."""
    part = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    table = part.partition(f"| {first} |")[2].partition("\n\n")[0]
    return [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[2:]
    ]


@pytest.mark.parametrize("title", SECTIONS)
def test_the_keys_of_a_section(title):
    found = {}
    for keys, *rest in rows(title):
        named = re.findall(r"`(\w+)`", keys)
        defaults = rest[0].split(", ") if len(named) == 2 else [rest[0]] * len(named)
        found |= dict(zip(named, defaults, strict=True))
    known = SECTIONS[title].model_fields
    assert set(found) == set(known)
    for name, field in known.items():
        if field.is_required():
            assert found[name] in ("required", "below")
        elif isinstance(field.default, (str, int, float)):
            assert found[name] == json.dumps(field.default)


@pytest.mark.parametrize(
    ("title", "what", "known"),
    [
        ("[conditions.NAME]", "intervention", INTERVENTIONS),
        ("[[analyses]]", "analysis", ANALYSES),
    ],
)
def test_the_options_of_a_kind(title, what, known):
    found = {
        row[0].strip("`| "): re.findall(r"`(\w+)`", row[1]) if len(row) > 1 else []
        for row in rows(title, f"kind of {what}")
    }
    assert found == {kind: options(cls) for kind, cls in known.items()}


def test_the_options_of_a_condition():
    """They stand on the page of conditions, to which the page of config files sends its readers."""
    page = (DOCS / "concepts" / "conditions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)\((.*?)\)` \|", page, re.MULTILINE)
    described = {name: re.findall(r"\w+", names) for name, names in rows}
    inserting = CONDITIONS.keys() - {"Baseline", "Counterpart"}
    assert described == {name: options(CONDITIONS[name]) for name in inserting}


def options(kind):
    """What a config can give: no tensors, and interventions as a section."""
    if inspect.isclass(kind):
        names = [field.name for field in fields(kind) if field.repr]
        return [name for name in names if name not in ("means", "intervention")]
    return list(inspect.signature(kind).parameters)[1:]


def test_the_config_at_its_top_is_one(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)[1])
    assert read_config(path).model == "toy:llama"
