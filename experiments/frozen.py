"""Whether two versions of the package give the same numbers: four toys, all analyses, comparisons, patching, answers.

python experiments/frozen.py write out/before.npz                     with one version installed
python experiments/frozen.py write out/after.npz                      with the other
python experiments/frozen.py compare out/before.npz out/after.npz     the largest relative difference of each array
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

import mechattn as ma

os.environ["TQDM_DISABLE"] = "1"
TOYS = ("toy:llama", "toy:gemma3", "toy:qwen2", "toy:falcon")
CLOSE = 1e-12  # relative to the largest number of the array


def conditions(model: str) -> dict[str, object]:
    """Insertions at several places, controls, an intervention and a masked condition."""
    kinds, slash = ma.conditions, ma.MeaninglessTokens("/", count=20)
    return {
        "slash": slash,
        "sentence": ma.RandomSentence(count=20),
        "start": ma.MeaninglessTokens("/", count=20, place="start"),
        "masked": slash.masked(),
        **(
            {} if model == "toy:falcon" else {"unshifted": slash.unshifted()}
        ),  # it takes no position ids
        "tokens": kinds.RandomTokens(count=20),
        "arm": ma.Baseline(intervention=ma.interventions.ARM(c=0.13, p1=99.5, seed=0)),
    }


def analyses(model: object) -> list[object]:
    """Every analysis that the model has."""
    kinds = ma.analyses
    made = [
        kinds.ReceivedAttention(),
        kinds.AffineShift(),
        kinds.AttentionFocus(),
        kinds.AttentionSinks(),
    ]
    made += [
        kinds.BlockUpdates(),
        kinds.DirectLogits(),
        kinds.HeadUpdates(),
    ]
    made += [
        kinds.TopTargetUpdates(),
        kinds.MlpActivations(),
        kinds.SegmentFlow(),
        kinds.SegmentLogits(),
    ]
    return made


def tables(name: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """The datasets of a run as tables, and what is computed from them."""
    model = ma.load_model(name)
    prompts = ma.load_prompts("word-problems", limit=12)
    result = ma.run(
        model,
        prompts,
        conditions=conditions(name),
        analyses=analyses(model),
        keep="prompts",
        seed=1,
    )
    for analysis, dataset in result.datasets.items():
        for variable, values in dataset.items():
            if values.dtype.kind in "fiub":
                yield f"{analysis}.{variable}", pd.DataFrame({"values": values.values.ravel()})
    for dataset in result.datasets.values():
        for variable, values in dataset.items():
            if {"prompt", "condition", "layer", "head"} == set(values.dims):
                for scale in ("log-ratio", "difference"):
                    asked = ma.Contrast(
                        result, "slash", quantity=str(variable), scale=scale, resamples=999
                    )
                    try:
                        yield f"compare.{variable}.{scale}", asked.table(columns="all")
                    except ma.MechattnError as error:
                        yield (
                            f"compare.{variable}.{scale}.refused",
                            pd.DataFrame({"words": [len(str(error))]}),
                        )
    for condition in result.conditions[1:]:
        yield f"received.{condition}", result.compare(condition, columns="all")
        verdict = result.verdict(condition)
        yield f"verdict.{condition}", pd.DataFrame({"words": [len(str(verdict))]})
    yield "select", result.compare("slash", select="half", columns="all")
    yield "stability", result.stability("slash")
    yield "heads", result.heads("entropy", top=None)
    answered = ma.load_prompts("word-problems", limit=4, with_answer=True)
    slash = ma.MeaninglessTokens("/", count=10)
    for part in ("z", "v", "resid_post", "pattern"):
        if part == "pattern" and name == "toy:falcon":
            continue  # computed outside its hooks
        method = "attribution" if part == "z" else "exact"
        patched = ma.patch(model, answered, slash, at=part, method=method, direction="denoising")
        for variable, values in patched.effects.items():
            yield f"patch.{part}.{variable}", pd.DataFrame({"values": values.values.ravel()})
    answers = ma.evaluate(
        model, ma.load_prompts("word-problems", limit=6), conditions={"slash": slash}
    )
    yield "answers", answers.accuracy()


def write(path: Path) -> None:
    """Compute all tables and save their numeric columns."""
    warnings.simplefilter("ignore")
    made = {}
    for name in TOYS:
        for table, values in tables(name):
            for column in values.select_dtypes(["number", "bool"]):
                made[f"{name}/{table}/{column}"] = values[column].to_numpy()
        print(name, len(made), "arrays", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **made)


def compare(one: Path, other: Path) -> None:
    """Print what is missing and what differs."""
    before, after = np.load(one), np.load(other)
    apart = sorted(set(before.files) ^ set(after.files))
    same, count = 0, 0
    for name in sorted(set(before.files) & set(after.files)):
        a, b = before[name].astype(float), after[name].astype(float)
        count += a.size
        if a.shape != b.shape or (np.isnan(a) != np.isnan(b)).any():
            print(f"{name}: another shape, or other missing values")
            continue
        worst = float(
            np.nanmax(abs(a - b), initial=0.0) / max(np.nanmax(abs(a), initial=0.0), 1e-300)
        )
        same += worst <= CLOSE
        if worst > CLOSE:
            print(f"{name}: {worst:.2g}")
    print(
        f"{same:,} arrays with {count:,} numbers in all are equal to {CLOSE:g}; in one version only: {apart or 'none'}"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("paths", nargs="+", type=Path)
    given = parser.parse_args()
    {"write": write, "compare": compare}[given.what](*given.paths)


if __name__ == "__main__":
    main()
