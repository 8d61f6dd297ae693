"""The pictures of the concept pages are those that the script makes, and their numbers are what mechattn computes."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from mechattn.functional.focus import mean_distance, top_two
from mechattn.functional.head_outputs import orientation
from mechattn.functional.received import received_attention
from tests.scripts import loaded

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
pictures = loaded(ROOT / "experiments" / "pictures.py", "pictures")


def square(rows):
    """A pattern as a tensor; a key that a query does not see has 0."""
    width = len(rows[-1])
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_the_stored_picture_is_the_one_that_is_made(name):
    stored = (pictures.OUT / f"{name}.svg").read_text(encoding="utf-8")
    assert stored == pictures.PICTURES[name]().svg(), "run python experiments/pictures.py"
    picture = ElementTree.fromstring(stored)
    assert int(picture.get("width")) <= 640


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_page_shows_it_with_words(name):
    shown = [
        found[1]
        for page in DOCS.rglob("*.md")
        for found in re.finditer(
            rf"!\[([^\]]+)\]\(../images/concepts/{name}\.svg\)<br>\*.+\*", page.read_text("utf-8")
        )
    ]
    assert len(shown) == 1
    assert len(shown[0]) > 20


def test_received_attention_is_that_of_mechattn():
    below = square(pictures.pattern()).tril(-1).sum(0)[None, None]
    there = received_attention(below, torch.arange(3.0, -1, -1).double()[None])[0, 0]
    drawn = pictures.received(pictures.pattern(), include_self=False)
    assert drawn == pytest.approx(there.tolist(), nan_ok=True)


def test_focus_is_that_of_mechattn():
    pattern = square(pictures.pattern())
    first, second, _ = top_two(pattern)
    assert pictures.focus()["concentration"] == pytest.approx(float((first - second)[-1]))
    assert pictures.focus()["distance"] == pytest.approx(float(mean_distance(pattern)[-1]))


def test_the_affine_form_is_exact_in_the_example():
    """λ times attention without the insertion is attention with it, as the scores of the original keys are the same."""
    rows = zip(
        pictures.pattern(), pictures.inserted_pattern(), pictures.scales(), pictures.TO_INSERTED
    )
    for row, with_tokens, scale, more in rows:
        kept = with_tokens[: pictures.PLACE] + with_tokens[pictures.PLACE + len(more) :]
        assert kept == pytest.approx([scale * p for p in row])
    assert pictures.scales()[-1] < 0.9
    assert sum(pictures.flow().values()) == pytest.approx(1)


def test_the_update_is_that_of_mechattn():
    stream, update = torch.tensor([pictures.RESIDUAL, pictures.UPDATE]).double()
    there = orientation(stream @ update, update.norm(), stream.norm())
    assert pictures.update()["orientation"] == pytest.approx(float(there))
    assert pictures.update()["magnitude"] == pytest.approx(float(update.norm() / stream.norm()))
