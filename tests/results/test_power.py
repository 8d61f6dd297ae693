"""Power is lost at any moment: the old one or the new one, whole, and the same call goes on; nothing that ended is lost."""

import pytest

from mechattn.errors import OutputError
from mechattn.render.html_views import GENERATOR, save_page
from mechattn.store import atomic_writes
from tests.power import power_losses, write
from tests.results.small import emptied, numbers, numbers_at


@pytest.fixture
def disk(tmp_path):
    """Where a run writes, and where what a loss of power leaves of it is put."""
    for name in ("now", "after"):
        (tmp_path / name).mkdir()
    return tmp_path / "now", tmp_path / "after"


def each_state(after, states):
    for state in states:
        emptied(after)
        write(state, after)
        yield


def test_a_result_saved_over_another(small_results, disk):
    (now, after), name = disk, "r.zarr"
    old, new = map(numbers, small_results[:2])
    small_results[0].save(now / name)
    losses = power_losses(now, lambda: small_results[1].save(now / name))
    outcomes = [numbers_at(after / name) for _ in each_state(after, losses)]
    assert set(outcomes) == {old, new}
    assert outcomes[-2:] == [new, new]
    assert len(outcomes) > 5


def test_the_trial_finds_what_is_not_flushed(small_results, disk, monkeypatch):  # negative control
    now, after = disk
    small_results[0].save(now / "r.zarr")
    monkeypatch.setattr(atomic_writes, "flush", lambda paths: None)
    losses = power_losses(now, lambda: small_results[1].save(now / "r.zarr"))

    def is_bad():
        try:
            return numbers_at(after / "r.zarr") is None
        except OutputError:
            return True

    assert any(is_bad() for _ in each_state(after, losses))


def test_an_empty_page_is_replaced(tmp_path):
    """As some systems leave one when power is lost: there is nothing to lose."""
    (tmp_path / "p.html").write_text("")
    save_page(tmp_path / "p.html", GENERATOR)
    assert (tmp_path / "p.html").read_text() == GENERATOR
