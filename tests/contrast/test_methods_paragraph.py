"""The paragraph for a paper: every number in it is in the provenance, and it changes with the run."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

import mechattn as ma
from mechattn.errors import OptionError
from mechattn.results.result import Result

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)*")


def numbers(text):
    return {match.rstrip(",").replace(",", "") for match in NUMBER.findall(text)}


@pytest.fixture(scope="module")
def prompts():
    made = ma.load_prompts("word-problems", limit=16)
    return [replace(prompt, group=f"template {chr(97 + i % 8)}") for i, prompt in enumerate(made)]


@pytest.fixture(scope="module")
def result(toy, prompts):
    conditions = {
        "slash": ma.MeaninglessTokens("/", 20),
        "arm": ma.Baseline(intervention=ma.interventions.ARM(seed=4)),
    }
    return ma.run(
        toy, prompts, conditions, [ma.ReceivedAttention(), ma.analyses.AttentionFocus()], seed=3
    )


def test_every_number_is_one_that_the_result_holds(result):
    tables = [
        result.compare("slash"),
        result.compare("slash", unit="prompt", level=0.9, resamples=3333),
    ]
    text = result.methods(*tables)
    held = numbers(json.dumps(result.provenance))
    for table in tables:
        held |= numbers(str(table.attrs)) | {
            f"{100 * table.attrs['level']:g}",
            str(table.n.iloc[0]),
        }
    counts = (result["sequences"].origin == -1).sum("pos").values
    held |= set(map(str, np.unique(counts)))
    held |= {
        str(len(set(result["sequences"].group.values))),
        str(result["sequences"].sizes["prompt"]),
    }
    assert len(numbers(text)) > 15
    assert numbers(text) <= held, numbers(text) - held


def test_what_it_says(result):
    text = result.methods(result.compare("slash"))
    for part in (
        "toy:llama (986,240 parameters, 4 layers of 8 heads, float32)",
        f"mechattn {result.provenance['versions']['mechattn']}, transformer-lens ",
        "was verified against the model's own attention",
        "The run used 8 groups of 16 prompts (hash ",
        "and the unit of replication was the group.",
        "“slash” (MeaninglessTokens(text='/', count=20, place='before_question', separator=' ', own_line=False); 20 tokens inserted)",
        "and “arm” (Baseline(intervention=ARM(",
        "; no tokens inserted), in one pass.",
        "received attention (queries original, include_self False, skip_first False) and attention focus",
        "in all layers.",
        "its value under dilution of the baseline's attention and uniform attention.",
        "“slash” was compared with “baseline” in received of the question as log-ratios, paired by groups (n = 8): "
        "95 % t intervals; sign-flip tests (all patterns of signs) against dilution of the baseline's attention; "
        "Benjamini-Hochberg over 32 tests: layer × head; seed 0.",
        "The random seed was 3.",
    ):
        assert part in text, part
    words = "(9,999 random patterns of signs) against no difference, as no null is known"
    assert words in result.methods(result.compare("slash", unit="prompt", quantity="concentration"))
    assert "compared" not in result.methods()


def test_it_changes_with_the_run(toy, prompts, result):
    alone = [replace(prompt, group=None) for prompt in prompts]
    other = ma.run(toy, alone[:5], {"sentence": ma.RandomSentence(7)}, layers=[1, 2], seed=5)
    text = other.methods()
    for phrase in ("The run used 5 prompts", "7 tokens inserted", "in layers 1 and 2.", "was 5."):
        assert phrase in text
        assert phrase not in result.methods()
    model = result.provenance["model"] | {"verified": False, "revision": "abc"}
    about = {**result.provenance, "model": model, "engine": "hooks"}
    text = Result(result.datasets, about).methods()
    for phrase in ("was not verified", "revision abc", "through the model's hooks"):
        assert phrase in text


def test_a_table_of_something_else_is_refused(result):
    adjusted = ma.adjust([result.compare("slash", columns="all")])
    for table in (result.heads("entropy"), adjusted):
        with pytest.raises(OptionError, match="table 0 has no record of how it was made"):
            result.methods(table)
