"""Circuits: faithfulness against TransformerLens, areas and connections by hand, files of EAP-IG's format."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from transformer_lens.tools.analysis import (
    EdgeAttributionConfig,
    FaithfulnessConfig,
    attribution_patch,
    faithfulness,
)

import mechattn as ma
from mechattn.conditions import Counterpart
from mechattn.errors import OptionError
from mechattn.model.checkpoint import lettered_tokenizer
from mechattn.patching.circuit import _connected
from mechattn.patching.edges import edge_runs
from mechattn.patching.graph import graph_of, read_edges, showing_edges
from mechattn.patching.pairs import request_of
from mechattn.render.words import sentence_of
from mechattn.stats.units import halves_of
from tests.patching.test_edges import EQUAL, metric, theirs
from tests.tiny_families import tiny_model

MANY = [
    ma.Prompt(tokens=(1, 30 + i, 31 - i, 40, 41, 9), answer_tokens=(60,), counterpart=(1, 50, 31 - i, 42 + i, 41, 9),
              other_answer=(61,), id=str(i))
    for i in range(8)
]  # fmt: skip


def pairs_of(model, prompts):
    return request_of(model, prompts, Counterpart(), None, "noising", "1GiB", 0).pairs


@pytest.fixture(scope="module")
def model():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ma.load_model(tiny_model("GPT-2", 80).double(), tokenizer=lettered_tokenizer(80))


@pytest.fixture(scope="module")
def by_ablation(model):
    """The circuit with each ablation."""
    return {
        ablation: ma.circuit(model, MANY, Counterpart(), sizes=[5, 20], ablation=ablation)
        for ablation in ("counterpart", "mean", "resample")
    }


@pytest.fixture(scope="module")
def found(by_ablation):
    """The circuit with the default ablation."""
    return by_ablation["counterpart"]


def test_what_a_circuit_carries_equals_transformer_lens(model):
    prompt = EQUAL[0]
    graph = graph_of(model)
    clean, corrupt = (torch.tensor([[*v, 60]]) for v in (prompt.tokens, prompt.counterpart))
    attributed = attribution_patch(model, clean, corrupt, metric, EdgeAttributionConfig("edge"))
    draws = np.random.default_rng(0).random((4, *graph.exists.shape))
    kept = graph.exists & (draws < np.array([0.3, 0.6, 0.9, 1.1])[:, None, None])
    with showing_edges(model):
        [pair] = pairs_of(model, [prompt])
        runs = edge_runs(model, graph, 2**31, pair)
        values = runs.with_edges(torch.from_numpy(kept), runs.exchanged)
    without_edges = runs.unpatched_logits.whole
    for row, value in zip(kept, values, strict=True):
        named = [
            edge for edge in attributed.edge_scores
            if row[graph.writers.index(theirs(edge[0])), graph.readers.index(theirs(edge[1]))]
        ]  # fmt: skip
        config = FaithfulnessConfig("corrupt")
        expected = faithfulness(model, clean, corrupt, metric, named, config).recovered
        assert (value - without_edges) / -without_edges == pytest.approx(expected, abs=1e-5)
    assert values.std() > 1e-2, "other sets of edges would be noticed"


def test_the_curve_is_made_on_prompts_that_did_not_rank(model, found):
    ranking, rest = halves_of(8)
    effects = found.edges.effects
    assert effects.prompt.values.tolist() == [str(index) for index in ranking]
    exists = found.graph.exists
    assert found.curve.edges.tolist() == [0, 5, 20, exists.sum()]
    assert found.curve.faithfulness.iloc[[0, -1]].tolist() == [0, 1]

    sizes = abs(effects.effect.mean("prompt").values)
    smallest_kept = np.sort(sizes[exists])[-20]
    largest = exists & (np.nan_to_num(sizes) >= smallest_kept)
    kept_edges = torch.from_numpy(np.stack([np.zeros_like(exists), largest, exists]))
    rows = []
    with showing_edges(model):
        for pair in pairs_of(model, [MANY[index] for index in rest]):
            runs = edge_runs(model, found.graph, 2**31, pair)
            rows.append(runs.with_edges(kept_edges, runs.exchanged))
    none, some, whole = np.mean(rows, 0)
    assert found.curve.faithfulness[2] == pytest.approx((some - none) / (whole - none), abs=1e-6)
    first_line, *_ = str(found).splitlines()
    assert "noising (−: the other version's output lowers it)" in first_line
    assert "edges ranked on 4 prompts" in first_line


def test_other_ablations_put_other_outputs(found, by_ablation):
    for ablation in ("mean", "resample"):
        curve = by_ablation[ablation].curve
        assert curve.faithfulness.iloc[-1] == 1
        assert abs(curve.faithfulness[2] - found.curve.faithfulness[2]) > 1e-3


def test_mean_ablation_averages_over_all_tokens(model):
    """Also where the prompts that rank are all as long."""
    ranking, reporting = halves_of(8)
    longer = replace(
        MANY[0], tokens=(1, 30, 31, 40, 41, 42, 9), counterpart=(1, 50, 31, 42, 41, 42, 9), id="x"
    )
    prompts = [*MANY]
    prompts[reporting[0]] = longer
    found = ma.circuit(model, prompts, Counterpart(), steps=1, sizes=[5], ablation="mean")
    effects = found._measurement.effects([np.arange(found.graph.exists.sum())])

    with showing_edges(model):
        written = [
            read_edges(model, found.graph, pair.base).written
            for pair in pairs_of(model, [prompts[index] for index in ranking])
        ]
        mean = torch.cat(written, 1).mean(1, keepdim=True)
        [pair] = pairs_of(model, [longer])
        runs = edge_runs(model, found.graph, 2**31, pair)
        no_edge = torch.zeros(1, *found.graph.exists.shape, dtype=torch.bool)
        expected = runs.with_edges(no_edge, mean.expand_as(runs.written))
    assert effects[0, 0, 0] == pytest.approx(expected[0], abs=1e-9)
    assert abs(expected[0]) > 1e-3


def test_areas_by_hand(found):
    curve = pd.DataFrame(
        {
            "edges": [0, 1, 4],
            "low": 0,
            "high": 1,
            "share": [0, 0.25, 1],
            "faithfulness": [0, 1.2, 1],
            "random": [0, 0, 1.0],
        }
    )
    made = replace(found, curve=curve)
    assert made.areas["CPR"] == pytest.approx(0.25 * 0.6 + 0.75 * 1.1)
    assert made.areas["CMD"] == pytest.approx(0.25 * (1 + 0.2) / 2 + 0.75 * 0.1)
    assert made.areas["CPR_random"] == pytest.approx(0.75 * 0.5)
    assert made.size(0.9) == 1


def test_stability_by_hand(found):
    values = found.edges.effects.effect.values[:, found.graph.exists]
    first, second = (
        set(np.argsort(-abs(values[half].mean(0)))[:20].tolist()) for half in halves_of(4)
    )
    same, chance = found.stability(20)
    assert same == pytest.approx(len(first & second) / len(first | second))
    assert 0 < chance < same
    assert f"share {found.stability()[0]:.2f} (Jaccard index" in str(found)


def test_a_circuit_without_an_edge_says_why(found):
    with pytest.warns(UserWarning, match=r"no edge has q < 1e-09; with 4 prompts"):
        assert found.table(q=1e-9).empty


def test_an_edge_without_scores_comes_last_and_moves_no_other(found):
    effects = found.edges.effects.copy(deep=True)
    writer, reader = np.argwhere(found.graph.exists)[0]
    missing = float(effects.effect[:, writer, reader].mean())
    effects.effect[:, writer, reader] = np.nan
    made = replace(found, edges=replace(found.edges, effects=effects))
    count = int(found.graph.exists.sum())
    others = [effect for effect in found.table(count).effect if effect != pytest.approx(missing)]
    assert made.table(count).effect.tolist() == others
    assert np.array_equal(made.kept(20), found.kept(20))


def test_edges_that_lead_nowhere_are_dropped(found):
    graph = found.graph
    kept = np.zeros(graph.exists.shape, dtype=bool)
    for writer, reader in [("embedding", "L0H1.v"), ("L0H1", "L1H0.k"), ("L1H0", "logits"), ("L0H2", "L1H3.q"),
                           ("embedding", "L1H2.q"), ("L0H3", "logits")]:  # fmt: skip
        kept[graph.writers.index(writer), graph.readers.index(reader)] = True
    made = {(graph.writers[w], graph.readers[r]) for w, r in np.argwhere(_connected(graph, kept))}
    assert made == {("embedding", "L0H1.v"), ("L0H1", "L1H0.k"), ("L1H0", "logits")}


def test_the_file_has_every_edge_of_the_format(found, tmp_path):
    data = json.loads(found.save(tmp_path / "new" / "circuit.json", size=20).read_text())
    layers, heads = data["cfg"]["n_layers"], data["cfg"]["n_heads"]
    expected, before = set(), ["input"]
    for layer in range(layers):
        of_layer = [f"a{layer}.h{head}" for head in range(heads)]
        for part in "qkv":
            expected |= {f"{w}->{head}<{part}>" for w in before for head in of_layer}
        before += of_layer
        expected |= {f"{w}->m{layer}" for w in before}
        before.append(f"m{layer}")
    expected |= {f"{w}->logits" for w in before}
    assert set(data["edges"]) == expected
    assert set(data["nodes"]) == {*before, "logits"}
    assert sum(edge["in_graph"] for edge in data["edges"].values()) == int(found.kept(20).sum())
    mean = found.edges.effects.effect.mean("prompt")
    assert data["edges"]["a0.h1->a1.h2<k>"]["score"] == pytest.approx(
        float(mean.sel(writer="L0H1", reader="L1H2.k"))
    )


def test_shared_keys_are_repeated_for_their_heads(toy, tmp_path):
    made = ma.circuit(toy, MANY[:6], Counterpart(), steps=1, sizes=[50])
    data = json.loads(made.save(tmp_path / "circuit.json", size=50).read_text())
    mean = made.edges.effects.effect.mean("prompt").sel(writer="L0H3", reader="L2H1.v")
    for head in (2, 3):
        assert data["edges"][f"a0.h3->a2.h{head}<v>"]["score"] == pytest.approx(float(mean))
    assert made.kept(50).any()
    assert _connected(made.graph, made.graph.exists).sum() == made.graph.exists.sum()


def test_the_figure_draws_every_edge_of_the_circuit(found):
    figure = ma.render.circuit_map(found, size=20)
    table = found.table(20)
    drawn = {*table.writer, "logits"}
    arcs = [
        node for reader in table.reader for node in found.graph.nodes_after[reader] if node in drawn
    ]
    legend = [trace.name for trace in figure.data[:2]]
    assert legend == [f"the other output {verb} the metric" for verb in ("lowers", "raises")]
    assert len(figure.data) == 2 + len(arcs) + 1
    top = table.iloc[0]
    assert f"{top.writer} → {top.reader}" in figure.data[-2].hovertext
    nodes = figure.data[-1]
    assert len(set(zip(nodes.x, nodes.y))) == len(nodes.hovertext), "no two nodes at a place"
    assert f"{len(table)} edges on paths from the embedding to the logits. " in sentence_of(figure)
    assert "On the other half, the first 20 edges carry" in sentence_of(figure)
    assert "What they carry was not measured" in sentence_of(ma.render.circuit_map(found, size=19))


def test_few_prompts_and_impossible_sizes_are_refused(model):
    with pytest.raises(OptionError, match="at least 6 for two halves"):
        ma.circuit(model, MANY[:5], Counterpart())
    with pytest.raises(OptionError, match=r"sizes=-1: give a whole number, at least 0"):
        ma.circuit(model, MANY, Counterpart(), sizes=[-1])


@pytest.mark.parametrize("ablation", ["counterpart", "resample"])
def test_another_ranking_is_measured_on_the_same_half(by_ablation, ablation):
    """The same ranking carries the same; turned round, its first edges are those that matter least."""
    found = by_ablation[ablation]
    turned = found.edges.effects.copy()
    turned["effect"] = 1 / turned.effect
    made = found.beside("same", found.edges).beside("turned", replace(found.edges, effects=turned))
    assert made.curve[[*found.curve]].equals(found.curve)
    assert made.curve.same.equals(made.curve.faithfulness.rename("same"))
    assert abs(made.curve.turned[2] - made.curve.faithfulness[2]) > 0.05
    assert made.areas["CPR_same"] == made.areas["CPR"] != made.areas["CPR_turned"]


def test_what_does_not_rank_these_edges_is_refused(model, found):
    other = replace(found.edges, effects=found.edges.effects.isel(reader=slice(1, None)))
    for name, given, words in (
        ("low", found.edges, "already"),
        ("a", other, "does not rank"),
    ):
        with pytest.raises(OptionError, match=words):
            found.beside(name, given)


def test_groups_of_unequal_size_count_the_same(model):
    """Two groups of one prompt, and one of three, among those that rank."""
    ranking, _ = halves_of(6)
    named = [replace(MANY[i], group=f"g{i if i < 6 else ranking[0]}") for i in range(8)]
    found = ma.circuit(model, named, Counterpart(), steps=1, sizes=[5])
    exists = found.graph.exists
    effects = pd.DataFrame(found.edges.effects.effect.values[:, exists].astype(np.float64))
    by_group = effects.groupby(np.array(found.edges.units.group_of_prompt))
    assert sorted(by_group.size()) == [1, 1, 3]
    mean = by_group.mean().mean().values
    order = np.argsort(-abs(mean), kind="stable")
    assert found.table(int(exists.sum())).effect.values == pytest.approx(mean[order], abs=1e-12)


def test_without_a_size_that_carries_enough(found):
    with pytest.raises(OptionError, match=r"no size has a faithfulness of 1\.5; give size="):
        replace(found, curve=found.curve.assign(faithfulness=[0, 0.5, 1.2, 1])).size(1.5)
    for options in ({"size": 5, "q": 0.05}, {"q": "a"}, {"size": 10**6}):
        with pytest.raises(OptionError, match=r": give (one of them|a (whole )?number)"):
            found.kept(**options)
    no_effect = replace(found, curve=found.curve.assign(faithfulness=np.nan))
    assert "stability" in str(found)
    assert "stability" not in str(no_effect)
