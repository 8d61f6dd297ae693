"""Exact paths, against plain forward passes of transformers with hooks by hand, and against exact edges."""

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.conditions import Counterpart
from mechattn.errors import OptionError
from mechattn.model.checkpoint import lettered_tokenizer
from mechattn.patching import paths
from mechattn.patching.edges import EdgePair
from mechattn.patching.graph import graph_of, showing_edges
from mechattn.patching.pairs import request_of
from tests.conftest import loaded_once
from tests.known_answers.known_heads import VOCABULARY, copying_model
from tests.patching.test_edges import ByHand
from tests.patching.test_pairs import LONGER, PARTNERS

NAMED = [
    ("L0H1", "L2H3.q"),
    ("L0H5", "L1H2.k"),
    ("L1H0", "L3H1.v"),
    ("L2H2", "logits"),
    ("L0H3", "logits"),
]


def inputs_of(native, tokens, z=None, put=None):
    """Metric, what each W_O is given, and the projections; ``z`` replaces the former, ``put`` a slice of the latter."""
    given, projected, handles = {}, {}, []
    width = native.config.head_dim

    def at_output(module, args, n):
        value = args[0] if z is None else z[n][None]
        given[n] = value[0].clone()
        return (value,)

    def at_projection(module, args, out, key):
        if put and key in put:
            head, value = put[key]
            out = out.clone()
            out[0, :, head * width : (head + 1) * width] = value
        projected[key] = out[0]
        return out

    for n, layer in enumerate(native.model.layers):
        handles.append(
            layer.self_attn.o_proj.register_forward_pre_hook(lambda m, a, n=n: at_output(m, a, n))
        )
        for part in "qkv":
            projection = getattr(layer.self_attn, f"{part}_proj")
            handles.append(
                projection.register_forward_hook(
                    lambda m, a, o, key=(part, n): at_projection(m, a, o, key)
                )
            )
    with torch.no_grad():
        logits = native(torch.tensor([tokens]), use_cache=False).logits[0, -2]
    for handle in handles:
        handle.remove()
    return float(logits[60] - logits[61]), given, projected


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_paths_by_hand(direction):
    native, model = ByHand().native, loaded_once("toy:llama", dtype=torch.float64)
    made = ma.paths(model, LONGER, Counterpart(), NAMED, direction=direction)
    ways = [(theirs, mine) for mine, theirs in PARTNERS] if direction == "denoising" else PARTNERS
    width, unfrozen = native.config.head_dim, []
    live = {
        sender: ma.patch(
            model, LONGER, Counterpart(), at=[sender], metric="logit_diff", direction=direction
        )
        for sender, _ in NAMED
    }
    for i, prompt in enumerate(LONGER[:2]):
        own, other = ([*version, 60] for version in (prompt.tokens, prompt.counterpart))
        base, source = (other, own) if direction == "denoising" else (own, other)
        before, mine, _ = inputs_of(native, base)
        after, theirs, _ = inputs_of(native, source)
        assert float(made.effects.whole[i]) == pytest.approx(after - before, abs=2e-6)
        for j, (sender, end) in enumerate(NAMED):
            layer, head = int(sender[1]), int(sender[3])
            z = {n: each.clone() for n, each in mine.items()}
            some = slice(head * width, (head + 1) * width)
            for to, at in ways:
                z[layer][to, some] = theirs[layer][at, some]
            value, _, projected = inputs_of(native, base, z)
            if end != "logits":
                key, at = (end[-1], int(end[1])), int(end[3])
                piece = projected[key][:, at * width : (at + 1) * width]
                value, _, _ = inputs_of(native, base, put={key: (at, piece)})
            assert float(made.effects.effect[i, j]) == pytest.approx(value - before, abs=2e-6)
            unfrozen.append(abs(float(live[sender].effects.effect[i].squeeze()) - (value - before)))
    assert max(unfrozen) > 1e-3, "heads that are not frozen would be noticed"


def test_without_mlps_a_path_is_an_edge():
    model = ma.load_model(copying_model(0, steps=0), tokenizer=lettered_tokenizer(VOCABULARY))
    pairs = [ma.Prompt(tokens=(11 + i, 2, 3, 11 + i), counterpart=(2, 11 + i, 3, 11 + i), answer_tokens=(2,),
                       other_answer=(3,), id=str(i)) for i in range(3)]  # fmt: skip
    named = [("L0H1", "L1H0.k"), ("L0H2", "L1H3.q"), ("L0H0", "L1H1.v"), ("L0H3", "logits")]
    made = ma.paths(model, pairs, Counterpart(), named)
    graph = graph_of(model)
    some = [(graph.writers.index(a), graph.readers.index(b)) for a, b in named]
    with showing_edges(model):
        each = [
            EdgePair(model, graph, pair, 2**31).exact(some)
            for pair in request_of(
                model, pairs, Counterpart(), "logit_diff", "noising", "1GiB", 0
            ).pairs
        ]
    np.testing.assert_allclose(made.effects.effect.values, each, atol=1e-5)
    assert abs(np.array(each)).max() > 1e-3


def test_paths_that_do_not_exist_are_refused_in_words():
    for between, said in (
        ([("L0H1", "L1H9.q")], r"no head 9 in layer 1: .* has heads 0 to 7 in layers 0, 1, 2, 3"),
        ([("L0H1", "L1H4.k")], r"has heads 0 to 3 in layers"),
        ([("L1H1", "L1H2.q")], r"nothing passes from layer 1 to layer 1; name a later layer"),
        ([("L1H1", "L2H2")], r"is not a path: give such as"),
        ([], r"give paths such as"),
    ):
        with pytest.raises(OptionError, match=said):
            ma.paths("toy:llama", LONGER, Counterpart(), between)


def test_paths_that_go_together_by_memory_make_no_difference(monkeypatch):
    model = loaded_once("toy:llama", dtype=torch.float64)
    sizes = []
    patched = paths._patched

    def counted(model, named, *others):
        sizes.append(len(named))
        return patched(model, named, *others)

    monkeypatch.setattr(paths, "_patched", counted)
    together = ma.paths(model, LONGER, Counterpart(), NAMED).effects.effect.values
    assert set(sizes) == {len(NAMED)}
    sizes.clear()
    alone = ma.paths(model, LONGER, Counterpart(), NAMED, memory="1KiB").effects.effect.values
    assert set(sizes) == {1}
    np.testing.assert_allclose(alone, together, atol=1e-9)
