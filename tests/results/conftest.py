"""What the tests of stored results share."""

from functools import cache

import pytest

import mechattn as ma
from mechattn.results.provenance import versions
from tests.results.small import small_result


@pytest.fixture(scope="module")
def small_results():
    """What a result must hold to be used is asked elsewhere; versions are looked up once, files flushed by one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mechattn.results.provenance.versions", cache(versions))
        patch.setattr("mechattn.store.atomic_writes.FLUSHES_AT_ONCE", 1)
        for module in ("reading", "writing"):
            patch.setattr(f"mechattn.store.{module}.problem_of", lambda *given: None)
        yield [small_result(place) for place in range(3)]


@pytest.fixture(scope="module")
def small_job(prompts):
    """A job of two chunks, which the first two small results stand for."""
    conditions = {"slash": ma.MeaninglessTokens(count=2)}
    return ma.Job("toy:llama", prompts[:2], conditions, chunk=1, verify=False)
