"""Answers and the effects of patching on a device, against the same weights in float64 on the CPU."""

import numpy as np
import pytest
import torch

import mechattn as ma
from tests.gpu.conftest import hooked

SLASH = ma.MeaninglessTokens("/", 20)
CONDITIONS = {"slash": SLASH, "arm": ma.Baseline(intervention=ma.interventions.ARM(c=0.3))}


@pytest.fixture(scope="module")
def both(device):
    return hooked("toy:llama", torch.float32, device)


def test_answers_agree(both):
    prompts = ma.load_prompts("word-problems", limit=2)
    ours, theirs = (
        list(ma.evaluate(model, prompts, CONDITIONS).to_dataframe()["answer"]) for model in both
    )
    assert len(ours) == 6
    assert sum(map(str.__eq__, ours, theirs)) >= 5, (ours, theirs)
    assert ours[1:] != theirs[:-1], "answers in another order would be noticed"


@pytest.mark.parametrize(("at", "method"), [("z", "attribution"), (["L0H1", "L2H3"], "exact")])
def test_effects_agree(at, method, both):
    prompts = ma.load_prompts("word-problems", limit=2, with_answer=True)
    ours, theirs = (
        ma.patch(model, prompts, SLASH, at=at, method=method, direction="denoising").effects
        for model in both
    )
    for name in ("effect", "random", "whole"):
        np.testing.assert_allclose(ours[name].values, theirs[name].values, atol=2e-3)
    assert float(abs(theirs.whole).max()) > 0.02, "a wrong sign would be noticed"
