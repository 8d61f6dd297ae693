"""Sinks by kind: heads written by hand, of which each is known."""

import math

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.errors import OptionError
from mechattn.model.checkpoint import lettered_tokenizer
from tests.known_answers import known_heads
from tests.known_answers.known_heads import VOCABULARY, repeated_spans


@pytest.fixture(scope="module")
def result():
    """In layer 0: a head whose sink has no value, one that writes the same everywhere, one of neither kind, no sink."""
    model = known_heads.handmade_model()
    attention = model.transformer.h[0].attn
    positions = known_heads._POSITION
    width = known_heads.D_HEAD
    with torch.no_grad():
        attention.c_attn.weight.zero_()
        attention.c_attn.bias.zero_()
        for head in range(3):
            known_heads._first_token(attention, head)
        attention.c_attn.bias[2 * width] = (
            math.log(60) * width**0.5
        )  # looks at the first token, but not alone
        for head, first in (
            (0, 1),
            (2, 0),
            (3, 0),
        ):  # values tell positions; of head 0 the first has none
            values = known_heads._matrix(attention, "v", head)
            for place in range(first, known_heads.POSITIONS):
                values[positions + place, place] = 1.0
        attention.c_attn.bias[2 * 4 * width + width] = 1.0  # head 1: one value, whatever the token
        attention.c_proj.weight.copy_(torch.eye(4 * width))
        attention.c_proj.bias.fill_(0.01)  # so that the median of the stream is not 0
    hooked = ma.load_model(model, tokenizer=lettered_tokenizer(VOCABULARY))
    tokens, _ = repeated_spans(6, torch.Generator().manual_seed(0))
    prompts = [ma.Prompt(tokens=tuple(row), id=str(i)) for i, row in enumerate(tokens.tolist())]
    return ma.run(hooked, prompts, {}, ma.analyses.AttentionSinks(), layers=[0])


def test_kinds_that_were_written_are_found(result):
    table = ma.analyses.sink_kinds(result).set_index("head")
    assert list(table.kind) == ["nop", "broadcast", "neither", "no sink"]
    assert (table.position[:3] == 0).all()
    assert table.value_ratio[0] == pytest.approx(0, abs=1e-4)
    assert table.value_ratio[1] == pytest.approx(1, abs=1e-4)
    assert table.output_rank[1] == pytest.approx(1, abs=1e-3)
    assert table.output_rank[2] > 2.2
    assert list(table.sink_rate) == [1, 1, 1, 0]
    assert np.isnan(table.value_ratio[3])


@pytest.mark.parametrize(
    ("value_below", "rank_below", "kinds"),
    [
        (2.0, 2.0, ["nop", "nop", "nop", "no sink"]),
        (0.3, 1000.0, ["nop", "broadcast", "broadcast", "no sink"]),
    ],
)
def test_thresholds_decide(result, value_below, rank_below, kinds):
    table = ma.analyses.sink_kinds(result, value_below=value_below, rank_below=rank_below)
    assert list(table.kind) == kinds


def test_where_massive_activations_are_the_sinks(result):
    """Set by hand, as the model has none."""
    table = ma.analyses.sink_kinds(result)
    assert table.massive_overlap.isna().all()
    data = result["attention_sinks"].copy(deep=True)
    data.massive_count[:] = 1.0
    data.massive_position[:] = 0.0
    data.massive_position[:3] = 7.0
    changed = ma.Result({**result.datasets, "attention_sinks": data}, result.provenance)
    assert list(ma.analyses.sink_kinds(changed).massive_overlap[:3]) == [0.5, 0.5, 0.5]


def test_what_cannot_be_told(result, slash_result):
    with pytest.raises(OptionError, match=r"add ma.analyses.AttentionSinks\(\)"):
        ma.analyses.sink_kinds(slash_result)
    with pytest.raises(OptionError, match="no condition 'slash'"):
        ma.analyses.sink_kinds(result, "slash")
    with pytest.raises(OptionError, match=r"'rank_below': nan.*rank_below from 1"):
        ma.analyses.sink_kinds(result, rank_below=np.nan)
