"""Edges against TransformerLens on versions of equal length, and by hand on a plain model where lengths differ."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformer_lens.tools.analysis import EdgeAttributionConfig, attribution_patch
from transformers import AutoModelForCausalLM

import mechattn as ma
from mechattn.conditions import Counterpart
from mechattn.errors import ModelError, OptionError
from mechattn.model.checkpoint import lettered_tokenizer, toy_folder
from mechattn.patching import effects
from mechattn.patching.edges import EdgePair
from mechattn.patching.graph import graph_of, showing_edges
from mechattn.patching.pairs import request_of
from mechattn.patching.plan import edges_fixed_bytes, edges_row_bytes
from mechattn.stats.many_tests import paired_tests
from tests.conftest import loaded_once
from tests.patching.test_pairs import LONGER, PARTNERS
from tests.tiny_families import tiny_model

EQUAL = [
    ma.Prompt(tokens=(20, 30 + i, 31, 40, 41, 9), answer_tokens=(60,), counterpart=(20, 50, 31, 42 + i, 41, 9),
              other_answer=(61,), id=str(i))
    for i in range(3)
]  # fmt: skip
FAMILIES = {
    "GPT-2": {},
    "GPT-NeoX": {},
    "Llama": {"num_key_value_heads": 4},
}


def theirs(node):
    """Our name of a node of TransformerLens."""
    if node.kind in ("embed", "logits"):
        return {"embed": "embedding", "logits": "logits"}[node.kind]
    part = {"attn_head_out": "", "q_input": ".q", "k_input": ".k", "v_input": ".v"}.get(node.kind)
    return f"L{node.layer}MLP" if part is None else f"L{node.layer}H{node.head}{part}"


@pytest.mark.parametrize(
    ("family", "direction"), [*((family, "denoising") for family in FAMILIES), ("Llama", "noising")]
)
def test_edges_equal_transformer_lens(family, direction):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        native = tiny_model(family, 80, **FAMILIES[family]).double()
        model = ma.load_model(native, tokenizer=lettered_tokenizer(80))
    made = ma.edges(model, EQUAL, Counterpart(), direction=direction)
    own, other = (
        torch.tensor([[*v, 60] for v in vs])
        for vs in zip(*((p.tokens, p.counterpart) for p in EQUAL))
    )
    clean, corrupt = (own, other) if direction == "denoising" else (other, own)
    found = attribution_patch(
        model,
        clean,
        corrupt,
        lambda logits: logits[0, -2, 60] - logits[0, -2, 61],
        EdgeAttributionConfig("edge"),
    )
    summed = {}
    for (writer, reader), score in found.edge_scores.items():
        key = theirs(writer), theirs(reader)
        summed[key] = summed.get(key, 0.0) + score
    means = made.effects.effect.mean("prompt")
    ours = {key: float(means.sel(writer=key[0], reader=key[1])) for key in summed}
    assert int(means.notnull().sum()) == len(summed)
    largest = max(map(abs, summed.values()))
    assert largest > 1e-2
    assert max(abs(ours[key] - summed[key]) for key in summed) < 1e-4 * largest
    wrong = ma.edges(
        model,
        EQUAL,
        Counterpart({p.id: (*p.counterpart[:-1], 10) for p in EQUAL}),
        direction=direction,
    )
    assert float(abs(wrong.effects.effect.mean("prompt") - means).max()) > 1e-2 * largest, (
        "another version is noticed"
    )


class ByHand:
    """toy:llama in float64 as transformers has it: what writers write, and inputs of single readers that are changed."""

    def __init__(self):
        self.native = AutoModelForCausalLM.from_pretrained(
            toy_folder("toy:llama"), dtype=torch.float64, attn_implementation="eager"
        ).eval()
        self.layers = self.native.model.layers

    def run(self, tokens, at=None, step=None, embedding=None):
        """logit[60] − logit[61] before the last token, and each writer's output [pos d_model]."""
        written, handles, seen = {}, [], {}
        width = self.native.config.head_dim

        def see_embedding(module, args, out):
            out = out if embedding is None else out + embedding
            written["embedding"] = out[0]
            return out

        handles.append(self.native.model.embed_tokens.register_forward_hook(see_embedding))
        for n, layer in enumerate(self.layers):

            def heads(module, args, n=n):
                for head in range(8):
                    some = slice(head * width, (head + 1) * width)
                    written[f"L{n}H{head}"] = args[0][0, :, some] @ module.weight[:, some].T

            handles.append(layer.self_attn.o_proj.register_forward_pre_hook(heads))
            handles.append(
                layer.mlp.register_forward_hook(
                    lambda m, a, out, n=n: written.update({f"L{n}MLP": out[0]})
                )
            )
            handles.append(
                layer.register_forward_pre_hook(lambda m, args, n=n: seen.update({n: args[0]}))
            )
            for part in "qkv":
                if at and at.startswith(f"L{n}H") and at.endswith(part):
                    head = int(at[3:-2])

                    def changed(module, args, out, layer=layer, head=head, n=n):
                        some = slice(head * width, (head + 1) * width)
                        moved = layer.input_layernorm(seen[n] + step) @ module.weight.T
                        return torch.cat(
                            [out[..., : some.start], moved[..., some], out[..., some.stop :]], -1
                        )

                    handles.append(
                        getattr(layer.self_attn, f"{part}_proj").register_forward_hook(changed)
                    )
            if at == f"L{n}MLP":
                handles.append(
                    layer.post_attention_layernorm.register_forward_pre_hook(
                        lambda m, a: (a[0] + step,)
                    )
                )
        if at == "logits":
            handles.append(
                self.native.model.norm.register_forward_pre_hook(lambda m, a: (a[0] + step,))
            )
        logits = self.native(torch.tensor([tokens]), use_cache=False).logits[0, -2]
        for handle in handles:
            handle.remove()
        return logits[60] - logits[61], written


READERS = ["L0H1.v", "L1H2.q", "L1H3.k", "L2H0.v", "L2MLP", "L3H5.q", "L0MLP", "logits"]


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_edges_of_versions_of_other_lengths_by_hand(direction):
    """Attributed with one and with three steps, and patched exactly, each against autograd on the plain model."""
    hand, model = ByHand(), loaded_once("toy:llama", dtype=torch.float64)
    made = {
        steps: ma.edges(model, LONGER, Counterpart(), steps=steps, direction=direction)
        for steps in (1, 3)
    }
    checked = made[1].checked.set_index(["prompt", "writer", "reader"]).exact
    ways = [(theirs, mine) for mine, theirs in PARTNERS] if direction == "denoising" else PARTNERS
    tried, misaligned = 0, []
    for i, prompt in enumerate(LONGER[:2]):
        own, other = ([*version, 60] for version in (prompt.tokens, prompt.counterpart))
        base, source = (other, own) if direction == "denoising" else (own, other)
        before, mine = hand.run(base)
        _, source_values = hand.run(source)

        def step(writer, shift=0, mine=mine, source_values=source_values):
            moved = torch.zeros_like(mine[writer])
            for to, at in ways:
                moved[to] = source_values[writer][max(0, at - shift)] - mine[writer][to]
            return moved.detach()[None]

        for reader in READERS:
            for steps in (1, 3):
                total = 0
                for point in [0.0] if steps == 1 else [1 / 6, 3 / 6, 5 / 6]:
                    leaf = torch.zeros(1, len(base), 128, dtype=torch.float64, requires_grad=True)
                    value, _ = hand.run(base, reader, leaf, point * step("embedding"))
                    total = total + torch.autograd.grad(value, leaf)[0] / steps
                scores = made[steps].effects.effect[i].sel(reader=reader)
                for writer in ("embedding", "L0H1", "L0MLP", "L1H2", "L3MLP"):
                    if (got := float(scores.sel(writer=writer))) == got:
                        assert got == pytest.approx(float((total * step(writer)).sum()), abs=2e-6)
                        misaligned.append(abs(got - float((total * step(writer, 1)).sum())))
                        tried += 1
        for (_, writer, reader), exact in checked[[prompt.id]].items() if i == 0 else ():
            with torch.no_grad():
                assert exact == pytest.approx(
                    float(hand.run(base, reader, step(writer))[0] - before), abs=2e-6
                )
    assert tried > 40
    assert max(misaligned) > 1e-3, "tokens that are misaligned by one would be noticed"


def after_norm(native, tokens, layer, head):
    """What a head of a Gemma adds to the stream after the norm that follows attention, and the stream
    before the final norm.
    """
    seen = {}
    block = native.model.layers[layer]
    projection = block.self_attn.o_proj
    norm = block.post_attention_layernorm
    handles = [
        projection.register_forward_pre_hook(lambda m, args: seen.update(z=args[0][0])),
        norm.register_forward_pre_hook(lambda m, args: seen.update(x=args[0][0])),
        native.model.norm.register_forward_pre_hook(lambda m, args: seen.update(last=args[0][0])),
    ]
    native(torch.tensor([tokens]), use_cache=False)
    for handle in handles:
        handle.remove()
    width = native.config.head_dim
    columns = slice(head * width, (head + 1) * width)
    result = seen["z"][:, columns] @ projection.weight[:, columns].T
    sigma = (seen["x"].pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
    return result * (1 + norm.weight) / sigma, seen["last"]


def test_heads_write_after_the_norm_that_follows_attention(monkeypatch):
    """With no edge kept the run is the source's; a head's edge to the logits is that of a plain Gemma."""
    model = loaded_once("toy:gemma3", dtype=torch.float64)
    native = AutoModelForCausalLM.from_pretrained(
        toy_folder("toy:gemma3"), dtype=torch.float64, attn_implementation="eager"
    ).eval()
    pairs = ma.pairs(model, "ioi", 2)
    graph = graph_of(model)
    pair = request_of(model, pairs, Counterpart(), "logit_diff", "noising", "1GiB", 0).pairs[0]
    layer, head = 3, 2
    edge = graph.writers.index(f"L{layer}H{head}"), graph.readers.index("logits")
    kept = torch.ones(2, *graph.exists.shape, dtype=torch.bool)
    kept[0] = False
    kept[1, edge[0], edge[1]] = False
    with showing_edges(model):
        runs = EdgePair(model, graph, pair, 2**31).runs()
        unpatched = runs.unpatched
        source, direct = EdgePair(model, graph, pair, 2**31).with_edges(
            kept, runs.exchanged, unpatched
        )
        assert source == pytest.approx(unpatched.whole, abs=1e-6)
        assert abs(source) > 1e-4

        with torch.no_grad():
            mine, last = after_norm(native, pair.base.tokens.tolist(), layer, head)
            theirs, _ = after_norm(native, pair.source.tokens.tolist(), layer, head)
            stream = (last + theirs - mine)[pair.base.of_segment("answer").nonzero()[0] - 1]
            logits = native.lm_head(native.model.norm(stream))[None]
        assert direct == pytest.approx(unpatched.effects(logits).item(), abs=1e-5)
        assert abs(direct) > 1e-4

        without_norms = replace(graph, norms={})
        with pytest.raises(ModelError, match="does not add up to the residual stream"):
            EdgePair(model, without_norms, pair, 2**31).runs()


def test_integrated_gradients_are_complete():
    """What leaves the embedding adds up to the difference between the embeddings; with one step it doesn't."""
    model = loaded_once("toy:llama", dtype=torch.float64)
    pairs = ma.pairs(model, "ioi", 2)
    made = {steps: ma.edges(model, pairs, Counterpart(), steps=steps).effects for steps in (1, 50)}
    whole = made[1].whole.values
    left = {
        steps: each.effect.sel(writer="embedding").sum("reader").values
        for steps, each in made.items()
    }
    assert abs(left[50] - whole).max() < 1e-3 * abs(whole).max()
    assert abs(left[1] - whole).max() > 0.1 * abs(whole).max(), (
        "the test would notice missing steps"
    )


def test_an_edges_table_tests_all_edges_and_says_how_far_to_trust_them(toy):
    model = toy
    made = ma.edges(model, ma.pairs(model, "ioi", 6), Counterpart())
    table = made.table(top=5)
    assert list(table.columns[:2]) == ["writer", "reader"]
    assert "other_prompt" not in table
    assert (
        table.attrs["family"]
        == f"{int(made.effects.effect[0].notnull().sum())} edges attributed (first order)"
    )
    assert "attributed against exact on 32 effects" in str(made)
    correlation, _ = made.agreement
    assert correlation == pytest.approx(
        np.corrcoef(made.checked.exact, made.checked.attributed)[0, 1]
    )
    assert not (model.cfg.use_attn_result)
    assert not (model.cfg.use_split_qkv_input)
    assert not (model.cfg.use_hook_mlp_in)


def test_edges_are_tested_once_and_few_prompts_order_them_by_the_interval(toy, monkeypatch):
    tested = []

    def counting(d):
        tested.append(d.shape)
        return paired_tests(d)

    monkeypatch.setattr(effects, "paired_tests", counting)
    scores = ma.edges(toy, ma.pairs(toy, "ioi", 6), Counterpart())
    printed = str(scores)
    table = scores.table(top=40)
    every = scores.table()
    assert tested == [(6, 1055), (6, 1055)], "the effects, and those beyond a random step"
    assert (
        "with 6 prompts and 1055 tests no p can pass q < 0.05 alone (smallest p 0.031)" in printed
    )
    assert "660 tests must reach it together, or use 19 prompts" in printed
    assert "8 of 1055 shown, those whose interval is furthest from 0" in printed

    distance = np.maximum(every.effect_low, -every.effect_high)
    expected = every.loc[distance.sort_values(ascending=False, kind="stable").index[:40]]
    assert table.writer.tolist() == expected.writer.tolist()
    np.testing.assert_allclose(table.q_effect, expected.q_effect)
    by_size = every.loc[every.effect.abs().sort_values(ascending=False).index[:40]]
    assert table.writer.tolist() != by_size.writer.tolist(), "another order would be noticed"


def test_as_many_rows_go_together_as_fit_and_make_no_difference(toy):
    pairs = ma.pairs(toy, "ioi", 3)
    graph = graph_of(toy)
    pair, *_ = request_of(toy, pairs, Counterpart(), "logit_diff", "noising", "1GiB", 0).pairs
    fixed = edges_fixed_bytes(toy, graph, pair)
    row = edges_row_bytes(toy, graph, pair)
    kept = torch.rand(7, *graph.exists.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    metrics = []
    with showing_edges(toy):
        for rows in (2, 50):
            edge_pair = EdgePair(toy, graph, pair, fixed + rows * row)
            runs = edge_pair.runs()
            assert edge_pair._rows(row) == rows
            metrics.append(edge_pair.with_edges(kept, runs.exchanged, runs.unpatched))
    np.testing.assert_allclose(*metrics, rtol=1e-4, atol=1e-4)
    assert metrics[0].std() > 1e-3


def test_what_has_no_edges_is_refused_in_words(shared):
    pairs, falcon, model = EQUAL, shared("toy:falcon"), shared("toy:llama")
    with pytest.raises(
        ModelError, match=r"no inputs of single heads of .*patch nodes with ma.patch"
    ):
        ma.edges(falcon, ma.pairs(falcon, "ioi", 2), Counterpart())
    with pytest.raises(
        OptionError, match=r"1,055 edges of .* need about .* GiB for a prompt of \d+ tokens"
    ):
        ma.edges(model, ma.pairs(model, "ioi", 2), Counterpart(), memory="1MiB")
    with pytest.raises(OptionError, match="steps=0: give a whole number"):
        ma.edges(model, pairs, Counterpart(), steps=0)
