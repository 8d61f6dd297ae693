"""What the tests of figures share: one result with nearly all that figures show."""

import pytest

import mechattn as ma


@pytest.fixture(scope="session")
def measured(toy, prompts):
    """Eight prompts under four conditions, with the analyses of most figures; ``sel`` gives a part of it."""
    slash = ma.MeaninglessTokens("/", 20)
    conditions = {
        "slash": slash,
        "sentence": ma.RandomSentence(20),
        "masked": slash.masked(),
        "unshifted": slash.unshifted(),
    }
    analyses = [
        ma.ReceivedAttention(),
        ma.analyses.AffineShift(),
        ma.analyses.MlpActivations(),
        ma.analyses.AttentionFocus(per_query=True),
        ma.analyses.HeadUpdates(per_query=True),
        ma.analyses.TopTargetUpdates(),
        ma.analyses.BlockUpdates(),
        ma.analyses.AttentionSinks(),
        ma.analyses.AttentionBudget(),
    ]
    return ma.run(toy, prompts[:8], conditions, analyses, keep="prompts")
