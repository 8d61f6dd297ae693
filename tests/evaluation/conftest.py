"""What the tests of servers share."""

import pytest

from tests.evaluation.stand_in import Engine


@pytest.fixture(scope="session")
def engine(toy):
    """Plain generation by toy:llama, remembered."""
    return Engine(toy._mechattn.native, toy.tokenizer)
