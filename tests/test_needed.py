"""What a test needs from outside the clone is never missing in silence where it counts, nor is a check of types."""

from pathlib import Path
from types import SimpleNamespace

import jaxtyping
import pytest
import torch
from beartype import beartype
from jaxtyping import Float
from torch import Tensor

from tests.conftest import need, pytest_collection_modifyitems, pytest_runtest_setup


def outcome(monkeypatch, ci, without, there=False):
    for name, value in (("CI", ci), ("MECHATTN_WITHOUT", without)):
        monkeypatch.setenv(name, value)
    with pytest.raises(
        (pytest.skip.Exception, pytest.fail.Exception), match="no browser: install one"
    ) as said:
        need("browser", there, "install one")
    return said.type


def test_what_is_missing_fails_in_ci_and_is_skipped_elsewhere(monkeypatch):
    assert outcome(monkeypatch, "", "") is pytest.skip.Exception
    assert outcome(monkeypatch, "true", "") is pytest.fail.Exception
    assert outcome(monkeypatch, "true", "site") is pytest.fail.Exception
    assert outcome(monkeypatch, "true", "browser site") is pytest.skip.Exception
    need("browser", "/usr/bin/chromium", "install one")


def test_what_asks_for_a_browser_is_marked(request):
    """Whoever has a browser can then run those that a machine without one has skipped."""
    assert not request.node.get_closest_marker("browser")
    request.node.fixturenames.append("chromium")
    pytest_collection_modifyitems([request.node])
    assert request.node.get_closest_marker("browser")


def test_types_are_checked_in_a_folder_that_is_named(request):
    @jaxtyping.jaxtyped(typechecker=beartype)
    def transposed(rows: Float[Tensor, "a b"]) -> Float[Tensor, "a b"]:
        return rows.T

    path = Path("functional", "test_any.py")
    pytest_runtest_setup(SimpleNamespace(path=path, nodeid=str(path)))
    try:
        with pytest.raises(jaxtyping.TypeCheckError):
            transposed(torch.ones(2, 3))
    finally:
        pytest_runtest_setup(request.node)
