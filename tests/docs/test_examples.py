"""The examples of the gotchas and the recipes run, and the tests that pages name are there."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import plotly.io
import pytest
import torch

import mechattn as ma

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for folder in ("gotchas", "how-to") for path in (DOCS / folder).glob("*.md"))
GOTCHAS = sorted(path for path in (DOCS / "gotchas").glob("*.md") if path.stem != "index")


def examples(page: Path) -> list[str]:
    """Blocks of python; those marked "py" need what is not here, such as a GPU."""
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


FEW = 3  # prompts, unless a page needs more
# Edges and heads are ranked on one half, and reported on the other.
NEEDED = {"which-circuit": 6, "figures-for-a-paper": 6, "pick-heads": 12}


def at_most(load, limit):
    """The loader of prompts, which takes at most so many of those that it is asked for."""

    def load_few(*args, **options):
        asked = options.get("limit") or limit
        return load(*args, **{**options, "limit": min(asked, limit)})

    return load_few


def loaded(toy, load, name, **options):
    """A model; toy:llama is loaded already."""
    if name == "toy:llama" and not options:
        return toy
    return load(name, **options)


def few_tokens(evaluate, *args, new_tokens=None, **options):
    """``ma.evaluate`` with answers of eight tokens at most."""
    return evaluate(*args, new_tokens=8, **options)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if examples(p)], ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_examples_run(page, toy, tmp_path, monkeypatch):
    """As they are on the page; recipes, which promise no number, with fewer prompts, answers and inserted tokens."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plotly.io, "show", lambda *args, **kwargs: None)
    names = {
        "__name__": "example",
        "ma": ma,
        "model": toy,
        "prompts": ma.load_prompts("word-problems", limit=12),
        "slash": ma.MeaninglessTokens("/", count=55),
    }
    is_recipe = page.parent.name == "how-to"
    if is_recipe:
        limit = NEEDED.get(page.stem, FEW)
        monkeypatch.setattr(ma, "load_prompts", at_most(ma.load_prompts, limit))
        monkeypatch.setattr(ma, "pairs", at_most(ma.pairs, limit))
        monkeypatch.setattr(ma, "load_model", partial(loaded, toy, ma.load_model))
        monkeypatch.setattr(ma, "evaluate", partial(few_tokens, ma.evaluate))
        names["prompts"] = names["prompts"][:limit]
        names["slash"] = ma.MeaninglessTokens("/", count=5)
    for block in examples(page):
        code = block.replace("count=55", "count=5") if is_recipe else block
        exec(compile(code, str(page), "exec"), names)
    is_checked = "assert" in "".join(examples(page))
    assert is_checked or is_recipe or page.stem == "index", (
        "the example of a gotcha shows the trap, or the guard, by an assert"
    )


@pytest.mark.parametrize("page", GOTCHAS, ids=lambda path: path.stem)
def test_a_gotcha_is_complete_and_its_tests_exist(page):
    text = page.read_text(encoding="utf-8")
    for part in ("**Symptom.** ", "**Why.** ", "**What mechattn does.** ", "**Shown by**"):
        assert part in text, part
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert named
    for file, test in named:
        assert re.search(
            rf"^def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE
        ), (file, test)


def test_every_page_is_in_the_navigation():
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    written = [path.relative_to(DOCS) for path in DOCS.rglob("*") if path.suffix in (".md", ".py")]
    pages = [str(path) for path in written if path.parts[0] not in ("hooks", "assets")]
    assert len(pages) > 50
    assert not [page for page in pages if page not in listed]


@pytest.mark.parametrize("back", [0, 1, 3])
def test_the_analysis_of_the_how_to_survives_a_change(back, toy, prompts):
    """Its example with another option, against whole patterns; blocks of queries begin in the middle too."""
    blocks = examples(DOCS / "how-to" / "write-an-analysis.md")
    (block,) = (block for block in blocks if "class KeyBack" in block)
    names = {"ma": ma, "model": toy, "prompts": prompts, "slash": ma.MeaninglessTokens()}
    exec(block, names)
    prompt = prompts[0]
    result = ma.run(toy, prompt, analyses=[names["KeyBack"](back)], memory="256KiB")
    read = result["sequences"].tokens.isel(prompt=0).sel(condition="baseline").values
    _, cache = toy.run_with_cache(torch.tensor(read)[None])
    found = result["key_back"].paid.isel(prompt=0).sel(condition="baseline")
    for layer in range(toy.cfg.n_layers):
        slow = cache["pattern", layer][0].diagonal(-back, -2, -1).mean(-1)
        np.testing.assert_allclose(found.sel(layer=layer), slow, rtol=1e-5, atol=1e-6)
