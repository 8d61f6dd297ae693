"""A page is written whole or not at all, and takes the place of a page of ours alone."""

import os
import resource

import pytest

from mechattn.errors import OutputError
from mechattn.markup import markdown_table
from mechattn.render.html_views import GENERATOR, View, check_page_place, save_page

VIEW = View("<p>seen</p>")


@pytest.fixture
def little_room():
    """No file can be longer than 10,000 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


LARGE = View("x" * 50_000)


def test_a_full_disk_leaves_the_old_page(tmp_path, little_room):
    path = tmp_path / "p.html"
    VIEW.save(path)
    before = path.read_bytes()
    with pytest.raises(OutputError, match=r"p\.html could not be written: File too large"):
        LARGE.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["p.html"]


OURS = (
    "<!doctype html><html><head><meta charset='utf-8'>"
    + GENERATOR
    + ' 0.1.0"><title>x</title></head>'
)


@pytest.mark.parametrize(
    ("content", "ours"),
    [
        (OURS, True),
        (VIEW.page(), True),
        ("", True),  # what a lost flush to the disk leaves
        ("<html><head><meta name='generator' content='mkdocs-1.6'></head>", False),
        (
            f"<html><head><style>p {{}}</style></head><body><script>const t = `{GENERATOR}`</script></body>",
            False,
        ),
        ("<html>" + "x" * 70_000 + GENERATOR, False),
        ("\\documentclass{article}", False),
    ],
)
def test_a_page_is_known_by_its_head(tmp_path, content, ours):
    path = tmp_path / "p.html"
    path.write_text(content)
    if not ours:
        with pytest.raises(OutputError, match="was not written by mechattn, so it is not replaced"):
            check_page_place(path)
        with pytest.raises(OutputError):
            save_page(path, OURS)
        assert path.read_text() == content

    save_page(path, OURS, force=not ours)
    save_page(path, OURS)
    assert path.read_text() == OURS


def test_a_bar_in_a_cell_of_markdown_is_escaped():
    assert markdown_table(["a|b"], []) == "| a\\|b |\n|---|"


def test_a_page_is_no_part_of_a_result(slash_result, tmp_path):
    slash_result.save(tmp_path / "r.zarr")
    for place in ("r.zarr/p.html", "r.zarr/figures/p.html", "new.zarr/p.html"):
        with pytest.raises(OutputError, match=r"a folder for a stored result only"):
            VIEW.save(tmp_path / place)
    assert [p.name for p in tmp_path.iterdir()] == ["r.zarr"]
    slash_result.save(tmp_path / "r.zarr")


def test_a_link_is_followed_and_a_folder_is_not_replaced(tmp_path):
    (tmp_path / "public").mkdir()
    link = tmp_path / "p.html"
    link.symlink_to("public/p.html")
    VIEW.save(link)
    VIEW.save(link)
    assert link.is_symlink()
    assert (tmp_path / "public" / "p.html").read_text() == VIEW.page()
    with pytest.raises(OutputError, match="is a folder; name a file in it"):
        VIEW.save(tmp_path / "public", force=True)
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(
        OutputError, match="was not written by mechattn"
    ):  # nor does it wait for somebody to write
        VIEW.save(tmp_path / "pipe", force=True)
