"""What the tests of bad input share."""

import pytest


@pytest.fixture
def unreached(monkeypatch):
    """Makes a model fail the test when it runs; gives the model."""

    def reached(*args, **kwargs):
        # No handler of errors takes this for one.
        pytest.fail("the model ran before the input was checked")

    def guarded(model):
        for way in ("run_with_hooks", "forward"):  # a pass without hooks takes the second
            monkeypatch.setattr(model, way, reached)
        monkeypatch.setattr(model._mechattn.native, "forward", reached)
        return model

    return guarded


@pytest.fixture
def no_forward(toy, unreached):
    """A toy whose forward pass must not be reached."""
    return unreached(toy)
