"""What a notebook shows of a value: HTML, which is made without a network. (A real kernel runs first steps when the site is built.)"""

import base64
import gzip
import re
import socket

import pytest
from IPython.core.formatters import DisplayFormatter

import mechattn as ma

SLASH = ma.MeaninglessTokens("/", 5)


@pytest.fixture(autouse=True)
def without_network(monkeypatch):
    def refuse(*address, **options):
        raise AssertionError(f"asked for {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def result(toy, prompts):
    return ma.run(toy, prompts[:4], {"slash": SLASH}, keep="prompts")


def html_of(value):
    """What a cell that ends with this value shows."""
    data, _ = DisplayFormatter().format(value)
    return data["text/html"]


def test_a_verification_report_is_a_table(toy):
    page = html_of(ma.verify_model(toy))
    assert "toy:llama" in page
    assert "passed" in page
    assert {"logits", "kernel", "heads"} <= set(re.findall(r"<td[^>]*>([^<]*)</td>", page))


def test_a_condition_shows_its_options():
    page = html_of(SLASH)
    assert "MeaninglessTokens" in page
    assert re.search(r">count</td><td[^>]*>5<", page)


def test_a_sequence_marks_what_was_inserted(toy, prompts):
    page = html_of(ma.MeaninglessTokens("<", 3).apply(prompts[0], toy))
    inserted = re.findall(r'<span title="inserted"[^>]*>([^<]*)</span>', page)
    assert inserted[0] == "inserted", "the key"
    assert len(inserted) == 1 + 3, "the key, and each token"
    assert set(inserted[1:]) <= {" ", "&lt;"}
    assert "&lt;bos&gt;" in page


def test_a_result_says_what_it_is(result):
    page = html_of(result)
    assert "4 layers × 8 heads" in page
    assert "MeaninglessTokens(text=&#x27;/&#x27;, count=5" in page
    assert "received_by_segment" in html_of(result["received_attention"])


def page_in(frame):
    """The page that a view packs into its frame."""
    assert frame.startswith("<iframe srcdoc=")
    assert not re.search(r"src=(&quot;|\")https?:", frame)
    packed = re.search(r"atob\(&quot;([^&]*)&quot;", frame)[1]
    return gzip.decompress(base64.b64decode(packed)).decode()


def test_a_view_carries_its_script(toy, prompts):
    frame = html_of(ma.pattern(toy, prompts[0], 0, [0, 1]))
    page = page_in(frame)
    assert "CircuitsVis.render(" in page
    assert "toy:llama (toy, 1.0 M parameters)" in page
    assert len(frame) < 7e5, "a notebook with ten views stays small"


def test_a_view_without_a_script_is_small(result):
    frame = html_of(ma.render.received_text(result, 0))
    page = page_in(frame)
    assert "CircuitsVis.render(" not in page
    assert "toy:llama (toy, 1.0 M parameters)" in page
    assert len(frame) < 2e4
