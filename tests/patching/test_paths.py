"""Exact paths, against plain forward passes of transformers with hooks by hand."""

from functools import partial

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.conditions import Counterpart
from mechattn.errors import OptionError
from tests.conftest import loaded_once
from tests.patching.plain_runs import W_O, plain_logits, plain_toy
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
    given, projected = {}, {}
    width = native.config.head_dim

    def at_output(layer, value):
        given[layer] = value if z is None else z[layer]
        return given[layer]

    def at_projection(key, value):
        if put and key in put:
            head, piece = put[key]
            value = value.clone()
            value[:, head * width : (head + 1) * width] = piece
        projected[key] = value
        return value

    reading = {W_O.format(layer): partial(at_output, layer) for layer in range(4)}
    writing = {
        f"model.layers.{layer}.self_attn.{part}_proj": partial(at_projection, (part, layer))
        for part in "qkv"
        for layer in range(4)
    }
    with torch.no_grad():
        logits = plain_logits(native, tokens, reading, writing)[-2]
    return float(logits[60] - logits[61]), given, projected


def test_paths_by_hand():
    native = plain_toy()
    model = loaded_once("toy:llama", dtype=torch.float64)
    made = ma.paths(model, LONGER[:2], Counterpart(), NAMED, direction="denoising")
    senders = [sender for sender, _ in NAMED]
    live = ma.patch(model, LONGER[:2], Counterpart(), at=senders, direction="denoising")
    width = native.config.head_dim
    unfrozen = []
    for index, prompt in enumerate(LONGER[:2]):
        source, base = ([*version, 60] for version in (prompt.tokens, prompt.counterpart))
        before, mine, _ = inputs_of(native, base)
        after, theirs, _ = inputs_of(native, source)
        assert float(made.effects.whole[index]) == pytest.approx(after - before, abs=2e-6)
        for number, (sender, end) in enumerate(NAMED):
            layer, head = int(sender[1]), int(sender[3])
            z = {n: values.clone() for n, values in mine.items()}
            columns = slice(head * width, (head + 1) * width)
            for from_place, to_place in PARTNERS:
                z[layer][to_place, columns] = theirs[layer][from_place, columns]
            value, _, projected = inputs_of(native, base, z)
            if end != "logits":
                key = (end[-1], int(end[1]))
                receiver = int(end[3])
                piece = projected[key][:, receiver * width : (receiver + 1) * width]
                value, _, _ = inputs_of(native, base, put={key: (receiver, piece)})
            effect = float(made.effects.effect[index, number])
            assert effect == pytest.approx(value - before, abs=2e-6)
            with_all = float(live.effects.effect[index].sel(layer=layer, head=head))
            unfrozen.append(abs(with_all - effect))
    assert max(unfrozen) > 1e-3, "heads that are not frozen would be noticed"


def test_paths_that_do_not_exist_are_refused_in_words(toy):
    for between, said in (
        ([("L0H1", "L1H9.q")], r"no head 9 in layer 1: .* has heads 0 to 7 in layers 0, 1, 2, 3"),
        ([("L0H1", "L1H4.k")], r"has heads 0 to 3 in layers"),
        ([("L1H1", "L1H2.q")], r"nothing passes from layer 1 to layer 1; name a later layer"),
        ([("L1H1", "L2H2")], r"is not a path: give a pair such as"),
        ([], r"give paths such as"),
    ):
        with pytest.raises(OptionError, match=said):
            ma.paths(toy, LONGER, Counterpart(), between)


def test_paths_that_go_together_by_memory_make_no_difference():
    model = loaded_once("toy:llama", dtype=torch.float64)
    together, alone = (
        ma.paths(
            model, LONGER[:1], Counterpart(), [*NAMED[1:4], ("L00H5", "L1H02.k")], memory=memory
        ).effects.effect
        for memory in ("1GiB", "1KiB")
    )
    assert len(together.path) == 3, "a path that is named twice is one test"
    np.testing.assert_allclose(alone, together, atol=1e-9)
    assert abs(together - together.roll(path=1)).max() > 1e-4, "exchanged paths would be noticed"
