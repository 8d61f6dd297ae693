"""What is no kind of random weights, and no seed of them."""

import pytest

import mechattn as ma
from mechattn.errors import OptionError


def test_an_unknown_kind_or_seed_is_refused_before_a_model_is_loaded():
    with pytest.raises(
        OptionError, match=r"kind='permuted': choose one of .initialised., .shuffled."
    ):
        ma.random_weights("no/such-model", "permuted")
    with pytest.raises(OptionError, match=r"seed=-1: give a whole number"):
        ma.random_weights("no/such-model", seed=-1)
