"""A real model that somebody else trained: it moves little where the toys fall, and the README's figures are these."""

import re
from pathlib import Path

import numpy as np
import pytest

import mechattn as ma
from tests.scripts import loaded

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments" / "stories"
README = (FOLDER / "README.md").read_text(encoding="utf-8")


measure = loaded(FOLDER / "measure.py", "stories_measure")


@pytest.fixture(scope="module")
def real(models):
    return ma.load_model(str(models / measure.REAL))


@pytest.fixture(scope="module")
def result(real):
    return measure.measured(real, measure.stories())


def test_the_real_model_hardly_moves_where_toys_fall(result, toy):
    verdict = result.verdict("slash", null="uniform")
    assert -0.05 < verdict.change.estimate < 0
    assert verdict.null.estimate < -0.4
    assert verdict.above.all(), "each head falls less than one that attends uniformly"
    assert -0.05 < result.verdict("sentence").change.estimate < 0, "whatever is inserted"
    assert measure.measured(toy, measure.stories(12)).verdict("slash").change.estimate < -0.15


def test_the_change_is_that_of_loops(result):
    """The README's figure in plain float64: received attention by prompt, layer and head, then means."""
    received = result["received_attention"].received_by_segment.sel(segment="question")
    by_prompt = received.stack(cell=("layer", "head")).transpose("condition", "prompt", "cell")
    slash, baseline = (by_prompt.sel(condition=name).values for name in ("slash", "baseline"))
    logs = [
        np.log(sum(with_slashes) / sum(without))
        for with_slashes, without in zip(slash.astype(float), baseline.astype(float), strict=True)
    ]
    expected = np.expm1(np.mean(logs))
    assert result.verdict("slash").change.estimate == pytest.approx(expected, abs=1e-9)
    assert result.verdict("sentence").change.estimate != pytest.approx(expected, abs=1e-4), (
        "another condition differs"
    )


def test_the_readme_has_the_figures_of_the_script(result):
    cells = re.search(r"^\| stories260K \| stories \| (.*) \|$", README, re.MULTILINE)[1].split(
        " | "
    )
    tokens, slash, dilution, uniform, sentence = *cells[:4], cells[-1]
    assert (
        tokens
        == f"{float((result['sequences'].origin.sel(condition='baseline') >= 0).sum('pos').mean()):.0f}"
    )
    numbers = [
        float(n.replace("−", "-"))
        for n in re.findall(r"[+−]\d+\.\d", f"{slash} {dilution} {uniform} {sentence}")
    ]
    verdict, other = result.verdict("slash"), result.verdict("sentence")
    of_uniform = result.verdict("slash", null="uniform").null
    expected = [*verdict.change, verdict.null.estimate, of_uniform.estimate, *other.change]
    assert numbers == pytest.approx([100 * float(x) for x in expected], abs=0.06)


def test_what_is_said_of_the_figures_quotes_the_tables():
    tables = README.split(measure.MARKS[0])[1].split(measure.MARKS[1])[0]
    known = set(re.findall(r"\d+\.\d", tables))
    project = (ROOT / "docs" / "concepts" / "toys.md").read_text(encoding="utf-8")
    paragraph = next(
        part for part in project.split("\n\n") if part.startswith("**A real model need not")
    )
    prose = README.replace(tables, "")
    for said in (paragraph, prose):
        quoted = re.findall(r"(?<![\d.])\d+\.\d(?![\d.])", said)
        assert quoted
        assert set(quoted) <= known, set(quoted) - known
    assert paragraph.count("\n") < 5
