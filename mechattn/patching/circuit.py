"""Circuits: the edges with the largest scores, and how much of the effect they carry by
themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm.auto import tqdm

from mechattn.contrast.stability import jaccard, jaccard_by_chance, largest
from mechattn.errors import OptionError, check_choice, check_counts, warn
from mechattn.model.hooked import alone, holding
from mechattn.model.load import load_model
from mechattn.patching.answer_metrics import Metric, chosen_metric
from mechattn.patching.edges import EdgePair, edges
from mechattn.patching.effects import DIRECTIONS, Patching
from mechattn.patching.graph import Graph, graph_of, read_edges, showing_edges
from mechattn.patching.memory import check_edges_fit
from mechattn.patching.pairs import pairs_of, units_of
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.results.result import MEMORY
from mechattn.stats.intervals import FEWEST, ratio_interval
from mechattn.stats.units import halves_of

Ablation = Literal["counterpart", "mean", "resample"]
# From orders of edges to the metric with the first of each [unit order size].
Carried = Callable[[Sequence[np.ndarray]], np.ndarray]
# Of all edges: those of arXiv:2504.13151.
_SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_DRAWS = 3  # of random circuits
_ENOUGH = 0.85  # of the effect, for the circuit that is shown if no size is named


@dataclass(frozen=True, eq=False)
class Circuit:
    """Edges ranked on one half of the prompts, and what the first of them carry on the other;
    prints as a table.

    Args:
        edges: The scores, on the half that ranks.
        graph: The graph of the model.
        curve: One row a size: ``edges``, ``share`` of all, ``faithfulness`` with ``low`` and
            ``high`` (Fieller's interval over the other half's prompts; NaN if the whole effect
            could be 0), and ``random``, the mean of random circuits of that size.
        about: What was measured, as data.
    """

    edges: Patching
    graph: Graph
    curve: pd.DataFrame
    about: Mapping[str, Any]
    _carried: Carried | None = field(default=None, repr=False)

    def beside(self, name: str, scores: Patching) -> Circuit:
        """The same with one more column in the curve: what the first edges of another ranking carry
        on the same half.

        Args:
            name: The column, such as "other pairs".
            scores: What ``edges`` gives for other prompts, or for the same architecture with random
                weights.

        Raises:
            OptionError: It does not rank the edges of this model, or the curve has such a column.
        """
        ranks_these = isinstance(scores, Patching)
        if ranks_these:
            effect = scores.effects.effect
            ranks_these = {*effect.dims[1:]} == {"writer", "reader"} and (
                effect.shape[1:] == self.graph.exists.shape
            )
        if not ranks_these:
            raise OptionError(
                f"{name!r} does not rank the edges of this model: give what ma.edges(…) returns "
                "for it, or for its architecture with other weights"
            )
        if name in self.curve:
            raise OptionError(f"the curve has a column {name!r} already; give another name")
        assert self._carried is not None
        shares = _shares(self._carried([_ranked(scores)]))
        return replace(self, curve=self.curve.assign(**{name: shares[0]}))

    @property
    def areas(self) -> dict[str, float]:
        """CPR, the area under faithfulness over the share of edges, and CMD, that between it and
        1."""
        share = self.curve.share.values
        areas = {}
        for column in self.curve.columns.drop(["edges", "share", "low", "high"], errors="ignore"):
            values = self.curve[column].values
            suffix = f"_{column}".replace("_faithfulness", "")
            areas[f"CPR{suffix}"] = float(np.trapezoid(values, share))
            areas[f"CMD{suffix}"] = float(np.trapezoid(abs(1 - values), share))
        return areas

    def stability(self, size: int | None = None) -> tuple[float, float]:
        """Jaccard index of the first edges of both halves of the ranking prompts, and its
        expectation by chance.
        """
        values = self.edges.units.means(self.edges.effects.effect.values[:, self.graph.exists])
        count = self.size() if size is None else size
        first_half, second_half = halves_of(len(values))
        first = largest(values[first_half], count)
        second = largest(values[second_half], count)
        return jaccard(first, second), jaccard_by_chance(count, count, values.shape[1])

    def size(self, faithfulness: float = _ENOUGH) -> int:
        """The smallest size on the curve with at least this faithfulness."""
        return int(self.curve.edges[self.curve.faithfulness >= faithfulness].min())

    def kept(
        self, size: int | None = None, q: float | None = None
    ) -> Bool[np.ndarray, "writer reader"]:
        """The edges of the circuit that lie on a way from the embedding to the logits.

        Args:
            size: The number of edges with the largest scores; by default the smallest that carries
                85 % of the effect.
            q: Instead: all edges with an adjusted p-value below this.
        """
        if q is None:
            count = self.size() if size is None else size
            check_counts(size=count)
            return _connected(self.graph, _first(self.graph, _ranked(self.edges), count))
        table = self.edges.table()
        kept_edges = np.zeros(self.graph.exists.shape, dtype=bool)
        kept_edges[self.graph.exists] = table[f"q_{table.attrs['tested']}"] < q
        if not kept_edges.any():
            warn(f"no edge has q < {q}; {table.attrs['resolution']}")
        return _connected(self.graph, kept_edges)

    def table(self, size: int | None = None, q: float | None = None) -> pd.DataFrame:
        """The scores of the circuit's edges, as ``Patching.table`` has them, the largest first."""
        kept_edges = self.kept(size, q)[self.graph.exists]
        order = _ranked(self.edges)
        return self.edges.rows(order[kept_edges[order]])

    def save(self, path: str | Path, size: int | None = None, q: float | None = None) -> Path:
        """Write the circuit as JSON for EAP-IG's ``Graph.from_json``; shared keys and values are
        repeated by head.
        """
        kept_edges = self.kept(size, q)
        scores = self.edges.effects.effect.mean("prompt").values
        writers = [_theirs(self.graph, name)[0] for name in self.graph.writers]
        readers = [_theirs(self.graph, name) for name in self.graph.readers]
        edges_by_name: dict[str, Any] = {}
        for writer, reader in self.graph.edges:
            for reader_name in readers[reader]:
                edges_by_name[f"{writers[writer]}->{reader_name}"] = {
                    "score": float(scores[writer, reader]),
                    "in_graph": bool(kept_edges[writer, reader]),
                }
        in_graph = np.append(kept_edges.any(1), True).tolist()
        nodes = {
            name: {"in_graph": inside}
            for name, inside in zip([*writers, "logits"], in_graph, strict=True)
        }
        content = {"cfg": self.about["cfg"], "nodes": nodes, "edges": edges_by_name}
        Path(path).write_text(json.dumps(content))
        return Path(path)

    def __str__(self) -> str:
        about = self.about
        similarity, chance = self.stability()
        areas = [f"{name.replace('_', ' of ')} {value:.3f}" for name, value in self.areas.items()]
        lines = [
            (
                f"{about['metric']}; {DIRECTIONS[about['direction']]}; edges ranked on"
                f" {about['ranked_on']}, {about['method']}; what is outside gets the"
                f" {about['ablation']}'s outputs, on {about['reported_on']}"
            ),
            str(self.edges.resolution),
            self.curve.to_string(index=False, float_format=lambda x: f"{x:.3g}"),
            ", ".join(areas),
            (
                f"stability: the first {self.size()} edges of two halves of the ranking prompts"
                f" share {similarity:.2f} (Jaccard index; {chance:.2f} by chance)"
            ),
            self.edges.about.get("sharing", ""),
        ]
        return "\n".join(lines).rstrip()


@alone
def circuit(
    model: Any,
    prompts: Sequence[Prompt | str],
    condition: Condition,
    *,
    steps: int = 5,
    metric: Metric | None = None,
    ablation: Ablation = "counterpart",
    sizes: Sequence[int] | None = None,
    memory: str = MEMORY,
    seed: int = 0,
) -> Circuit:
    """Rank edges on one half of the prompts, and measure on the other what the first of them carry
    by themselves.

    ``faithfulness(C) = (metric(C) − metric(∅)) / (metric(all) − metric(∅))``, a ratio of means over
    prompts: in the clean version every edge outside C carries the writer's output of another run,
    exactly, in one pass.

    Args:
        model: As for ``edges``.
        prompts: Prompts with an answer that the model reads; a random half of them (or of their
            groups) ranks.
        condition: The other version.
        steps: As for ``edges``.
        metric: As for ``patch``.
        ablation: What edges outside carry: the writer's output in the "counterpart", its "mean"
            over the clean runs of the ranking half (by position if all prompts are as long, else
            over all tokens), or "resample", that in another prompt of it (aligned from the end).
            Zero is not offered: the model never has such outputs.
        sizes: Numbers of edges; by default 0.1 % to 50 % of all, besides none and all.
        memory: As for ``edges``.
        seed: The seed of random circuits and resampled prompts.

    Raises:
        OptionError: There are too few prompts for two halves with intervals, or a size is not a
            number of edges.

    Source:
        Faithfulness and its areas, CPR and CMD: arXiv:2504.13151; stability over samples:
        arXiv:2510.00845.
    """
    check_choice(Ablation, ablation=ablation)
    model = load_model(model)
    prompts = as_prompts(prompts)
    metric = chosen_metric(metric, prompts)
    units = units_of(prompts)
    units.refuse_below(2 * FEWEST, " for two halves", instead="")
    ranking_half, reporting_half = units.halves()
    ranking = [prompts[index] for index in ranking_half]
    reporting = [prompts[index] for index in reporting_half]
    graph = graph_of(model)
    numbers = _sizes(graph, sizes)
    ranking_pairs, _ = pairs_of(model, ranking, condition, metric, "noising", seed)
    reporting_pairs, _ = pairs_of(model, reporting, condition, metric, "noising", seed)
    budget = check_edges_fit(model, graph, [*ranking_pairs, *reporting_pairs], memory)

    scores = edges(model, ranking, condition, steps=steps, metric=metric, memory=memory, seed=seed)
    order = _ranked(scores)
    generator = np.random.default_rng(seed)
    orders = [order, *(generator.permutation(len(order)) for _ in range(_DRAWS))]
    reported = [EdgePair(model, graph, pair, budget) for pair in reporting_pairs]
    ranked = [EdgePair(model, graph, pair, budget) for pair in ranking_pairs]
    mean = None
    if ablation == "mean":
        with showing_edges(model):
            mean = _mean_written(ranked)

    def carried(orders: Sequence[np.ndarray]) -> np.ndarray:
        # None and all of the edges are the same in every order, so these are measured once.
        sets = [_first(graph, orders[0], 0), graph.exists]
        for edge_order in orders:
            sets += [_first(graph, edge_order, size) for size in numbers[1:-1]]
        kept_edges = torch.from_numpy(np.stack(sets))
        draws = deepcopy(generator)
        metrics = []
        with holding(model), showing_edges(model):
            for edge_pair in tqdm(reported, desc="circuits", delay=2):
                baseline, _, written, replacement = edge_pair.runs()
                if mean is not None:
                    replacement = mean.expand_as(written)
                if ablation == "resample":
                    drawn = ranked[int(draws.integers(len(ranked)))]
                    replacement = _from_the_end(written, drawn)
                del written
                metrics.append(edge_pair.with_edges(kept_edges, replacement, baseline))
        by_set = np.stack(metrics)
        inner = by_set[:, 2:].reshape(len(by_set), len(orders), -1)
        ends = np.broadcast_to(by_set[:, None, :2], (len(by_set), len(orders), 2))
        by_size = np.concatenate([ends[..., :1], inner, ends[..., 1:]], axis=-1)
        return units_of(reporting).means(by_size)

    curve = _curve(carried(orders))
    curve.insert(0, "share", [size / len(order) for size in numbers])
    curve.insert(0, "edges", numbers)
    cfg = model.cfg
    about = {
        **scores.about,
        "ablation": ablation,
        "ranked_on": scores.units.words,
        "reported_on": units_of(reporting).words,
        "heads": int(cfg.n_heads),
        "cfg": {
            "n_layers": int(cfg.n_layers),
            "n_heads": int(cfg.n_heads),
            "d_model": int(cfg.d_model),
            "parallel_attn_mlp": bool(getattr(cfg, "parallel_attn_mlp", False)),
        },
    }
    return Circuit(scores, graph, curve, about, carried)


def _sizes(graph: Graph, sizes: Sequence[int] | None) -> list[int]:
    """The sizes to measure, from none to all."""
    count = int(graph.exists.sum())
    if sizes is None:
        sizes = [round(share * count) for share in _SHARES]
    for size in sizes:
        is_whole = isinstance(size, int) and not isinstance(size, bool)
        if not (is_whole and 0 <= size <= count):
            raise OptionError(f"sizes={sizes!r}: give numbers of edges, from 0 to {count}")
    return sorted({0, *sizes, count})


def _mean_written(pairs: Sequence[EdgePair]) -> Float[Tensor, "writer pos d_model"]:
    """The mean of what each writer writes in clean runs: by position if all are as long, else over
    all tokens.
    """
    lengths = [len(pair.pair.base) for pair in pairs]
    same_length = len(set(lengths)) == 1
    total: Any = 0.0
    for pair in pairs:
        written = read_edges(pair.model, pair.graph, pair.pair.base).written
        total = total + (written if same_length else written.sum(1, keepdim=True))
    return total / (len(pairs) if same_length else sum(lengths))


def _from_the_end(written: Tensor, drawn: EdgePair) -> Float[Tensor, "writer pos d_model"]:
    """What is written in another prompt's clean run, aligned at the last tokens."""
    resampled = written.clone()
    source = read_edges(drawn.model, drawn.graph, drawn.pair.base).written
    shared = min(source.shape[1], written.shape[1])
    resampled[:, -shared:] = source[:, -shared:]
    return resampled


def _curve(metrics: Float[np.ndarray, "unit order size"]) -> pd.DataFrame:
    """Faithfulness of each size, the order of the scores first, then random ones."""
    none = metrics[:, 0, :1]
    whole = metrics[:, 0, -1] - metrics[:, 0, 0]
    interval = ratio_interval(metrics[:, 0] - none, whole)
    shares = _shares(metrics)
    return pd.DataFrame(
        {
            "faithfulness": shares[0],
            "low": interval.low,
            "high": interval.high,
            "random": shares[1:].mean(0),
        }
    )


def _shares(metrics: Float[np.ndarray, "unit order size"]) -> Float[np.ndarray, "order size"]:
    """Faithfulness of means over units; the first size is none, the last is all."""
    above = (metrics - metrics[:, :, :1]).mean(0)
    return above / above[:, -1:]


def _ranked(scores: Patching) -> np.ndarray:
    """The numbers of the graph's edges, the largest mean score first."""
    mean = scores.effects.effect.mean("prompt").values
    return np.argsort(-abs(mean[~np.isnan(mean)]), kind="stable")


def _first(graph: Graph, order: np.ndarray, size: int) -> Bool[np.ndarray, "writer reader"]:
    """The first edges of an order."""
    kept_edges = np.zeros(graph.exists.shape, dtype=bool)
    kept_edges[tuple(np.argwhere(graph.exists)[order[:size]].T)] = True
    return kept_edges


def _connected(
    graph: Graph, kept_edges: Bool[np.ndarray, "writer reader"]
) -> Bool[np.ndarray, "writer reader"]:
    """Only edges from a writer that something reaches, to a reader from which something goes on."""
    into = np.array([np.isin(graph.writers, graph.read_by(name)) for name in graph.readers])
    is_logits = np.array(graph.readers) == "logits"
    while True:
        reached = np.array([kept_edges[:, readers].any() for readers in into.T])
        reached[0] = True
        goes_on = (into & kept_edges.any(1)).any(1) | is_logits
        fewer = kept_edges & reached[:, None] & goes_on
        if (fewer == kept_edges).all():
            return kept_edges
        kept_edges = fewer


def _theirs(graph: Graph, name: str) -> list[str]:
    """The names of a node in EAP-IG; one for each of the heads that share keys or values."""
    if name == "embedding":
        return ["input"]
    if name == "logits":
        return ["logits"]
    _, _, part = name.partition(".")
    names = []
    for node in graph.read_by(name):
        match = re.fullmatch(r"L(\d+)(?:MLP|H(\d+))", node)
        assert match is not None
        layer, head = match.groups()
        names.append(
            f"m{layer}" if head is None else f"a{layer}.h{head}" + f"<{part}>" * bool(part)
        )
    return names
