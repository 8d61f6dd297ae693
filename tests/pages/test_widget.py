"""The widget without a browser: what the page says comes to Python, and only that."""

import sys

import numpy as np
import pandas as pd
import pytest

import mechattn as ma
from mechattn.errors import OptionError
from mechattn.render.html_views import View

CHOSEN = {"selected": "L1H2", "prompt": 1, "condition": "slash", "quantity": "entropy"}


@pytest.fixture(scope="module")
def result(toy, prompts):
    analyses = [ma.ReceivedAttention(), ma.analyses.AttentionFocus(), ma.analyses.AttentionMap()]
    return ma.run(
        toy, prompts[:4], {"slash": ma.MeaninglessTokens("/", 6)}, analyses, keep="prompts"
    )


@pytest.fixture(scope="module")
def page(result):
    return ma.browse(result, live=False)


@pytest.fixture
def view(page, result):
    """What ``ma.browse`` gives, of a page that is made once."""
    from mechattn.pages.widget import Browser

    return Browser(page, result)


def test_what_the_page_says_is_selected(view):
    view._handle_custom_msg(CHOSEN, [])
    assert {name: getattr(view, name) for name in CHOSEN} == CHOSEN


def test_a_wrong_message_changes_nothing(view):
    view._handle_custom_msg(CHOSEN, [])
    for message in (
        "L1H3",
        {"selected": "L1H3"},
        CHOSEN | {"selected": "L1H99"},
        CHOSEN | {"selected": "<b>"},
        CHOSEN | {"selected": 3},
        CHOSEN | {"other": 1},
    ):
        view._handle_custom_msg(message, [])
        assert {name: getattr(view, name) for name in CHOSEN} == CHOSEN, message


def test_a_wrong_prompt_leaves_all_as_it_was(view):
    view._handle_custom_msg(CHOSEN | {"selected": "L0H1", "prompt": 99}, [])
    assert (view.selected, view.prompt) == ("", 0)


def test_a_selection_set_is_sent_to_the_page(view, monkeypatch):
    sent = []
    monkeypatch.setattr(
        type(view), "notify_change", lambda self, change: sent.append((change.name, change.new))
    )
    view.selected = "L0H3"
    assert sent == [("selected", "L0H3")]
    assert view.get_state("selected") == {"selected": "L0H3"}  # what goes to the page


def test_a_selection_that_there_is_not_is_refused(view):
    for name, value in (("selected", "L9H0"), ("selected", "2.3"), ("prompt", 4), ("prompt", -1)):
        with pytest.raises(OptionError, match=f"{name}="):
            setattr(view, name, value)


def test_the_rows_are_those_of_compare(view, result):
    with pytest.raises(OptionError, match="no head is selected"):
        view.table()
    view._handle_custom_msg(CHOSEN, [])
    every = result.compare("slash", quantity="entropy")
    pd.testing.assert_frame_equal(view.table(), every.query("layer == 1 and head == 2"))
    assert not view.table().equals(every.query("layer == 1 and head == 3"))


def test_the_prompts_in_which_a_head_does_most(view, result):
    view._handle_custom_msg(CHOSEN, [])
    table = view.prompts()
    values = (
        result["attention_focus"].entropy.sel(segment="question", layer=1, head=2).astype(float)
    )
    by_hand = np.log(values.sel(condition="slash") / values.sel(condition="baseline"))
    assert sorted(table.prompt) == sorted(result["sequences"].prompt.values)
    np.testing.assert_allclose(table.difference, by_hand.sel(prompt=table.prompt.values), rtol=1e-6)
    assert (abs(table.beyond).diff().dropna() <= 0).all()
    of_table = (
        result.compare("slash", quantity="entropy", columns="all")
        .set_index(["layer", "head"])
        .loc[(1, 2)]
    )
    assert table.beyond.mean() == pytest.approx(of_table.beyond)
    with pytest.raises(OptionError, match="head='2': give a head such as"):
        ma.Contrast(result, "slash").by_prompt("2")
    with pytest.raises(OptionError, match="'baseline' inserts no tokens"):
        ma.Contrast(result, "slash", segment="inserted").by_prompt("L1H2")
    view.condition = "baseline"
    with pytest.raises(OptionError, match=r"nothing is compared: set \.condition"):
        view.table()


def test_the_pattern_is_that_of_the_prompt(view, toy, prompts):
    view._handle_custom_msg(CHOSEN, [])
    numbers = [one.body.split('"attention":')[1].split('"attentionHeadNames"')[0] for one in (
        view.pattern(toy), ma.pattern(toy, prompts[1], 1, [2]), ma.pattern(toy, prompts[2], 1, [2]))]  # fmt: skip
    assert numbers[0] == numbers[1] != numbers[2]


def test_it_is_the_page(page, result, tmp_path):
    view = ma.browse(result)
    assert type(page) is View
    assert view.page() == page.page()
    view.save(tmp_path / "browse.html")
    assert (tmp_path / "browse.html").read_text(encoding="utf-8") == page.page()


def test_without_the_extra_there_is_the_page_alone(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.delitem(sys.modules, "mechattn.pages.widget", raising=False)
    assert type(ma.browse(result)) is View
