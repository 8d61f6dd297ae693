"""What a notebook shows: executed in a real kernel that cannot reach a network."""

import base64
import gzip
import re

import nbformat
import pytest
from nbclient import NotebookClient

CUT = """
import socket
def refuse(self, address, *rest):
    raise AssertionError(f"asked for {address}")
socket.socket.connect = refuse
socket.getaddrinfo = lambda *a, **k: refuse(None, a)
"""
CELLS = [
    "import mechattn as ma; model = ma.load_model('toy:llama'); prompts = ma.load_prompts('word-problems', limit=4)",
    "ma.verify_model(model)",
    "ma.MeaninglessTokens('/', 5)",
    "ma.MeaninglessTokens('<', 3).apply(prompts[0], model)",
    "result = ma.run(model, prompts, {'slash': ma.MeaninglessTokens('/', 5)}, keep='prompts'); result",
    "ma.pattern(model, prompts[0], 0, [0, 1])",
    "ma.render.received_text(result, 0)",
    "ma.render.received_attention(result, 0, [0])",
    "result['received_attention']",
]


@pytest.fixture(scope="module")
def shown():
    """The outputs of each cell."""
    cells = [nbformat.v4.new_code_cell(source) for source in [CUT, *CELLS]]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    return [cell.outputs for cell in notebook.cells[1:]]


def html_of(outputs):
    found = [o["data"]["text/html"] for o in outputs if "text/html" in o.get("data", {})]
    assert len(found) == 1, outputs
    return found[0]


def test_a_verification_report_is_a_table(shown):
    page = html_of(shown[1])
    assert "toy:llama" in page
    assert "passed" in page
    assert {"logits", "mask", "heads"} <= set(re.findall(r"<td[^>]*>([^<]*)</td>", page))


def test_a_condition_shows_its_options(shown):
    page = html_of(shown[2])
    assert "MeaninglessTokens" in page
    assert re.search(r">count</td><td[^>]*>5<", page)


def test_a_sequence_marks_what_was_inserted(shown):
    page = html_of(shown[3])
    inserted = re.findall(r'<span title="inserted"[^>]*>([^<]*)</span>', page)
    assert inserted[0] == "inserted", "the key"
    assert len(inserted) == 1 + 3, "the key, and each token"
    assert set(inserted[1:]) <= {" ", "&lt;"}
    assert "&lt;bos&gt;" in page


def test_a_result_says_what_it_is(shown):
    page = html_of(shown[4])
    assert "4 layers × 8 heads" in page
    assert "MeaninglessTokens(text=&#x27;/&#x27;, count=5" in page


def test_views_carry_their_script(shown):
    for outputs, script in ((shown[5], True), (shown[6], False)):
        frame = html_of(outputs)
        assert frame.startswith("<iframe srcdoc=")
        assert not re.search(r"src=(&quot;|\")https?:", frame)
        page = gzip.decompress(
            base64.b64decode(re.search(r"atob\(&quot;([^&]*)&quot;", frame)[1])
        ).decode()
        assert ("CircuitsVis.render(" in page) == script
        assert "toy:llama (toy, 1.0 M parameters)" in page
        assert len(frame) < (7e5 if script else 2e4), "a notebook with ten views stays small"


def test_figures_and_datasets_show_themselves(shown):
    kinds = set().union(*(output.get("data", {}) for output in shown[7]))
    assert "application/vnd.plotly.v1+json" in kinds
    assert "received_by_segment" in html_of(shown[8])
