"""Edges against TransformerLens on versions of equal length, and by hand on a plain model where lengths differ."""

import warnings
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformer_lens.tools.analysis import EdgeAttributionConfig, attribution_patch

import mechattn as ma
from mechattn.conditions import Counterpart
from mechattn.errors import ModelError, OptionError
from mechattn.model.checkpoint import lettered_tokenizer
from mechattn.patching import effects
from mechattn.patching.edges import edge_runs
from mechattn.patching.graph import graph_of, showing_edges
from mechattn.patching.pairs import request_of
from mechattn.patching.plan import edges_fixed_bytes, edges_row_bytes
from mechattn.stats.many_tests import paired_tests
from tests.conftest import loaded_once, short_problems
from tests.patching.plain_runs import W_O, plain_logits, plain_toy
from tests.patching.test_pairs import LONGER, PARTNERS
from tests.tiny_families import tiny_model

EQUAL = [
    ma.Prompt(tokens=(1, 30 + i, 31, 40, 41, 9), answer_tokens=(60,), counterpart=(1, 50, 31, 42 + i, 41, 9),
              other_answer=(61,), id=str(i))
    for i in range(3)
]  # fmt: skip


def metric(logits):
    return logits[0, -2, 60] - logits[0, -2, 61]


def theirs(node):
    """Our name of a node of TransformerLens."""
    if node.kind in ("embed", "logits"):
        return {"embed": "embedding", "logits": "logits"}[node.kind]
    part = {"attn_head_out": "", "q_input": ".q", "k_input": ".k", "v_input": ".v"}.get(node.kind)
    return f"L{node.layer}MLP" if part is None else f"L{node.layer}H{node.head}{part}"


# Attention and MLP beside each other, and one after the other; a circuit of GPT-2 is in test_circuit.py.
@pytest.mark.parametrize(
    ("family", "heads", "direction"),
    [
        ("GPT-NeoX", {}, "denoising"),
        ("Llama", {"num_key_value_heads": 4}, "noising"),
    ],
)
def test_edges_equal_transformer_lens(family, heads, direction):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        native = tiny_model(family, 80, **heads).double()
        model = ma.load_model(native, tokenizer=lettered_tokenizer(80))
    own, other = (
        torch.tensor([[*version, 60] for version in versions])
        for versions in zip(*((prompt.tokens, prompt.counterpart) for prompt in EQUAL))
    )
    clean, corrupt = (own, other) if direction == "denoising" else (other, own)
    found = attribution_patch(model, clean, corrupt, metric, EdgeAttributionConfig("edge"))
    summed = Counter()
    for (writer, reader), score in found.edge_scores.items():
        summed[theirs(writer), theirs(reader)] += score
    expected = np.array([*summed.values()])

    patched = ma.edges(model, EQUAL, Counterpart(), direction=direction).effects
    means = patched.effect.mean("prompt")
    assert int(means.notnull().sum()) == len(summed)
    scores = np.array([means.sel(writer=writer, reader=reader) for writer, reader in summed])
    largest = abs(expected).max()
    assert largest > 1e-2
    assert abs(scores - expected).max() < 1e-4 * largest
    assert abs(np.roll(scores, 1) - expected).max() > 1e-2 * largest, "other edges' are noticed"


def run_by_hand(tokens, reader=None, step=None, embedding=0.0):
    """logit[60] − logit[61] before the last token, and each writer's output [pos d_model]; a step is added to what one
    reader reads.
    """
    model = plain_toy()
    width = model.config.head_dim
    written, stream = {}, {}

    def of_heads(layer, z):
        weight = model.model.layers[layer].self_attn.o_proj.weight
        for head in range(8):
            columns = slice(head * width, (head + 1) * width)
            written[f"L{layer}H{head}"] = z[:, columns] @ weight[:, columns].T

    def of_embedding(out):
        written["embedding"] = out + embedding
        return written["embedding"]

    reading, writing = {}, {"model.embed_tokens": of_embedding}
    for layer in range(4):
        reading[W_O.format(layer)] = partial(of_heads, layer)
        writing[f"model.layers.{layer}.mlp"] = partial(written.__setitem__, f"L{layer}MLP")

    if reader == "logits":
        reading["model.norm"] = lambda x: x + step
    elif reader and reader.endswith("MLP"):
        reading[f"model.layers.{reader[1]}.post_attention_layernorm"] = lambda x: x + step
    elif reader:
        name = f"model.layers.{reader[1]}"
        projection = f"{name}.self_attn.{reader[-1]}_proj"
        head = int(reader[3])

        def of_head(out):
            columns = slice(head * width, (head + 1) * width)
            norm = model.get_submodule(f"{name}.input_layernorm")
            moved = norm(stream["x"] + step) @ model.get_submodule(projection).weight.T
            out = out.clone()
            out[:, columns] = moved[:, columns]
            return out

        reading[name] = partial(stream.__setitem__, "x")
        writing[projection] = of_head

    logits = plain_logits(model, tokens, reading, writing)[-2]
    return logits[60] - logits[61], written


READERS = ["L1H2.q", "L1H3.k", "L2H0.v", "L2MLP", "logits"]
WRITERS = ["embedding", "L0H1", "L0MLP", "L1H2"]


def test_edges_of_versions_of_other_lengths_by_hand():
    """Attributed with one and with three steps, and patched exactly, each against autograd on the plain model."""
    model = loaded_once("toy:llama", dtype=torch.float64)
    made = {steps: ma.edges(model, LONGER[:2], Counterpart(), steps=steps) for steps in (1, 3)}
    checked = made[1].checked.set_index(["prompt", "writer", "reader"]).exact
    compared = 0
    misaligned = []
    for index, prompt in enumerate(LONGER[:2]):
        base, source = ([*version, 60] for version in (prompt.tokens, prompt.counterpart))
        before, mine = run_by_hand(base)
        _, source_values = run_by_hand(source)

        def step(writer, shift=0, mine=mine, source_values=source_values):
            moved = torch.zeros_like(mine[writer])
            for to, at in PARTNERS:
                moved[to] = source_values[writer][max(0, at - shift)] - mine[writer][to]
            return moved.detach()

        for reader in READERS:
            for steps, points in ((1, [0.0]), (3, [1 / 6, 3 / 6, 5 / 6])):
                total = 0
                for point in points:
                    leaf = torch.zeros(len(base), 128, dtype=torch.float64, requires_grad=True)
                    value, _ = run_by_hand(base, reader, leaf, point * step("embedding"))
                    total = total + torch.autograd.grad(value, leaf)[0] / steps
                scores = made[steps].effects.effect[index].sel(reader=reader)
                for writer in WRITERS:
                    score = float(scores.sel(writer=writer))
                    if np.isnan(score):  # it is not before the reader
                        continue
                    assert score == pytest.approx(float((total * step(writer)).sum()), abs=2e-6)
                    misaligned.append(abs(score - float((total * step(writer, 1)).sum())))
                    compared += 1
        for (_, writer, reader), exact in checked[[prompt.id]].items():
            with torch.no_grad():
                patched, _ = run_by_hand(base, reader, step(writer))
            assert exact == pytest.approx(float(patched - before), abs=2e-6)
    assert compared > 40
    assert max(misaligned) > 1e-3, "tokens that are misaligned by one would be noticed"


def after_norm(native, tokens, layer, head):
    """What a head of a Gemma adds to the stream after the norm that follows attention, and the stream
    before the final norm.
    """
    seen = {}
    block = f"model.layers.{layer}"
    names = {"z": W_O.format(layer), "x": f"{block}.post_attention_layernorm", "last": "model.norm"}
    reading = {module: partial(seen.__setitem__, name) for name, module in names.items()}
    plain_logits(native, tokens, reading)
    width = native.config.head_dim
    columns = slice(head * width, (head + 1) * width)
    weight = native.get_submodule(names["z"]).weight
    norm = native.get_submodule(names["x"])
    result = seen["z"][:, columns] @ weight[:, columns].T
    sigma = (seen["x"].pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
    return result * (1 + norm.weight) / sigma, seen["last"]


def test_heads_write_after_the_norm_that_follows_attention():
    """With no edge kept the run is the source's; a head's edge to the logits is that of a plain Gemma."""
    model = loaded_once("toy:gemma3", dtype=torch.float64)
    native = plain_toy("toy:gemma3")
    pairs = ma.pairs(model, "ioi", 2)
    graph = graph_of(model)
    pair = request_of(model, pairs, Counterpart(), "logit_diff", "noising", "1GiB", 0).pairs[0]
    layer, head = 3, 2
    edge = graph.writers.index(f"L{layer}H{head}"), graph.readers.index("logits")
    kept = torch.ones(2, *graph.exists.shape, dtype=torch.bool)
    kept[0] = False
    kept[1, edge[0], edge[1]] = False
    with showing_edges(model):
        runs = edge_runs(model, graph, 2**31, pair)
        unpatched = runs.unpatched_logits
        source, direct = runs.with_edges(kept, runs.exchanged)
        assert source == pytest.approx(unpatched.whole, abs=1e-6)
        assert abs(source) > 1e-4

        with torch.no_grad():
            mine, last = after_norm(native, pair.base.tokens, layer, head)
            theirs, _ = after_norm(native, pair.source.tokens, layer, head)
            stream = (last + theirs - mine)[pair.base.of_segment("answer").nonzero()[0] - 1]
            logits = native.lm_head(native.model.norm(stream))[None]
        assert direct == pytest.approx(unpatched.effects(logits).item(), abs=1e-5)
        assert abs(direct) > 1e-4

        without_norms = replace(graph, norms={})
        with pytest.raises(ModelError, match="does not add up to the residual stream"):
            edge_runs(model, without_norms, 2**31, pair)


def test_integrated_gradients_are_complete():
    """What leaves the embedding adds up to the difference between the embeddings; with one step it doesn't."""
    model = loaded_once("toy:llama", dtype=torch.float64)
    missing = {}
    for steps in (1, 20):
        effects = ma.edges(model, EQUAL[:2], Counterpart(), steps=steps).effects
        of_embedding = effects.effect.sel(writer="embedding").sum("reader")
        missing[steps] = float(abs(of_embedding / effects.whole - 1).max())
    assert missing[20] < 1e-3
    assert missing[1] > 0.1, "the test would notice missing steps"


@pytest.fixture(scope="module")
def scores(toy):
    """All edges of the toy."""
    return ma.edges(toy, ma.pairs(toy, "ioi", 6), Counterpart())


def test_the_edges_table_tests_edges_and_warns(toy, scores):
    table = scores.table(top=5)
    assert list(table.columns[:2]) == ["writer", "reader"]
    assert "other_prompt" not in table
    assert table.attrs["family"] == "1055 edges attributed (first order)"
    printed = str(scores)
    assert "attributed against exact on 32 effects" in printed
    assert "L0H0.v is read by L0H0, L0H1" in printed, "8 heads share 4 of keys and values"
    assert not toy.cfg.use_attn_result
    assert not toy.cfg.use_split_qkv_input
    assert not toy.cfg.use_hook_mlp_in


def test_edges_of_few_prompts_are_ordered_by_interval(scores, monkeypatch):
    tested = []

    def counting(differences):
        tested.append(differences.shape)
        return paired_tests(differences)

    monkeypatch.setattr(effects, "paired_tests", counting)
    untested = replace(scores)
    printed = str(untested)
    table = untested.table(top=40)
    every = untested.table()
    assert tested == [(6, 1055), (6, 1055)], "the effects, and those beyond a random step"
    assert (
        "with 6 prompts and 1055 tests no p can pass q < 0.05 alone (smallest p 0.031)" in printed
    )
    assert "8 of 1055 shown, those whose interval is furthest from 0" in printed

    distance = np.maximum(every.effect_low, -every.effect_high)
    expected = every.loc[distance.sort_values(ascending=False, kind="stable").index[:40]]
    assert table.writer.tolist() == expected.writer.tolist()
    by_size = every.loc[every.effect.abs().sort_values(ascending=False).index[:40]]
    assert table.writer.tolist() != by_size.writer.tolist(), "another order would be noticed"


def test_grouping_rows_by_memory_changes_nothing(toy):
    graph = graph_of(toy)
    pair, *_ = request_of(toy, EQUAL, Counterpart(), "logit_diff", "noising", "1GiB", 0).pairs
    fixed = edges_fixed_bytes(toy, graph, pair)
    row = edges_row_bytes(toy, graph, pair)
    kept = torch.rand(7, *graph.exists.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    metrics = []
    with showing_edges(toy):
        for rows in (2, 50):
            runs = edge_runs(toy, graph, fixed + rows * row, pair)
            assert runs._most_rows(row) == rows
            metrics.append(runs.with_edges(kept, runs.exchanged))
    np.testing.assert_allclose(*metrics, rtol=1e-4, atol=1e-4)
    assert metrics[0].std() > 1e-3


def test_what_has_no_edges_is_refused_in_words(toy):
    falcon = loaded_once("toy:falcon", dtype=torch.float64)
    for model, options, error, words in (
        (falcon, {}, ModelError, "inputs of single heads of .*patch nodes with ma.patch"),
        (toy, {"memory": "1KiB"}, OptionError, "1,055 edges of .* need about .* GiB for a prompt"),
        (toy, {"steps": 0}, OptionError, "steps=0: give a whole number"),
    ):
        with pytest.raises(error, match=words):
            ma.edges(model, short_problems(2), ma.MeaninglessTokens("/", 3), **options)
