"""Circuits: the edges with the largest mean scores, and how much of the effect they carry alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from mechattn.contrast.stability import jaccard, jaccard_by_chance, largest_means
from mechattn.errors import OptionError, check_choice, check_counts, warn
from mechattn.interventions.intervention import as_tuple
from mechattn.model.hooked import alone
from mechattn.patching.answer_metrics import Metric
from mechattn.patching.circuit_effects import (
    Ablation,
    CircuitEffects,
    CircuitMeasurement,
    first_edges,
)
from mechattn.patching.edges import attributed_edges
from mechattn.patching.effects import DIRECTIONS, Patching, largest_first, printed
from mechattn.patching.graph import EdgeSet, Graph, graph_of
from mechattn.patching.pairs import request_of
from mechattn.patching.plan import check_edges_fit
from mechattn.prompts.conditions import Condition
from mechattn.prompts.prompt import Prompt
from mechattn.results.result import MEMORY, head_named
from mechattn.stats.intervals import FEWEST, ratio_interval
from mechattn.stats.units import halves_of
from mechattn.store.atomic_writes import check_writable, write_whole

# The default sizes, as shares of all edges: those of arXiv:2504.13151.
_SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_DRAWS = 3  # random orders to average over; each takes as many passes as the ranked order
_DEFAULT_FAITHFULNESS = 0.85  # of the circuit without size= and q=, by choice
_ABLATION_WORDS: Mapping[Ablation, str] = {
    "counterpart": "the other version's outputs",
    "mean": "mean outputs over the ranking prompts",
    "resample": "the outputs of a random ranking prompt",
}


@dataclass(frozen=True, eq=False)
class Circuit:
    """Edges ranked on one half of the prompts, and how much the first of them carry on the other.

    ``print(circuit)`` shows the curve, the areas and the stability.

    Args:
        edges: The scores of the edges, on the ranking half.
        graph: The graph of the model.
        curve: One row for each size. Its columns are ``edges``, the size; ``share``, the size as a
            fraction of all edges; ``faithfulness``; ``low`` and ``high``, the ends of Fieller's
            interval over the other half's units, which are NaN if the whole effect could be 0; and
            ``random``, the mean faithfulness of random circuits of that size.
        about: What was measured, as data.
    """

    edges: Patching
    graph: Graph
    curve: pd.DataFrame
    about: Mapping[str, Any]
    _measurement: CircuitMeasurement = field(repr=False, metadata={"in_identity": False})

    def beside(self, name: str, scores: Patching) -> Circuit:
        """Return a copy whose curve has one more column: the faithfulness of another ranking.

        It is measured at the same sizes, on the same half of the prompts.

        Args:
            name: The name of the column, such as "other pairs".
            scores: What ``edges`` returns for other prompts, or for the same architecture with
                random weights.

        Raises:
            OptionError: ``scores`` does not rank the edges of this model, or the curve already has
                a column of this name.
        """
        ranks_edges = isinstance(scores, Patching) and scores.labels == ["writer", "reader"]
        if not ranks_edges or scores.effects.effect.shape[1:] != self.graph.exists.shape:
            raise OptionError(
                f"{name!r} does not rank the edges of this model: give what ma.edges(…) returns "
                "for this model, or for its architecture with other weights"
            )
        if not isinstance(name, str) or name in self.curve:
            raise OptionError(f"name={name!r}: give a text that is not already a column")

        order = _ranked(scores, self.graph.exists)
        [faithfulness] = _faithfulness(self._measurement.effects([order]))
        return replace(self, curve=self.curve.assign(**{name: faithfulness}))

    @property
    def areas(self) -> dict[str, float]:
        """CPR, the area under the curve of faithfulness over the share of edges, and CMD, the area
        between that curve and 1.

        Returns:
            "CPR" and "CMD" of the ranking, "CPR_random" and "CMD_random" of random circuits, and
            the same two for each ranking that ``beside`` added, such as "CPR_other pairs".
        """
        share = self.curve.share.values
        rankings = self.curve.drop(columns=["edges", "share", "low", "high"])

        areas = {}
        for ranking, faithfulness in rankings.items():
            suffix = "" if ranking == "faithfulness" else f"_{ranking}"
            areas[f"CPR{suffix}"] = float(np.trapezoid(faithfulness, share))
            areas[f"CMD{suffix}"] = float(np.trapezoid(abs(1 - faithfulness), share))
        return areas

    def stability(self, size: int | None = None) -> tuple[float, float]:
        """The Jaccard index of two circuits, each ranked on one half of the ranking units, and the
        index expected by chance.

        Args:
            size: The number of edges in each circuit, as for ``kept``.

        Raises:
            OptionError: As for ``kept``.
        """
        count = self._count(size)
        scores = self.edges.effects.effect.values[:, self.graph.exists]
        by_unit = self.edges.units.means(scores)
        unit_count, edge_count = by_unit.shape

        first_half, second_half = halves_of(unit_count)
        first = largest_means(by_unit[first_half], count)
        second = largest_means(by_unit[second_half], count)
        return jaccard(first, second), jaccard_by_chance(count, count, edge_count)

    def size(self, faithfulness: float = _DEFAULT_FAITHFULNESS) -> int:
        """The smallest size on the curve with at least this faithfulness.

        Raises:
            OptionError: No size on the curve has it.
        """
        is_enough = self.curve.faithfulness >= faithfulness
        if not is_enough.any():
            raise OptionError(f"no size has a faithfulness of {faithfulness}; give size=…")
        return int(self.curve.edges[is_enough].min())

    def kept(self, size: int | None = None, q: float | None = None) -> EdgeSet:
        """The edges of the circuit that lie on a path from the embedding to the logits.

        Args:
            size: The number of edges to choose, those whose mean scores are furthest from 0. By
                default it is the smallest size on the curve that carries 85 % of the effect.
            q: Choose all edges with an adjusted p-value below this instead.

        Raises:
            OptionError: Both are given, one has a value that is not allowed, or neither is given
                and no size carries 85 % of the effect.
        """
        if q is None:
            order = _ranked(self.edges, self.graph.exists)
            return _connected(self.graph, first_edges(self.graph, order, self._count(size)))

        if size is not None:
            raise OptionError(f"size={size!r} and q={q!r}: give one of them")
        if not isinstance(q, (int, float)) or not 0 < q <= 1:
            raise OptionError(f"q={q!r}: give a number above 0 and up to 1, such as 0.05")
        table = self.edges.table()
        kept_edges = np.zeros_like(self.graph.exists)
        kept_edges[self.edges.measured] = table["q_effect"] < q
        if not kept_edges.any():
            warn(f"no edge has q < {q}; {table.attrs['resolution']}")
        return _connected(self.graph, kept_edges)

    def table(self, size: int | None = None, q: float | None = None) -> pd.DataFrame:
        """The rows of ``Patching.table`` for the circuit's edges, the largest effect first.

        Args:
            size: As for ``kept``.
            q: As for ``kept``.

        Raises:
            OptionError: As for ``kept``.
        """
        is_kept = self.kept(size, q)[self.edges.measured]
        order = _ranked(self.edges, self.edges.measured)
        return self.edges.rows(order[is_kept[order]])

    def save(self, path: str | Path, size: int | None = None, q: float | None = None) -> Path:
        """Write the circuit as JSON for EAP-IG's ``Graph.from_json``.

        That format has no shared keys and values, so such an edge is written once for each head
        that shares them.

        Args:
            path: The file to write.
            size: As for ``kept``.
            q: As for ``kept``.

        Returns:
            The path of the file.

        Raises:
            OptionError: As for ``kept``.
            OutputError: The file cannot be written. Folders that do not exist are made.
        """
        check_writable(path)
        kept_edges = self.kept(size, q)
        scores = _mean_scores(self.edges)
        writers = [_eap_name(writer) for writer in self.graph.writers]

        edges: dict[str, Any] = {}
        for writer, reader in self.graph.edges:
            edge = {
                "score": float(scores[writer, reader]),
                "in_graph": bool(kept_edges[writer, reader]),
            }
            reader_name = self.graph.readers[reader]
            _, _, part = reader_name.partition(".")
            suffix = f"<{part}>" if part else ""
            for node in self.graph.nodes_after[reader_name]:
                edges[f"{writers[writer]}->{_eap_name(node)}{suffix}"] = edge

        nodes = {"logits": {"in_graph": True}}
        for name, edges_of_writer in zip(writers, kept_edges, strict=True):
            nodes[name] = {"in_graph": bool(edges_of_writer.any())}

        text = json.dumps({"cfg": self.about["cfg"], "nodes": nodes, "edges": edges})
        path = Path(path)
        write_whole(path, lambda new_path: new_path.write_text(text, encoding="utf-8"))
        return path

    def __str__(self) -> str:
        areas = [f"{name} {value:.3f}" for name, value in self.areas.items()]

        about = self.about
        lines = [
            (
                f"{about['metric']}; {DIRECTIONS[about['direction']]}; edges ranked on"
                f" {about['ranked_on']}, {self.edges.method_words}; on {about['reported_on']} all"
                f" other edges carry {_ABLATION_WORDS[about['ablation']]}"
            ),
            str(self.edges.resolution),
            printed(self.curve),
            ", ".join(areas),
        ]
        if (self.curve.faithfulness >= _DEFAULT_FAITHFULNESS).any():
            similarity, chance = self.stability()
            lines.append(
                f"stability: the first {self.size()} edges of two halves of the ranking prompts"
                f" share {similarity:.2f} (Jaccard index; {chance:.2f} by chance)"
            )
        lines.append(self.edges.sharing_words)
        return "\n".join(filter(None, lines))

    def _count(self, size: int | None) -> int:
        """The number of edges to choose, checked."""
        if size is None:
            return self.size()
        check_counts(1, len(self.graph.edges), size=size)
        return size


@alone
def circuit(
    model: Any,
    prompts: Sequence[Prompt | str],
    condition: Condition,
    *,
    steps: int = 5,
    metric: Metric | None = None,
    ablation: Ablation = "counterpart",
    sizes: int | Sequence[int] | None = None,
    memory: str = MEMORY,
    seed: int = 0,
) -> Circuit:
    """Rank edges on one half of the prompts, and measure on the other half how much of the effect
    the first of them carry alone.

    ``faithfulness(C) = (metric(C) − metric(∅)) / (metric(all) − metric(∅))``

    It is a ratio of means over units: prompts, or groups of prompts. ``metric(C)`` is that of a
    clean run in which every edge outside C carries the writer's output of another run. This is
    exact and takes one pass.

    Args:
        model: As for ``edges``.
        prompts: Prompts with an answer that the model reads. A random half of them, or of their
            groups, is used to rank the edges.
        condition: The other version.
        steps: As for ``edges``.
        metric: As for ``patch``.
        ablation: What the edges outside C carry. "counterpart": the writer's output in the other
            version. "mean": its mean over the clean runs of the ranking half, by position if all
            prompts have the same length, and otherwise over all tokens. "resample": its output in
            the clean run of a random prompt of that half, aligned from the end. Zero is not
            offered, because the model never has such outputs.
        sizes: One or several numbers of edges. By default they are 0.1 % to 50 % of all edges. No
            edges and all edges are always measured too.
        memory: As for ``edges``.
        seed: The seed of random circuits and resampled prompts, and of the draws of ``edges``.

    Returns:
        The scores of the edges, and the curve of faithfulness over the number of edges.

    Raises:
        MechattnError: There are too few prompts for two halves with intervals, or a size is not a
            number of edges; or as for ``edges``.

    Source:
        Faithfulness and its areas, CPR and CMD: arXiv:2504.13151; stability over samples:
        arXiv:2510.00845.
    """
    check_choice(Ablation, ablation=ablation)
    check_counts(steps=steps)
    request = request_of(
        model, prompts, condition, metric, direction="noising", memory=memory, seed=seed
    )
    request.units.refuse_below(2 * FEWEST, " for two halves", instead="")
    ranking_half, reporting_half = request.units.halves()
    ranking_request = request.of_prompts(ranking_half)
    reporting_request = request.of_prompts(reporting_half)

    model = request.model
    graph = graph_of(model)
    edge_count = len(graph.edges)
    all_sizes = _all_sizes(sizes, edge_count)
    check_edges_fit(model, graph, ranking_request.pairs + reporting_request.pairs, request.memory)
    scores = attributed_edges(ranking_request, graph, steps)

    # The order of the scores comes first, then random orders to compare it with.
    generator = np.random.default_rng(seed)
    orders = [_ranked(scores, graph.exists)]
    orders += [generator.permutation(edge_count) for _ in range(_DRAWS)]

    measurement = CircuitMeasurement(
        ranking_request,
        reporting_request,
        graph,
        sizes=all_sizes,
        ablation=ablation,
        generator=generator,
    )
    curve = _curve(all_sizes, measurement.effects(orders))

    cfg = model.cfg
    about = {
        **scores.about,
        "ablation": ablation,
        "ranked_on": scores.units.words,
        "reported_on": reporting_request.units.words,
        "cfg": {
            "n_layers": cfg.n_layers,
            "n_heads": cfg.n_heads,
            "d_model": cfg.d_model,
            "parallel_attn_mlp": bool(getattr(cfg, "parallel_attn_mlp", False)),
        },
    }
    return Circuit(scores, graph, curve, about, measurement)


def _ranked(scores: Patching, edge_set: EdgeSet) -> np.ndarray:
    """The numbers of the edges in a set, those whose mean scores are furthest from 0 first."""
    return largest_first(_mean_scores(scores)[edge_set])


def _mean_scores(scores: Patching) -> np.ndarray:
    """The mean score [writer reader] of each edge over units; NaN where no edge exists."""
    return scores.units.means(scores.effects.effect.values).mean(0)


def _faithfulness(effects: CircuitEffects) -> Float[np.ndarray, "order size"]:
    """Faithfulness as a ratio of means over units.

    The first size must be no edges, and the last must be all.
    """
    carried = (effects - effects[:, :, :1]).mean(0)
    return carried / carried[:, -1:]


def _connected(graph: Graph, kept_edges: EdgeSet) -> EdgeSet:
    """The edges that lie on a path of kept edges from the embedding to the logits."""
    # Which readers are inputs of which writers.
    is_input_of = np.array([np.isin(graph.writers, nodes) for nodes in graph.nodes_after.values()])
    is_embedding = np.array(graph.writers) == "embedding"
    is_logits = np.array(graph.readers) == "logits"

    # Each edge that is removed may cut the paths of others, so repeat until nothing changes.
    while True:
        reader_has_edge = np.any(kept_edges, axis=0)
        writer_has_edge = np.any(kept_edges, axis=1)
        is_reached = (reader_has_edge @ is_input_of) | is_embedding
        leads_on = (is_input_of @ writer_has_edge) | is_logits

        fewer_edges = kept_edges & is_reached[:, None] & leads_on
        if (fewer_edges == kept_edges).all():
            return kept_edges
        kept_edges = fewer_edges


def _eap_name(node: str) -> str:
    """The name of a node in EAP-IG, such as "a0.h1" for "L0H1" and "m0" for "L0MLP"."""
    if node == "embedding":
        return "input"
    if node == "logits":
        return node
    layer_and_head = head_named(node)
    if layer_and_head is not None:
        layer, head = layer_and_head
        return f"a{layer}.h{head}"
    return "m" + node.removeprefix("L").removesuffix("MLP")


def _all_sizes(sizes: int | Sequence[int] | None, edge_count: int) -> list[int]:
    """The sizes to measure in ascending order: those that were chosen, no edges, and all.

    Raises:
        OptionError: A size is not a number of edges.
    """
    if sizes is None:
        sizes = [round(share * edge_count) for share in _SHARES]

    chosen_sizes = as_tuple(sizes)
    for size in chosen_sizes:
        check_counts(0, edge_count, sizes=size)
    return sorted({0, *chosen_sizes, edge_count})


def _curve(sizes: Sequence[int], effects: CircuitEffects) -> pd.DataFrame:
    """The faithfulness of each size: of the first order with its interval, and the mean of all
    other orders, which are random.
    """
    faithfulness = _faithfulness(effects)
    carried = effects[:, 0] - effects[:, 0, :1]  # that of no edges is the first
    interval = ratio_interval(carried, carried[:, -1])
    return pd.DataFrame(
        {
            "edges": sizes,
            "share": np.array(sizes) / sizes[-1],
            "faithfulness": faithfulness[0],
            "low": interval.low,
            "high": interval.high,
            "random": faithfulness[1:].mean(0),
        }
    )
