"""A figure's declaration is all that a report and a config file need to know of it."""

import inspect

import plotly.graph_objects as go
import pytest

import mechattn as ma
from mechattn.analysis import ANALYSES
from mechattn.commands.stored_results import figures_of
from mechattn.errors import OptionError
from mechattn.render import figure_declaration

DATASETS = {make().name for make in ANALYSES}


@pytest.fixture(scope="module")
def results(toy, prompts):
    """With a condition, and with the baseline alone."""
    analyses = [ma.ReceivedAttention(), ma.analyses.AttentionSinks()]
    slash = {"slash": ma.MeaninglessTokens("/", 5)}
    return [ma.run(toy, prompts[:4], named, analyses) for named in (slash, {})]


def test_all_that_draws_a_figure_is_declared():
    drawing = {
        name
        for name, thing in vars(ma.render).items()
        if inspect.isfunction(thing) and inspect.signature(thing).return_annotation == "go.Figure"
    }
    assert drawing - {"for_paper"} == set(figure_declaration.FIGURES)
    for one in figure_declaration.FIGURES.values():
        named = {one.needs} if isinstance(one.needs, str) else set(one.needs.values())
        assert named <= DATASETS | {"", "evaluation", "patching", "circuit"}
        assert one.needs or "quantity" in one.takes
        assert all(set(options) <= set(one.takes) for options in one.report)


def test_a_report_shows_what_the_result_has(results):
    for result, expected in zip(
        results,
        (
            ["change_map", "changes", "by_layer"],  # received attention leads the page
            ["by_layer"],
        ),
    ):
        shown = figures_of(result, 1)
        assert [draw.__name__ for draw, _ in shown] == expected
        assert shown[-1][1] == {"quantity": "span_mass"}
        for draw, options in shown:
            if result.conditions == ["baseline"]:
                with pytest.raises(OptionError, match="no prompt has 'span_mass' with 'baseline'"):
                    draw(result, **options)  # nothing is inserted; a report says so
            else:
                assert isinstance(draw(result, **options), go.Figure)


def test_a_new_figure_is_shown_once_it_is_declared(results):
    before = dict(figure_declaration.FIGURES)
    try:

        @figure_declaration.declare("attention_sinks", compares=True, report=[{"note": "a"}])
        def sinks_of_mine(result, condition="baseline", layer=0, quantity=None, note=""):
            return go.Figure()

        @figure_declaration.declare("affine_shift", report=[{}])
        def not_measured(result):
            return go.Figure()

        with_slash, alone = (figures_of(result, 2) for result in results)
        assert (sinks_of_mine, {"condition": "slash", "layer": 2, "note": "a"}) in with_slash
        assert sinks_of_mine not in [draw for draw, _ in alone]
        assert not_measured not in [draw for draw, _ in with_slash]
    finally:
        figure_declaration.FIGURES.clear()
        figure_declaration.FIGURES.update(before)
