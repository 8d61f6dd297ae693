"""The bytes that are foretold for a large run are those of a small one."""

from pathlib import Path

import pytest
import torch

import mechattn as ma
from tests.scripts import loaded

SCRIPT = Path(__file__).parents[2] / "experiments" / "benchmarks" / "growth.py"


@pytest.fixture(scope="module")
def growth():
    return loaded(SCRIPT, "growth")


@pytest.mark.parametrize("keep", ["moments", "prompts"])
def test_the_bytes_are_those_of_a_result(toy, growth, keep):
    analyses = [
        ma.ReceivedAttention(),
        ma.analyses.AffineShift(),
        ma.analyses.MlpActivations(),
        ma.analyses.AttentionFocus(),
    ]
    tokens = torch.arange(5, 5 + 3 * 20).reshape(3, 20)  # prompts of one length
    tokens[:, 0] = toy.tokenizer.bos_token_id
    conditions = {"slash": ma.MeaninglessTokens(count=7, place="start")}
    result = ma.run(toy, tokens, conditions, analyses, keep=keep)
    real = sum(
        dataset[name].nbytes
        for dataset in result.datasets.values()
        for name in dataset
        if dataset[name].dtype.kind in "fi"
    )
    foretold = growth.stored_bytes(analyses, toy.cfg.n_layers, toy.cfg.n_heads, 3, 2, 20, 7, keep)
    assert sum(foretold.values()) == real


def test_the_table_is_written(growth, capsys):
    growth.main()
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("| on 8 GPUs | ") for line in lines)
