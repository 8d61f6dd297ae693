"""The engine that takes sums over queries from a fused kernel: the numbers of the row kernel, on every family."""

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.errors import ModelError, OptionError
from mechattn.functional import fused as functional
from mechattn.model.scores import BlindScores
from mechattn.model.verify.checks import check_fused
from tests.tiny_families import tiny_model

PROMPTS = [
    ma.Prompt("Tom has 3 apples and gives 2 to Mia. How many?", id="a"),
    ma.Prompt("Add 2 and 5.", id="b"),
]
CONDITIONS = {"slash": ma.MeaninglessTokens("/", 20), "sentence": ma.RandomSentence(9)}
MASKED = CONDITIONS | {"masked": ma.MeaninglessTokens("/", 20).masked()}
OPTIONS = [
    {},
    {"queries": "question"},
    {"queries": "all", "include_self": True},
    {"skip_first": True},
]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, OPTIONS[0]) for name in ("toy:llama", "toy:falcon")),
        *(("toy:gemma3", options) for options in OPTIONS),
    ],
    ids=str,
)
def test_the_fused_kernel_gives_the_numbers_of_the_row_kernel(name, options, shared):
    """Gemma's windowed layers come in rows, beside its full ones, and so does a condition with a mask."""
    conditions = MASKED if name == "toy:llama" else CONDITIONS
    both = [
        ma.run(shared(name), PROMPTS, conditions, ma.ReceivedAttention(**options), engine=engine)
        for engine in ("fused", "streaming")
    ]
    assert [result.provenance["engine"] for result in both] == ["fused", "streaming"]
    assert "fused kernel" in both[0].provenance["engine_reason"]
    for name, values in both[1]["received_attention"].data_vars.items():
        np.testing.assert_allclose(
            both[0]["received_attention"][name], values, atol=2e-6, rtol=1e-4, err_msg=name
        )


@pytest.mark.parametrize("fault", ["sinks", "bias", "k"])
def test_a_fault_of_the_kernel_is_noticed(fault, tokenizer, monkeypatch):
    family = {"sinks": "GPT-OSS", "bias": "BLOOM", "k": "Llama"}[fault]
    settings = {"layer_types": ["full_attention"] * 2} if fault == "sinks" else {}
    model = ma.load_model(tiny_model(family, len(tokenizer), **settings), tokenizer=tokenizer)
    kernel = functional._kernel
    if fault == "k":
        monkeypatch.setattr(
            functional, "_kernel", lambda q, k, v, scale: kernel(q, k.flip(1), v, scale)
        )
    else:
        from dataclasses import replace

        fused = functional.fused_attention
        monkeypatch.setattr(
            "mechattn.model.patch.streaming.fused_attention",
            lambda given: fused(replace(given, **{fault: None})),
        )
    assert check_fused(model).outcome == "limited"
    with pytest.raises(ModelError, match='choose engine="streaming" or "auto"'):
        ma.run(model, PROMPTS, analyses=ma.ReceivedAttention(), engine="fused")


def test_what_needs_rows_is_refused_and_streamed_by_itself(toy):
    message = " needs rows, which a fused kernel does not give"
    paired = type("Paired", (ma.ReceivedAttention,), {"add_pairs": print})
    for analysis in (ma.analyses.AttentionFocus(), paired()):
        with pytest.raises(OptionError, match=analysis.name + message):
            ma.run(toy, PROMPTS, analyses=analysis, engine="fused")
    result = ma.run(toy, PROMPTS)
    expected = "streaming" if not torch.cuda.is_available() else "fused"
    assert result.provenance["engine"] == expected, (
        "the default on a CPU, where two calls cost more than rows"
    )


def test_a_layer_without_sinks_beside_one_with_them(toy, monkeypatch):
    """Its blind null is the uniform one."""
    scores = BlindScores(8, sinks={0: torch.zeros(8)})
    monkeypatch.setattr("mechattn.engine.run.blind_scores", lambda model: scores)
    data = ma.run(toy, PROMPTS)["received_attention"].sel(layer=1)
    np.testing.assert_array_equal(data.received_blind[:, 0], data.received_uniform)
