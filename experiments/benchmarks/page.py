"""How large a page is, when its first screen is painted, and how long a click on a head takes, in Chromium.

    python experiments/benchmarks/page.py --out out/page-benchmark

The result is a toy's whose layers and heads are repeated, with noise of 5 %, up to 28 layers × 28 heads; six
conditions, 200 positions. What a page holds and draws is that of a real model of this size; what it says is nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np

import mechattn as ma

CONDITIONS = {
    "slash": ma.MeaninglessTokens("/", 55),
    "sentence": ma.RandomSentence(55),
    "random": ma.conditions.RandomTokens(55),
    "masked": ma.MeaninglessTokens("/", 55).masked(),
    "unshifted": ma.MeaninglessTokens("/", 55).unshifted(),
}


def measured(prompts: int, positions: int) -> ma.Result:
    """A toy's result on prompts that are cut to the same number of positions with the inserted tokens."""
    model = ma.load_model("toy:llama")
    texts = [prompt.question for prompt in ma.load_prompts("word-problems", limit=5 * prompts)]
    room = positions - 55 - 1
    questions = []
    for i in range(prompts):
        ids = model.tokenizer(" ".join(texts[5 * i : 5 * i + 5]), add_special_tokens=False)[
            "input_ids"
        ][:room]
        questions.append(model.tokenizer.decode(ids))
    analyses = [
        ma.ReceivedAttention(),
        ma.analyses.AttentionFocus(),
        ma.analyses.HeadUpdates(),
        ma.analyses.AttentionSinks(),
    ]
    return ma.run(model, questions, CONDITIONS, analyses, keep="prompts")


def grown(result: ma.Result, layers: int, heads: int) -> ma.Result:
    """The same result with its layers and heads repeated, each with its own noise."""
    generator = np.random.default_rng(0)
    made = {}
    for name, dataset in result.datasets.items():
        if "layer" in dataset.dims:
            dataset = dataset.isel(layer=np.arange(layers) % dataset.sizes["layer"]).assign_coords(
                layer=range(layers)
            )
        if "head" in dataset.dims:
            dataset = dataset.isel(head=np.arange(heads) % dataset.sizes["head"]).assign_coords(
                head=range(heads)
            )
            for variable in dataset.data_vars.values():
                if "head" in variable.dims and variable.dtype.kind == "f":
                    shape = [
                        size if dim in ("layer", "head") else 1
                        for dim, size in variable.sizes.items()
                    ]
                    noisy = variable.values * generator.normal(1, 0.05, shape)
                    variable.values = noisy.astype(variable.dtype)
        made[name] = dataset
    about = json.loads(json.dumps(result.provenance))
    about["model"] |= {
        "name": f"toy:{layers} layers × {heads} heads, repeated",
        "layers": layers,
        "heads": heads,
    }
    about["measured_layers"] = list(range(layers))
    return ma.Result(made, about)


def timed(path: Path, clicks: int) -> dict[str, Any]:
    """Milliseconds until the first paint, until the map can be used, and from a click to the frame after its room."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        opened = [_opened(browser, path) for _ in range(3)]
        page = browser.new_page(viewport={"width": 1250, "height": 900})
        page.goto(path.as_uri())
        page.wait_for_function("document.documentElement.dataset.ready")
        count = page.locator("#map .cell").count()
        each = [page.evaluate(_CLICK, f"head-{(i * 37) % count}") for i in range(clicks)]
        browser.close()
    paint, ready = (statistics.median(times) for times in zip(*opened, strict=True))
    return {
        "first paint": paint,
        "ready": ready,
        "click, median": statistics.median(each),
        "click, most": max(each),
    }


_CLICK = """(id) => new Promise((done) => {
  const start = performance.now();
  document.getElementById(id).dispatchEvent(new MouseEvent("click", { bubbles: true }));
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - start)));
})"""


def _opened(browser: Any, path: Path) -> tuple[float, float]:
    page = browser.new_page(viewport={"width": 1250, "height": 900})
    page.goto(path.as_uri())
    page.wait_for_function("document.documentElement.dataset.ready")
    ready = page.evaluate("performance.now()")
    page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    page.close()
    return paint, ready


def main() -> None:
    """Make the page, measure it, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/page-benchmark"))
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--heads", type=int, default=28)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--positions", type=int, default=200)
    parser.add_argument("--clicks", type=int, default=15)
    given = parser.parse_args()
    result = grown(measured(given.prompts, given.positions), given.layers, given.heads)
    path = result.page(given.out / "page.html", heads=[0, 1, 2])
    print(
        f"{given.layers} × {given.heads} heads, {len(result.conditions)} conditions, {given.positions} positions"
    )
    print(f"size: {path.stat().st_size / 1e6:.1f} MB")
    for name, value in timed(path, given.clicks).items():
        print(f"{name}: {value:.0f} ms")


if __name__ == "__main__":
    main()
