"""How many inputs each test tries: 40, or MECHATTN_FUZZ (``make fuzz`` has 10,000)."""

import faulthandler
import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "fuzz",
    max_examples=int(os.environ.get("MECHATTN_FUZZ", "40")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)


@pytest.fixture(autouse=True)
def no_hang():
    """A test that hangs ends with the place where it does."""
    faulthandler.dump_traceback_later(3600, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
