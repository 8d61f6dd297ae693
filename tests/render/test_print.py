"""All figures at the widths of a paper: no words on each other or cut off, colours of the palette alone."""

import json
import re
from itertools import combinations

import pandas as pd
import pytest
from plotly.offline import get_plotlyjs

import mechattn as ma
from mechattn.commands.run_config import DRAW_FUNCTIONS as OF_RESULTS
from mechattn.render.draw import COLOURS, FADED, GREY, NEUTRAL, SHADE, faint
from mechattn.render.figure_declaration import FIGURES
from tests.figures_config import needed_options
from tests.known_answers.known_circuits import known_circuits

pytestmark = pytest.mark.usefixtures(
    "chromium"
)  # so that the figures are made once, where they are drawn too
BOXES = """(json) => {
  const figure = JSON.parse(json);
  document.body.innerHTML = "<div></div>";
  const drawn = document.body.firstChild;
  drawn.style = `width:${figure.layout.width}px;height:${figure.layout.height}px`;
  return Plotly.newPlot(drawn, figure.data, figure.layout, { staticPlot: true }).then(() => {
    const from = drawn.getBoundingClientRect();
    return [...drawn.querySelectorAll("text")]
      .map((text) => [text.textContent.trim(), text.getBoundingClientRect()])
      .filter(([words, box]) => words && box.width)
      .map(([words, b]) => [words, b.left - from.left, b.top - from.top, b.right - from.left, b.bottom - from.top]);
  });
}"""
COLOUR = re.compile(r"#[0-9a-fA-F]{3,8}\b|rgba?\([^)]*\)")
OPTIONS = {
    "received_attention": {"layer": [0, 1], "heads": [0]},
    "received_by_model": {"heads": 0},
    "scale_by_layer": {"condition": "slash"},
    "update_map": {"condition": "slash"},
    "agreement": {"condition": "slash"},
}
PALETTE = {*COLOURS, GREY, "#444", SHADE, FADED, NEUTRAL}


def table(names, **columns):
    made = {"condition": names, "n": 40, **columns}
    frame = pd.DataFrame(made)
    return frame.assign(low=frame.iloc[:, 2] - 0.1, high=frame.iloc[:, 2] + 0.05)


@pytest.fixture(scope="module")
def figures(measured, toy, prompts):
    result = measured.sel(condition=["baseline", "slash", "sentence", "unshifted"])
    slash = ma.MeaninglessTokens("/", 20)
    counts = ma.sweep(ma.MeaninglessTokens("/"), count=[5, 20])
    counted = table(["baseline", *counts], accuracy=[0.9, 0.8, 0.5])
    tried = [(name, k) for name in ("baseline", "slash") for k in (1, 2, 4)]
    samples = table(
        [name for name, _ in tried],
        estimate=[0.5, 0.6, 0.7, 0.4, 0.5, 0.6],
        k=[k for _, k in tried],
    )
    answers = ma.evaluate(toy, prompts[:4], {"slash": slash}, new_tokens=8)
    answered = ma.load_prompts("word-problems", limit=3, with_answer=True)
    patched = ma.patch(toy, answered, slash, at=[(0, 1), (1, 2), (3, 3)], direction="denoising")
    draw = ma.render
    circuit = known_circuits()[0]
    of_results = {
        name: draw_figure(result, **OPTIONS.get(name, needed_options(draw_figure)))
        for name, draw_figure in OF_RESULTS.items()
    }
    return of_results | {
        "budget of four conditions": draw.attention_budget(measured),
        "three heads": draw.received_attention(result, 0, [1, 2, 3]),
        "rank": draw.by_layer(result, "shift_rank_one_share"),
        "accuracy": draw.accuracy({"toy:llama": counted}, "count"),
        "by_samples": draw.by_samples({"pass@k": samples, "of another model": samples}),
        "dose_curves": draw.dose_curves(counted, ma.run(toy, prompts[:4], counts)),
        "while_answering": draw.while_answering(ma.while_answering(toy, answers, prompts[:4], {"slash": slash})),
        "verdicts": draw.verdicts([result, result]),
        "circuit_map": draw.circuit_map(ma.circuit(circuit.model(), circuit.prompts(6, 0), ma.conditions.Counterpart())),
        "patching_map": draw.patching_map(patched),
        "patching_effects": draw.patching_effects(patched),
    }  # fmt: skip


@pytest.fixture(scope="module")
def drawn(browser):
    """The words of a figure, each with its box, as plotly draws it."""
    page = browser.new_page()
    page.set_content("<body></body>")
    page.add_script_tag(content=get_plotlyjs())
    yield lambda figure: page.evaluate(BOXES, figure.to_json())
    page.close()


def collisions(boxes, figure):
    """Pairs of words that lie on each other by more than a pixel (a line's box has two above the letters), and clipped ones."""
    found = []
    width, height = figure.layout.width, figure.layout.height
    for words, left, top, right, bottom in boxes:
        if min(left, top, width - right, height - bottom) < -1:
            found.append(f"{words!r} is clipped")
    for (words, left, top, right, bottom), (other, *edges) in combinations(boxes, 2):
        beside = min(right, edges[2]) - max(left, edges[0])
        below = min(bottom, edges[3]) - max(top, edges[1])
        if beside > 1 and below > 2:
            found.append(f"{words!r} on {other!r}")
    return found


def test_no_words_lie_on_each_other(figures, drawn):
    """At the narrower of the widths that a figure can have."""
    assert set(FIGURES) <= set(figures)
    for name, figure in figures.items():
        has_panels_beside = len({axis.domain for axis in figure.select_xaxes()}) > 1
        column = "double" if has_panels_beside else "single"
        paper = ma.render.for_paper(figure, column)
        boxes = drawn(paper)
        assert len(boxes) > 4, name
        assert not collisions(boxes, paper), name


def test_words_on_each_other_would_be_noticed(figures, drawn):  # negative control
    paper = ma.render.for_paper(figures["scale_by_layer"], "double")
    paper.update_layout(width=85 / 25.4 * 96)
    assert any(" on " in words for words in collisions(drawn(paper), paper))
    paper = ma.render.for_paper(figures["three heads"], "double")
    paper.layout.margin.t = 0
    assert any("clipped" in words for words in collisions(drawn(paper), paper))


def foreign(figure):
    """Colours outside the palette, and scales by a name that is not the sequential one."""
    drawn = json.loads(figure.to_json())
    drawn["layout"].pop("template")
    ours = {colour.lower() for colour in PALETTE}
    named = set()
    for trace in drawn["data"]:
        scale = trace.get("colorscale") or trace.get("marker", {}).get("colorscale")
        if isinstance(scale, str):
            named.add(scale)
        elif scale and len(scale) > 5:  # cividis
            ours |= {colour.lower() for _, colour in scale}
    faints = {faint(colour).rsplit(",", 1)[0] for colour in COLOURS}
    found = {colour for colour in COLOUR.findall(json.dumps(drawn)) if colour.lower() not in ours}
    return {colour for colour in found if colour.rsplit(",", 1)[0] not in faints} | named


def test_colours_are_those_of_the_palette(figures):
    assert not {name: of for name, figure in figures.items() if (of := foreign(figure))}


def test_another_colour_would_be_noticed(figures):  # negative control
    made = ma.render.for_paper(figures["changes"])
    made.data[0].marker.color = "#ff0000"
    assert foreign(made) == {"#ff0000"}
