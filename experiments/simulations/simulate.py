"""What the statistics promise, tried on data whose truth is known: how often each rule says yes where nothing is there.

python experiments/simulations/simulate.py --tables 300 --out experiments/simulations/table.md     (make simulate)

Seeds are fixed. Each row: the rule, the data, the share, its Monte-Carlo error, and what it should be.
``--parts`` makes some of the rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr
from scipy import stats

import mechattn as ma
from mechattn.contrast.contrast import Contrast
from mechattn.contrast.further_columns import with_equivalence
from mechattn.patching.effects import Patching
from mechattn.results.result import Result
from mechattn.stats.accuracy import share_difference, share_interval
from mechattn.stats.intervals import t_interval
from mechattn.stats.paired import false_discovery, paired
from mechattn.stats.random_effects import against_draws, crossed
from mechattn.stats.units import Units, detectable_size

HEADS, RESAMPLES, SHARED = 32, 1999, 0.5
SKEWED, WORST = "lognormal, σ = 1 (skewness 6.2)", "lognormal, σ = 2 (skewness 414)"
Row = tuple[str, str, float, float, str]

KINDS: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "normal": lambda z, _: z,
    "lognormal, σ = 0.5 (skewness 1.8)": lambda z, _: np.exp(z / 2) - np.exp(1 / 8),
    "exponential (skewness 2)": lambda z, _: stats.expon.ppf(stats.norm.cdf(z)) - 1,
    SKEWED: lambda z, _: np.exp(z) - np.exp(1 / 2),
    "t with 3 degrees of freedom": lambda z, _: stats.t.ppf(stats.norm.cdf(z), 3),
    "spread by prompt": lambda z, generator: z * np.exp(generator.normal(size=(len(z), 1))),
}


def normal(n: int, heads: int, generator: np.random.Generator) -> np.ndarray:
    """Normal values [prompt, head] that share half of their variance."""
    shared, own = generator.normal(size=(n, 1)), generator.normal(size=(n, heads))
    return np.sqrt(SHARED) * shared + np.sqrt(1 - SHARED) * own


def row(rule: str, data: str, yes: list[bool], should: str) -> Row:
    """The share of yes with its error."""
    share = float(np.mean(yes))
    return (
        rule,
        data,
        share,
        float(np.sqrt(max(share * (1 - share), 0.25 / len(yes)) / len(yes))),
        should,
    )


def tables_of_heads(tables: int) -> Iterator[Row]:
    """A table of 32 heads without an effect: does some head pass?"""
    kinds = [(kind, n) for kind in KINDS for n in (8, 12, 24, 64, 200)] + [(WORST, 96)]
    for kind, n in kinds:
        shape = {**KINDS, WORST: lambda z, _: np.exp(2 * z) - np.exp(2)}[kind]
        ours, flips, family, covered = [], [], [], []
        for seed in range(tables):
            generator = np.random.default_rng([seed, n])
            made = paired(
                shape(normal(n, HEADS, generator), generator), resamples=RESAMPLES, seed=seed
            )
            ours.append(bool((made.q < 0.05).any()))
            flips.append(bool((stats.false_discovery_control(made.p_flip) < 0.05).any()))
            family.append(bool((made.p_family < 0.05).any()))
            covered.append(
                bool(((made.low_simultaneous <= 0) & (made.high_simultaneous >= 0)).all())
            )
        data = f"{kind}, {n} prompts, {HEADS} heads"
        yield row("some q < 0.05", data, ours, "≤ 0.05")
        yield row("the same by sign flips alone", data, flips, "≤ 0.05")
        if n >= 10:
            yield row("some p_family < 0.05", data, family, "≤ 0.05")
            yield row("all simultaneous intervals hold 0", data, covered, "≥ 0.95")


def groups(tables: int) -> Iterator[Row]:
    """Groups of five prompts, skewed between groups."""
    for n in (12, 24, 64):
        units = Units(5 * n, np.repeat(np.arange(n), 5))
        ours, ignored = [], []
        for seed in range(tables):
            generator = np.random.default_rng(seed)
            between = np.exp(normal(n, HEADS, generator)) - np.exp(1 / 2)
            d = np.repeat(between, 5, axis=0) + generator.normal(size=(5 * n, HEADS))
            ours.append(bool((paired(units.means(d), resamples=RESAMPLES).q < 0.05).any()))
            if seed < tables // 3:
                ignored.append(bool((paired(d, resamples=RESAMPLES).q < 0.05).any()))
        data = f"{n} groups of 5 prompts, lognormal between groups, {HEADS} heads"
        yield row("some q < 0.05 over groups", data, ours, "≤ 0.05")
        yield row("the same with groups ignored", data, ignored, "no promise")


def power(tables: int) -> Iterator[Row]:
    """One head with the effect that the table calls detectable."""
    for n in (20, 64):
        found, alone = [], []
        for seed in range(tables):
            d = np.random.default_rng(seed).normal(size=(n, HEADS))
            d[:, 0] += detectable_size(n, HEADS)
            found.append(bool(paired(d, resamples=RESAMPLES).q[0] < 0.05))
            d[:, 0] += detectable_size(n) - detectable_size(n, HEADS)
            alone.append(bool(paired(d, resamples=RESAMPLES).q[0] < 0.05))
        yield row(
            "the head is found at what is called detectable",
            f"{n} prompts, {HEADS} heads",
            found,
            "0.80",
        )
        yield row(
            "the same at what a single test would detect",
            f"{n} prompts, {HEADS} heads",
            alone,
            "no promise",
        )
    for n in (12, 24, 64):
        found, one, two = [], [], []
        for seed in range(tables):
            d = np.random.default_rng(seed).normal(size=(n, HEADS))
            d[:, 0] += 1.3
            found.append(bool(paired(d, resamples=RESAMPLES).q[0] < 0.05))
            d[:, 1:4] *= 1e-3
            for shift, said in ((0, one), (3, two)):  # of one prompt each, then of two
                d[np.arange(3) + shift, range(1, 4)] = -0.6
                said.append(bool(paired(d, resamples=RESAMPLES).q[0] < 0.05))
        data = f"{n} prompts, {HEADS} heads"
        yield row("a head with d_z = 1.3 is found", data, found, "higher is better")
        yield row("the same beside three heads of one prompt each", data, one, "as above")
        yield row("the same beside three heads of two prompts each", data, two, "no promise")


def patching(tables: int) -> Iterator[Row]:
    """The printed heads, the largest of many without an effect."""
    for heads in (32, 256, 784):
        printed, chosen = [], []
        for seed in range(tables // 3 if heads < 784 else tables // 5):
            generator = np.random.default_rng(seed)
            dims = ("prompt", "layer", "head")
            names = ("effect", "other_prompt", "random")
            values = {
                name: (dims, normal(24, heads, generator).reshape(24, 1, heads)) for name in names
            }
            data = xr.Dataset(values | {"whole": ("prompt", generator.normal(2, 1, 24))})
            data = data.assign_coords(prompt=np.arange(24), layer=[0], head=np.arange(heads))
            about = {
                "metric": "log-probability",
                "metric_name": "logprob",
                "direction": "denoising",
                "method": "exact",
            }
            table = Patching(data, Units(24), about).table(top=8)
            printed.append(bool((table.q_effect < 0.05).any()))
            shown = data.effect.values[:, 0, table["head"].to_numpy()]
            chosen.append(bool((paired(shown).q < 0.05).any()))
        yield row(
            "some printed head has q < 0.05",
            f"patching, 24 prompts, {heads} heads, 8 printed",
            printed,
            "≤ 0.05",
        )
        yield row(
            "the same with q over the printed ones",
            f"patching, {heads} heads",
            chosen,
            "no promise",
        )


def random_weights(tables: int) -> Iterator[Row]:
    """A model that is one more draw of random weights, all of whose heads surely move; and one head far outside."""
    for draws in (3, 10, 20):
        false, found, halves = [], [], []
        for seed in range(10 * tables):
            generator = np.random.default_rng([seed, draws])
            weights = 0.3 * generator.normal(size=(draws + 1, 4, 8))
            p = against_draws(weights[0], weights[1:], 1).p.ravel()
            false.append(bool((stats.false_discovery_control(p) < 0.05).any()))
            if seed < tables:
                halves.append(_after_choosing(weights[0].ravel(), p, generator))
            weights[0, 0, 0] = 8 * 0.3
            found.append(
                bool(false_discovery(against_draws(weights[0], weights[1:], 1).p.ravel())[0] < 0.05)
            )
        data = f"{draws} draws, 4 × 8 heads"
        yield row("some q_random < 0.05, the model being one more draw", data, false, "≤ 0.05")
        yield row("a head 8 standard deviations off is found", data, found, "higher is better")
        data += ', select="half", 48 prompts'
        ours, apart = map(list, zip(*halves, strict=True))
        yield row("some q_random < 0.05, the model being one more draw", data, ours, "≤ 0.05")
        yield row("the same over the chosen heads alone", data, apart, "no promise")


def _after_choosing(
    means: np.ndarray, p: np.ndarray, generator: np.random.Generator
) -> tuple[bool, bool]:
    """Whether some q_random < 0.05 of heads that one half chose: over all heads, and over the chosen ones alone."""
    d = means + generator.normal(size=(48, HEADS))
    cells = paired(d[::2], resamples=499).q < 0.05
    both = np.ones(HEADS)
    if not cells.any():
        return False, False
    both[cells] = np.maximum(paired(d[1::2][:, cells], resamples=RESAMPLES).p, p[cells])
    return bool((false_discovery(both) < 0.05).any()), bool(
        (false_discovery(p[cells]) < 0.05).any()
    )


def shares(tables: int) -> Iterator[Row]:
    """Shares of right answers near 0 and 1, and their differences."""
    for share, n in ((0.5, 20), (0.95, 20), (0.98, 20), (0.99, 20), (0.99, 60), (0.05, 24)):
        ours, plain = [], []
        for seed in range(4 * tables):
            generator = np.random.default_rng(seed)
            values = generator.binomial(8, generator.beta(share, 1 - share, n)) / 8
            for made, said in ((share_interval(values), ours), (t_interval(values), plain)):
                said.append(bool(made.low <= share <= made.high))
        yield row(
            "the interval of a share holds it",
            f"share {share}, {n} problems × 8 answers",
            ours,
            "≥ 0.95",
        )
        yield row(
            "the t interval does", f"share {share}, {n} problems × 8 answers", plain, "no promise"
        )
    for first, second in ((0.98, 0.9), (0.95, 0.95), (0.6, 0.5)):
        ours = []
        for seed in range(4 * tables):
            generator = np.random.default_rng(seed)
            values = [
                generator.binomial(8, generator.beta(p, 1 - p, 20)) / 8 for p in (first, second)
            ]
            made = share_difference(values[0] - values[1])
            ours.append(bool(made.low <= first - second <= made.high))
        yield row(
            "the interval of a difference holds it",
            f"shares {first} and {second}, 20 problems",
            ours,
            "≥ 0.95",
        )


def fillers(tables: int) -> Iterator[Row]:
    """Fillers that differ: does an interval hold the mean over all fillers there could be?"""
    for conditions in (6, 12):
        d = np.random.default_rng(conditions).normal(size=(24, conditions, 10 * tables))
        d += np.random.default_rng([conditions, 1]).normal(0, 0.8, (1, conditions, 10 * tables))
        made, fixed = crossed(d), t_interval(d.mean(1))
        data = f"24 prompts × {conditions} fillers"
        yield row(
            "the interval over fillers holds the mean",
            data,
            list((made.low < 0) & (made.high > 0)),
            "≥ 0.95",
        )
        yield row(
            "that over prompts alone does",
            data,
            list((fixed.low < 0) & (fixed.high > 0)),
            "no promise",
        )


def single_intervals(tables: int) -> Iterator[Row]:
    """The t and the bootstrap-t interval of one head."""
    for kind, shape in KINDS.items():
        generator = np.random.default_rng(0)
        plain, bootstrap, wider = [], [], []
        for _ in range(10 * tables):
            d = shape(generator.normal(size=(24, 1)), generator)
            made = paired(d, resamples=999)
            plain.append(bool(made.low[0] <= 0 <= made.high[0]))
            bootstrap.append(bool(made.low_bootstrap[0] <= 0 <= made.high_bootstrap[0]))
            low, high = (
                min(made.low[0], made.low_bootstrap[0]),
                max(made.high[0], made.high_bootstrap[0]),
            )
            wider.append(bool(low <= 0 <= high))
        yield row("the t interval holds the mean", f"{kind}, 24 prompts", plain, "0.95")
        yield row("the bootstrap-t interval does", f"{kind}, 24 prompts", bootstrap, "0.95")
        yield row("the wider end of both does", f"{kind}, 24 prompts", wider, "0.95")


def equivalence(tables: int) -> Iterator[Row]:
    """One head whose mean lies just at the margin, so that "the same" is wrong."""
    for kind in ("normal", SKEWED):
        same = []
        for seed in range(10 * tables):
            generator = np.random.default_rng(seed)
            d = 0.5 + 0.5 * KINDS[kind](generator.normal(size=(24, 1)), generator)
            _, low, high = t_interval(d)
            ends = {"difference": d.mean(0), "difference_low": low, "difference_high": high}
            table = pd.DataFrame(ends | {"n": 24})
            table.attrs = {"level": 0.95, "tested": "difference", "scale": "difference"}
            same.append(bool(with_equivalence(table, 0.5).q_same[0] < 0.05))
        yield row("q_same < 0.05 at the margin", f"{kind}, 24 prompts, one head", same, "≤ 0.05")


def verdicts(tables: int) -> Iterator[Row]:
    """A verdict and a table of the same question, of heads with weak effects."""
    differ, seeds = [], []
    for seed in range(max(1, tables // 3)):
        generator = np.random.default_rng(seed)
        logs = normal(24, HEADS, generator) * 0.3 - 0.1
        values = np.exp(np.stack([np.zeros_like(logs), logs])).reshape(2, 1, 24, 4, 8)
        names = ["baseline", "other"]
        data = xr.Dataset(
            {
                "received_by_segment": (
                    ("condition", "segment", "prompt", "layer", "head"),
                    values,
                ),
                "received_by_segment_uniform": (
                    ("condition", "segment", "prompt", "layer"),
                    np.ones((2, 1, 24, 4)),
                ),
            },
            {"condition": names, "segment": ["question"], "layer": range(4), "head": range(8)},
        )
        origin = xr.Dataset(
            {"origin": (("prompt", "condition", "pos"), np.zeros((24, 2, 2)))}, {"condition": names}
        )
        about = {"model": {"name": "simulated"}, "prompts": {"hash": ""}}
        asked = Contrast(
            Result({"received_attention": data, "sequences": origin}, about),
            "other",
            resamples=RESAMPLES,
        )
        verdict = asked.verdict()
        marked = (verdict.below | verdict.above).ravel()
        differ.append(bool((marked != (asked.table().q_beyond < 0.05)).any()))
        seeds.append(bool((marked != (replace(asked, seed=1).table().q_beyond < 0.05)).any()))
    data = f"24 prompts, {HEADS} heads, d_z = 0.33"
    yield row("a verdict and its table mark different heads", data, differ, "0")
    yield row("two tables with other draws do", data, seeds, "no promise")


def measured(tables: int) -> Iterator[Row]:
    """Values of a toy on 200 word problems, moved to mean 0 in each head; tables of a few of them, drawn at random."""
    prompts = ma.load_prompts("word-problems", limit=200)
    result = ma.run(
        "toy:llama", prompts, {}, [ma.analyses.AttentionSinks(), ma.analyses.AttentionFocus()]
    )
    sinks, focus = (
        result[name].isel(condition=0) for name in ("attention_sinks", "attention_focus")
    )
    for name, values in (
        ("strongest_value_ratio", sinks.strongest_value_ratio),
        ("duplicate_mass", focus.duplicate_mass.sel(segment="question")),
    ):
        every = values.transpose("prompt", ...).values.astype(np.float64).reshape(len(prompts), -1)
        every -= every.mean(0)
        skewed = np.nanmedian(abs(stats.skew(every)))
        for n in (12, 24, 64):
            ours, flips = [], []
            for seed in range(tables):
                some = every[np.random.default_rng([seed, n]).integers(len(every), size=n)]
                made = paired(some, resamples=RESAMPLES, seed=seed)
                ours.append(bool((made.q < 0.05).any()))
                flips.append(bool((stats.false_discovery_control(made.p_flip) < 0.05).any()))
            data = f"{name} of toy:llama, centred (median skewness {skewed:.1f}), {n} prompts, {every.shape[1]} heads"
            yield row("some q < 0.05", data, ours, "≤ 0.05")
            yield row("the same by sign flips alone", data, flips, "≤ 0.05")


PARTS: dict[str, Callable[[int], Iterator[Row]]] = {
    part.__name__: part
    for part in (
        tables_of_heads, groups, power, patching, random_weights, shares, fillers, single_intervals, equivalence,
        verdicts, measured,
    )
}  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("out/simulations.md"))
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    given = parser.parse_args()
    rows: list[Row] = []
    for part in given.parts:
        for made in PARTS[part](given.tables):
            rows.append(made)
            print(f"{made[0]}: {made[1]}: {made[2]:.3f} ± {made[3]:.3f} ({made[4]})", flush=True)
    frame = pd.DataFrame(rows, columns=["rule", "data", "share", "error", "should be"])
    lines = ["| " + " | ".join(frame.columns) + " |", "|---|---|---|---|---|"]
    lines += [
        f"| {rule} | {data} | {share:.3f} | {error:.3f} | {should} |"
        for rule, data, share, error, should in rows
    ]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
