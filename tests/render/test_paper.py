"""Figures for a paper: their width, their colours, their files; a sentence where nothing can draw them."""

import json
from threading import Event

import numpy as np
import plotly.graph_objects as go
import pytest

import mechattn as ma
from mechattn.errors import OptionError, OutputError


@pytest.fixture(scope="module")
def figure(slash_result):
    return ma.render.received_attention(slash_result, 0, [1, 2, 3])


def test_width_and_fonts(figure):
    before = json.loads(figure.to_json())
    made = ma.render.for_paper(figure)
    assert made.layout.width == pytest.approx(170 / 25.4 * 96)
    assert made.layout.template.layout.font.size == pytest.approx(8 * 96 / 72)
    assert not made.layout.title.text
    assert json.loads(figure.to_json()) == before, "the figure itself stays as it is"
    for drawn_trace, trace in zip(made.data, figure.data, strict=True):
        np.testing.assert_array_equal(drawn_trace.y, trace.y)  # dilution has gaps, which are NaN


def test_the_caption_has_title_small_print_and_sentence(slash_result, toy):
    figure = ma.render.received_attention(slash_result, 0, [1, 2])
    said = ma.render.caption(figure)
    assert said.startswith(
        "toy:llama (toy, 1.0 M parameters): received attention; mean over 12 prompts, pointwise"
    )
    assert "its own vertical scale. Attention received by the question" in said
    assert "<" not in said
    prompts = ma.load_prompts("word-problems", limit=3)
    named = ma.run(toy, prompts, {"<think>": ma.MeaninglessTokens("/", 4)})
    assert "<think>: " in ma.render.caption(ma.render.changes(named))


def test_what_cannot_be_a_column(figure):
    too_narrow = r"3 panels side by side are too narrow in 85 mm: .* draw one panel"
    with pytest.raises(OptionError, match=too_narrow):
        ma.render.for_paper(figure, "single")
    with pytest.raises(OptionError, match="choose one of 'single', 'double'"):
        ma.render.for_paper(figure, "triple")


def test_no_figure_is_taller_than_a_page():
    tall = go.Figure(go.Scatter(y=[1]), layout_height=5000)
    assert ma.render.for_paper(tall).layout.height == pytest.approx(235 / 25.4 * 96)


def test_titles_have_lines_that_fit_and_room(slash_result):
    two = ma.render.for_paper(ma.render.received_attention(slash_result, 0, [1, 2]))
    room_for_a_line = two.layout.margin.t
    two.layout.annotations[0].text = "a long title " * 8
    paper = ma.render.for_paper(two)
    lines = paper.layout.annotations[0].text.split("<br>")
    assert " ".join(lines) == ("a long title " * 8).strip()
    assert all(len(line) < 60 for line in lines)
    assert paper.layout.margin.t - room_for_a_line == pytest.approx(
        (len(lines) - 1) * 1.45 * 8 / 72 * 96
    )


@pytest.mark.usefixtures("chromium")
def test_files(slash_result, tmp_path):
    figure = ma.render.change_map(slash_result)
    path = ma.render.write_image(figure, tmp_path / "a" / "map.png", "single")
    image = path.read_bytes()
    assert image.startswith(b"\x89PNG")
    width = int.from_bytes(image[16:20])
    assert width == pytest.approx(85 / 25.4 * 300, abs=2), "85 mm at 300 dots to the inch"
    drawing = ma.render.write_image(figure, tmp_path / "map.pdf", "single")
    assert drawing.read_bytes().startswith(b"%PDF")


class Hangs:
    """A figure of which the first ``times`` attempts to draw it never end."""

    def __init__(self, times):
        self.left = times

    def write_image(self, path, scale):
        self.left -= 1
        if self.left >= 0:
            Event().wait()
        path.write_text(f"at scale {scale}")


def test_chromium_that_does_not_answer(tmp_path, monkeypatch):
    monkeypatch.setattr("mechattn.render.print_size._PATIENCE", 0.5)
    monkeypatch.setattr("mechattn.render.print_size.for_paper", lambda figure, *_, **__: figure)
    once = ma.render.write_image(Hangs(times=1), tmp_path / "once.svg")
    assert once.read_text() == "at scale 1", "the second attempt drew it"
    with pytest.raises(
        OutputError, match=r"has not drawn .*never\.svg within 1.0 s, in two attempts: try again"
    ):
        ma.render.write_image(Hangs(times=2), tmp_path / "never.svg")


def test_without_chromium_a_sentence(figure, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    monkeypatch.setattr(
        "choreographer.browsers.chromium.chromium_based_browsers", {}, raising=False
    )
    with pytest.raises(OutputError, match="apt install chromium"):
        ma.render.write_image(figure, tmp_path / "figure.png")
    assert not (tmp_path / "figure.png").exists()


def test_without_kaleido_a_sentence(figure, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "kaleido", None)
    with pytest.raises(OutputError, match=r"mechattn\[images\]"):
        ma.render.write_image(figure, tmp_path / "figure.png")
