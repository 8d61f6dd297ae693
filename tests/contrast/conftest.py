"""What the tests of comparisons share."""

import pytest

import mechattn as ma


@pytest.fixture(scope="session")
def result(toy, prompts):
    """Twelve prompts under four conditions, one of which inserts more tokens and one of which hides them."""
    slash = ma.MeaninglessTokens("/", 20)
    conditions = {
        "slash": slash,
        "sentence": ma.RandomSentence(20),
        "long": ma.conditions.RandomTokens(25),
        "masked": slash.masked(),
    }
    analyses = [
        ma.ReceivedAttention(),
        ma.analyses.AffineShift(),
        ma.analyses.SegmentFlow(),
        ma.analyses.AttentionFocus(),
        ma.analyses.HeadUpdates(),
    ]
    return ma.run(toy, prompts, conditions, analyses)
