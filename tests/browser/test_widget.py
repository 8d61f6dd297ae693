"""The widget's script in a page that stands in for the notebook; what it sends goes to the widget in Python."""

import json

import pytest

import mechattn as ma
from mechattn.pages.embedded import template

HOST = """<!doctype html><meta charset="utf-8"><body><div id="cell"></div><script type="module">
const module = await import(URL.createObjectURL(new Blob([ESM], { type: "text/javascript" })));
const state = STATE, listeners = {};
window.sent = [];
window.set = (name, value) => { state[name] = value; (listeners[`change:${name}`] ?? []).forEach((tell) => tell()); };
const model = { get: (name) => state[name], send: (content) => window.sent.push(content),
  on: (name, tell) => (listeners[name] ??= []).push(tell), off: () => {} };
module.default.render({ model, el: document.getElementById("cell") });
</script>"""


@pytest.fixture(scope="module")
def result(toy, prompts):
    analyses = [ma.ReceivedAttention(), ma.analyses.AttentionMap()]
    return ma.run(
        toy, prompts[:4], {"slash": ma.MeaninglessTokens("/", 6)}, analyses, keep="prompts"
    )


def test_a_click_comes_back_to_python_and_a_selection_goes_to_the_page(opened, result, tmp_path):
    view = ma.browse(result)
    view.selected = "L2H1"  # before it is shown
    state = {name: getattr(view, name) for name in ("source", "height", "selected")}
    words = [json.dumps(one).replace("<", "\\u003c") for one in (template("widget.js"), state)]
    (tmp_path / "host.html").write_text(
        HOST.replace("ESM", words[0], 1).replace("STATE", words[1], 1), "utf-8"
    )
    page = opened(tmp_path / "host.html")
    inside = page.frame_locator("iframe")

    def heard():
        for content in page.evaluate("window.sent.splice(0)"):
            view._handle_custom_msg(content, [])
        return view.selected, view.prompt

    assert inside.locator("#room h3").inner_text() == "Layer 2, head 1"
    inside.locator("#head-11").click()
    page.wait_for_function("window.sent.at(-1)?.selected === 'L1H3'")
    assert heard() == ("L1H3", 0)
    inside.locator("#room details[data-part=pattern] summary").click()
    inside.locator("#room [data-prompt='1']").first.click()
    page.wait_for_function("window.sent.at(-1)?.prompt === 1")
    assert heard() == ("L1H3", 1)
    page.evaluate("set('selected', 'L0H2')")
    page.wait_for_function("window.sent.at(-1)?.selected === 'L0H2'")
    assert inside.locator("#room h3").inner_text() == "Layer 0, head 2"
    page.evaluate("postMessage({ chosen: { selected: 'L3H3' } }, '*')")  # not from the page
    page.wait_for_timeout(100)
    assert heard() == ("L0H2", 1)
