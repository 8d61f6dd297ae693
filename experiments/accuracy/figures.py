"""Accuracy of the toys by condition, by length, by place, by text, under ARM, with parts and with several samples.

Each figure is an HTML file under out/accuracy; answers are kept beside them, so a second call only draws. About twenty
minutes on two cores. For real models give their names.

python experiments/accuracy/figures.py [model …]
"""

import sys
from pathlib import Path

import mechattn as ma

OUT = Path("out/accuracy")
SLASH = ma.MeaninglessTokens("/", count=55)


def file_name(model: str) -> str:
    """For the files of a model."""
    return model.split(" ")[0].replace(":", "-").replace("/", "-")


def conditions(model, prompts) -> dict[str, dict]:
    """The conditions of each figure."""
    recorded = ma.record_affine(model, prompts, SLASH, layers=range(model.cfg.n_layers))
    texts = {
        "/": SLASH,
        "?": ma.MeaninglessTokens("?", count=55),
        "he": ma.conditions.RepeatedWord("he", 55),
    }
    arms = {
        f"c={c}, p1={p1}": ma.Baseline(intervention=ma.interventions.ARM(c=c, p1=p1, form="paper"))
        for c in (0.1, 0.3, 1.0)
        for p1 in (80.0, 90.0, 99.5)
    }
    return {
        "length": ma.sweep(SLASH, count=[10, 25, 40, 55, 70]),
        "place": ma.sweep(SLASH, place=["start", "before_question", "random", "before_answer"]),
        "text": texts
        | {"random tokens": ma.conditions.RandomTokens(55), "sentence": ma.RandomSentence(55)},
        "arm": arms,
        "parts": {
            "slash": SLASH,
            "scale and shift": ma.Baseline(intervention=recorded),
            "scale": ma.Baseline(intervention=recorded.only("scale")),
            "shift": ma.Baseline(intervention=recorded.only("shift")),
            **(
                {"taken, not moved": SLASH.unshifted()}
                if "falcon" not in str(model.cfg.model_name)
                else {}
            ),
        },
    }


def several(name: str, model, prompts) -> ma.Evaluation:
    """Eight sampled answers to each of forty problems (figure 6)."""
    arm = ma.Baseline(intervention=ma.interventions.ARM(c=0.13, p1=95.0, form="released_llama"))
    out = OUT / f"{file_name(name)}-samples.jsonl"
    some = {"slash": SLASH, "arm": arm}
    return ma.evaluate(
        model, prompts[:40], some, samples=8, temperature=1.0, new_tokens=90, out=out
    )


def main(names: list[str]) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    prompts = ma.load_prompts("word-problems", limit=100, seed=11)
    found: dict[str, dict[str, ma.Evaluation]] = {}
    noise = {}
    for name in names:
        model = ma.load_model(name)
        found.setdefault("samples", {})[name] = several(name, model, prompts)
        noise[name] = ma.baseline_noise(model, prompts, new_tokens=90)
        for figure, some in conditions(model, prompts).items():
            out = OUT / f"{file_name(name)}-{figure}.jsonl"
            made = ma.evaluate(model, prompts, some, new_tokens=90, out=out)
            found.setdefault(figure, {})[f"{name} (toy)" if name.startswith("toy:") else name] = (
                made
            )
    tables = {
        figure: {name: e.accuracy() for name, e in made.items()} for figure, made in found.items()
    }
    drawn = {
        "length": ma.render.accuracy(tables["length"], "count"),
        "place": ma.render.accuracy(tables["place"], "place"),
        "text": ma.render.accuracy(tables["text"]),
        "parts": ma.render.accuracy(tables["parts"]),
    }
    for name, made in found["samples"].items():
        table = made.pass_at_k([1, 2, 4, 8])
        drawn[f"samples-{file_name(name)}"] = ma.render.by_samples({"pass@k": table}, name)
    for name, table in noise.items():
        print(f"{name}: the baseline again\n{table.round(3).to_string(index=False)}")
    for figure, made in drawn.items():
        made.write_html(OUT / f"{figure}.html", include_plotlyjs=True)
    for name, evaluation in found["arm"].items():
        best = evaluation.best()
        print(
            f"{name}: best of 9 ARMs on one half {best['condition']} ({100 * best['chosen_on']:.0f} %); on the other "
            f"half {100 * best['difference']:+.1f} points [{100 * best['low']:+.1f}, {100 * best['high']:+.1f}], "
            f"p = {best['p']:.2f}"
        )
    for name, evaluation in found["parts"].items():
        table = evaluation.comparisons()
        print(f"{name}: the whole and its parts\n{table.round(3).to_string(index=False)}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["toy:llama", "toy:qwen2", "toy:gemma3", "toy:falcon"])
