"""Circuits: the edges with the largest scores, and how much of the effect they carry by themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor

from mechattn.axes import head_named
from mechattn.contrast.stability import jaccard, jaccard_by_chance, largest
from mechattn.errors import OptionError, check_choice
from mechattn.model.hooked import alone, holding
from mechattn.model.load import load_model
from mechattn.patching.answer_metrics import Metric
from mechattn.patching.edges import EdgePair, edges
from mechattn.patching.effects import Patching
from mechattn.patching.graph import Graph, graph_of, showing_edges
from mechattn.patching.pairs import pairs_of, units_of
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.results.result import MEMORY
from mechattn.stats.intervals import FEWEST, ratio_interval
from mechattn.stats.units import halves_of

Ablation = Literal["counterpart", "mean", "resample"]
# From orders of edges to the metric with the first of each [unit order size].
Carried = Callable[[Sequence[np.ndarray]], np.ndarray]
_SHARES = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
)  # of all edges: those of arXiv:2504.13151
_DRAWS = 3  # of random circuits
_ENOUGH = 0.85  # of the effect, for the circuit that is shown if no size is named


@dataclass(frozen=True, eq=False)
class Circuit:
    """Edges ranked on one half of the prompts, and what the first of them carry on the other; prints as a table.

    Args:
        edges: The scores, on the half that ranks.
        graph: The graph of the model.
        curve: One row a size: ``edges``, ``share`` of all, ``faithfulness`` with ``low`` and ``high`` (Fieller's
            interval over the other half's prompts; NaN if the whole effect could be 0), and ``random``, the mean of
            random circuits of that size.
        about: What was measured, as data.
    """

    edges: Patching
    graph: Graph
    curve: pd.DataFrame
    about: Mapping[str, Any]
    _carried: Carried | None = field(default=None, repr=False)

    def beside(self, name: str, scores: Patching) -> Circuit:
        """The same with one more column in the curve: what the first edges of another ranking carry on the same half.

        Args:
            name: The column, such as "other pairs".
            scores: What ``edges`` gives for other prompts, or for the same architecture with random weights.

        Raises:
            OptionError: It does not rank the edges of this model, or the curve has such a column.
        """
        effect = scores.effects.effect if isinstance(scores, Patching) else None
        if (
            effect is None
            or effect.shape[1:] != self.graph.exists.shape
            or {*effect.dims[1:]} != {"writer", "reader"}
        ):
            raise OptionError(
                f"{name!r} does not rank the edges of this model: give what ma.edges(…) returns for it, or for its "
                "architecture with other weights"
            )
        if name in self.curve:
            raise OptionError(f"the curve has a column {name!r} already; give another name")
        assert self._carried is not None
        return replace(
            self, curve=self.curve.assign(**{name: _shares(self._carried([_ranked(scores)]))[0]})
        )

    @property
    def areas(self) -> dict[str, float]:
        """CPR, the area under faithfulness over the share of edges, and CMD, that between it and 1."""
        share = self.curve.share.values
        found = {}
        for column in self.curve.columns.drop(["edges", "share", "low", "high"], errors="ignore"):
            values, name = (
                self.curve[column].values,
                "" if column == "faithfulness" else f"_{column}",
            )
            found[f"CPR{name}"] = float(np.trapezoid(values, share))
            found[f"CMD{name}"] = float(np.trapezoid(abs(1 - values), share))
        return found

    def stability(self, size: int | None = None) -> tuple[float, float]:
        """Jaccard index of the first edges of both halves of the ranking prompts, and its expectation by chance."""
        values = self.edges.units.means(self.edges.effects.effect.values[:, self.graph.exists])
        count = self.size() if size is None else size
        one, other = (largest(values[half], count) for half in halves_of(len(values)))
        return jaccard(one, other), jaccard_by_chance(count, count, values.shape[1])

    def size(self, faithfulness: float = _ENOUGH) -> int:
        """The smallest size on the curve with at least this faithfulness."""
        return int(self.curve.edges[self.curve.faithfulness >= faithfulness].min())

    def kept(
        self, size: int | None = None, q: float | None = None
    ) -> Bool[np.ndarray, "writer reader"]:
        """The edges of the circuit that lie on a way from the embedding to the logits.

        Args:
            size: The number of edges with the largest scores; by default the smallest that carries 85 % of the effect.
            q: Instead: all edges with an adjusted p-value below this.
        """
        if q is not None:
            table = self.edges.table()
            kept = np.zeros(self.graph.exists.shape, dtype=bool)
            for writer, reader in table.loc[
                table[f"q_{table.attrs['tested']}"] < q, ["writer", "reader"]
            ].values:
                kept[self.graph.writers.index(writer), self.graph.readers.index(reader)] = True
        else:
            kept = _first(self.graph, _ranked(self.edges), self.size() if size is None else size)
        return _connected(self.graph, kept)

    def table(self, size: int | None = None, q: float | None = None) -> pd.DataFrame:
        """The scores of the circuit's edges, as ``Patching.table`` has them, the largest first."""
        kept, made = self.kept(size, q), self.edges.table(top=int(self.graph.exists.sum()))
        writers, readers = (
            map(self.graph.writers.index, made.writer),
            map(self.graph.readers.index, made.reader),
        )
        return made[kept[list(writers), list(readers)]].reset_index(drop=True)

    def save(self, path: str | Path, size: int | None = None, q: float | None = None) -> Path:
        """Write the circuit as JSON for EAP-IG's ``Graph.from_json``; shared keys and values are repeated by head."""
        kept, scores = self.kept(size, q), self.edges.effects.effect.mean("prompt").values
        readers = [_theirs(self.graph, name, self.about["heads"]) for name in self.graph.readers]
        named: dict[str, Any] = {}
        for writer, reader in self.graph.edges:
            for name in readers[reader]:
                found = {
                    "score": float(scores[writer, reader]),
                    "in_graph": bool(kept[writer, reader]),
                }
                named[f"{_theirs(self.graph, self.graph.writers[writer], 0)[0]}->{name}"] = found
        nodes = {}
        for name, some in zip(self.graph.writers, kept, strict=True):
            nodes[_theirs(self.graph, name, 0)[0]] = {"in_graph": bool(some.any())}
        made = {
            "cfg": self.about["cfg"],
            "nodes": nodes | {"logits": {"in_graph": True}},
            "edges": named,
        }
        Path(path).write_text(json.dumps(made))
        return Path(path)

    def __str__(self) -> str:
        about, areas = self.about, self.areas
        same, chance = self.stability()
        lines = [
            f"{about['metric']}; edges ranked on {about['ranked_on']}, {about['method']}; what is outside gets the "
            f"{about['ablation']}'s outputs, on {about['reported_on']}",
            self.curve.to_string(index=False, float_format=lambda x: f"{x:.3g}"),
            ", ".join(f"{name.replace('_', ' of ')} {value:.3f}" for name, value in areas.items()),
            f"stability: the first {self.size()} edges of two halves of the ranking prompts share {same:.2f} "
            f"(Jaccard index; {chance:.2f} by chance)",
        ]
        return "\n".join(lines)


@alone
def circuit(
    model: Any,
    prompts: Sequence[Prompt | str],
    condition: Condition,
    *,
    steps: int = 5,
    metric: Metric = "answers",
    ablation: Ablation = "counterpart",
    sizes: Sequence[int] | None = None,
    memory: str = MEMORY,
    seed: int = 0,
) -> Circuit:
    """Rank edges on one half of the prompts, and measure on the other what the first of them carry by themselves.

    ``faithfulness(C) = (metric(C) − metric(∅)) / (metric(all) − metric(∅))``, a ratio of means over prompts: in the
    clean version every edge outside C carries the writer's output of another run, exactly, in one pass.

    Args:
        model: As for ``edges``.
        prompts: Prompts with an answer that the model reads; a random half of them (or of their groups) ranks.
        condition: The other version.
        steps: As for ``edges``.
        metric: As for ``patch``.
        ablation: What edges outside carry: the writer's output in the "counterpart", its "mean" over the clean runs of
            the ranking half (by position if all prompts are as long, else over all tokens), or "resample", that in
            another prompt of it (aligned from the end). Zero is not offered: the model never has such outputs.
        sizes: Numbers of edges; by default 0.1 % to 50 % of all, besides none and all.
        memory: As for ``edges``.
        seed: The seed of random circuits and resampled prompts.

    Raises:
        OptionError: There are too few prompts for two halves with intervals, or a size is not a number of edges.

    Source:
        Faithfulness and its areas, CPR and CMD: arXiv:2504.13151; stability over samples: arXiv:2510.00845.
    """
    check_choice(Ablation, ablation=ablation)
    model, prompts = load_model(model), as_prompts(prompts)
    units = units_of(prompts)
    units.refuse_below(2 * FEWEST, " for two halves", instead="")
    ranking, reporting = ([prompts[i] for i in half] for half in units.halves())
    graph = graph_of(model)
    scores = edges(model, ranking, condition, steps=steps, metric=metric, memory=memory, seed=seed)
    numbers = _sizes(graph, sizes)
    order, generator = _ranked(scores), np.random.default_rng(seed)
    orders = [order, *(generator.permutation(len(order)) for _ in range(_DRAWS))]
    with showing_edges(model):
        first, second = (
            [
                EdgePair(model, graph, pair)
                for pair in pairs_of(model, half, condition, metric, "noising", seed)[0]
            ]
            for half in (ranking, reporting)
        )
        instead = None if ablation == "counterpart" else [one.runs()[2] for one in first]

    def carried(orders: Sequence[np.ndarray]) -> np.ndarray:
        kept = torch.from_numpy(
            np.stack([_first(graph, some, size) for some, size in product(orders, numbers)])
        )
        draws = deepcopy(generator)
        with holding(model), showing_edges(model):
            found = np.stack([_measured(one, kept, instead, ablation, draws) for one in second])
        return units_of(reporting).means(found.reshape(len(found), len(orders), len(numbers)))

    curve = _curve(carried(orders))
    curve.insert(0, "share", [size / len(order) for size in numbers])
    curve.insert(0, "edges", numbers)
    cfg = {
        "n_layers": int(model.cfg.n_layers),
        "n_heads": int(model.cfg.n_heads),
        "d_model": int(model.cfg.d_model),
    }
    about = dict(scores.about) | {
        "ablation": ablation,
        "ranked_on": scores.units.words,
        "reported_on": units_of(reporting).words,
        "heads": int(model.cfg.n_heads),
        "cfg": cfg | {"parallel_attn_mlp": bool(getattr(model.cfg, "parallel_attn_mlp", False))},
    }
    return Circuit(scores, graph, curve, about, carried)


def _sizes(graph: Graph, sizes: Sequence[int] | None) -> list[int]:
    count = int(graph.exists.sum())
    given = [round(share * count) for share in _SHARES] if sizes is None else list(sizes)
    if not all(
        isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= count
        for size in given
    ):
        raise OptionError(f"sizes={sizes!r}: give numbers of edges, from 0 to {count}")
    return sorted({0, *given, count})


def _measured(
    one: EdgePair,
    kept: Tensor,
    instead: Sequence[Tensor] | None,
    ablation: Ablation,
    generator: np.random.Generator,
) -> np.ndarray:
    """The metric of a prompt with each set of edges kept."""
    own, _, mine, put = one.runs()
    if instead is not None and ablation == "mean":
        same = all(len(each) == len(mine) for each in instead)
        mean = (
            torch.stack(list(instead)).mean(0)
            if same
            else torch.cat(list(instead)).mean(0).expand_as(mine)
        )
        put = mean.to(mine)
    elif instead is not None:
        other = instead[int(generator.integers(len(instead)))]
        count, put = min(len(other), len(mine)), mine.clone()
        put[-count:] = other[-count:]
    return one.with_edges(kept, put, own)


def _curve(found: np.ndarray) -> pd.DataFrame:
    """Faithfulness of each size [unit order size], the order of the scores first, then random ones."""
    none, shares = found[:, 0, :1], _shares(found)
    chosen = ratio_interval(found[:, 0] - none, found[:, 0, -1] - found[:, 0, 0])
    ends = {"low": chosen.low, "high": chosen.high}
    return pd.DataFrame({"faithfulness": shares[0], **ends, "random": shares[1:].mean(0)})


def _shares(found: np.ndarray) -> np.ndarray:
    """Faithfulness [order size] of means over units [unit order size]; the first size is none, the last is all."""
    above = (found - found[:, :, :1]).mean(0)
    return above / above[:, -1:]


def _ranked(scores: Patching) -> np.ndarray:
    """The numbers of the graph's edges, the largest mean score first."""
    mean = scores.effects.effect.mean("prompt").values
    return np.argsort(-abs(mean[~np.isnan(mean)]), kind="stable")


def _first(graph: Graph, order: np.ndarray, size: int) -> Bool[np.ndarray, "writer reader"]:
    """The first edges of an order."""
    kept = np.zeros(graph.exists.shape, dtype=bool)
    kept[tuple(np.argwhere(graph.exists)[order[:size]].T)] = True
    return kept


def _connected(
    graph: Graph, kept: Bool[np.ndarray, "writer reader"]
) -> Bool[np.ndarray, "writer reader"]:
    """Only edges from a writer that something reaches, to a reader from which something goes on."""
    into = np.array(
        [[name.partition(".")[0] == writer for writer in graph.writers] for name in graph.readers]
    )
    for name in (
        name for name in graph.readers if name.endswith((".k", ".v"))
    ):  # shared by several heads
        into[graph.readers.index(name)] = [name in shared for shared in _shared_by(graph)]
    while True:
        reached = np.array([(kept[:, into[:, i]]).any() for i in range(len(graph.writers))])
        reached[0] = True
        goes_on = (into & kept.any(1)).any(1) | (np.array(graph.readers) == "logits")
        fewer = kept & reached[:, None] & goes_on
        if (fewer == kept).all():
            return kept
        kept = fewer


def _shared_by(graph: Graph) -> list[list[str]]:
    """For each writer, the names of the keys and values that its head reads."""
    made: list[list[str]] = []
    for writer in graph.writers:
        if (found := head_named(writer)) is None:
            made.append([])
            continue
        layer, head = found
        heads, own = (
            place.stop - place.start for place in (graph.places[part, layer] for part in "qk")
        )
        made.append([f"L{layer}H{head * own // heads}.{part}" for part in "kv"])
    return made


def _theirs(graph: Graph, name: str, heads: int) -> list[str]:
    """The names of a node in EAP-IG; one for each of the heads that share keys or values."""
    if name in ("embedding", "logits"):
        return [{"embedding": "input"}.get(name, name)]
    layer, what, head, part = re.fullmatch(r"L(\d+)(MLP|H(\d+)(?:\.([qkv]))?)", name).groups()  # type: ignore[union-attr]
    if what == "MLP":
        return [f"m{layer}"]
    if part is None:
        return [f"a{layer}.h{head}"]
    place = graph.places[part, int(layer)]
    each = heads // (place.stop - place.start)
    return [f"a{layer}.h{int(head) * each + i}<{part}>" for i in range(each)]
