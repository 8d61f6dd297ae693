"""Models that do something to values before or after the pattern mixes them: shown to be so, and said."""

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.errors import ModelError
from mechattn.model import head_parts
from mechattn.model.head_parts import norms_of_output
from mechattn.model.hooked import facts_of
from mechattn.model.hooks import attention_layers, logits_and_values
from mechattn.model.patterns_at_hooks import forward_with_patterns
from mechattn.model.verify import layer_checks
from tests.model.unusual import CLIPPED, unusual_model
from tests.tiny_families import FAMILIES, bridge_of, tiny_model

PROMPT = ma.Prompt("Tom has 3 apples and gives 2 to Mia.", "Count.", id="a")
SLASH = ma.MeaninglessTokens("/", 6)


def loaded(name, **options):
    native = tiny_model(name) if name in FAMILIES else unusual_model(name)
    return bridge_of(native, **options)


def mixed(model):
    """For each layer the values that analyses are given, mixed by the pattern, and z [pos, head, d_head]."""
    tokens = torch.arange(5, 29)[None]
    shown = {}

    def see(layer, pattern, v):
        every = v.double().repeat_interleave(pattern.shape[1] // v.shape[1], 1)
        shown[layer] = (pattern.double() @ every)[0].transpose(0, 1)

    layers = attention_layers(model)
    forward_with_patterns(model, tokens, tokens >= 0, layers, see)
    names = {layer: f"blocks.{layer}.attn.hook_z" for layer in layers}
    _, z = logits_and_values(model, tokens, names.values())
    return [(shown[n], z[names[n]][0].double().reshape(shown[n].shape)) for n in layers]


@pytest.mark.parametrize("name", ["OLMo clipped", "MPT clipped", "Gemma 4"])
def test_analyses_are_given_the_values_that_are_mixed(name, monkeypatch):
    model = loaded(name)
    check = facts_of(model).report["values"]
    assert check.outcome == "passed"
    for made, z in mixed(model):
        torch.testing.assert_close(made, z, atol=1e-5, rtol=0)
    monkeypatch.setattr("mechattn.model.head_parts._clipped_and_normed", lambda model, layer, v: v)
    assert any((made - z).abs().max() > 0.5 for made, z in mixed(model)), "hook_v shows others"


ENGINES_AGREE_ON = {
    "OLMo clipped": ([ma.analyses.AffineShift(), ma.analyses.SegmentFlow()], 1e-4, 2e-5),
    "DeepSeek-V3 (latent attention)": (
        [
            ma.analyses.HeadUpdates(),
            ma.analyses.AttentionSinks(),
            ma.analyses.AffineShift(),
        ],
        1e-3,
        1e-4,
    ),
}


@pytest.mark.parametrize("name", ENGINES_AGREE_ON)
def test_both_engines_are_given_the_same_values(name, shared):
    analyses, rtol, atol = ENGINES_AGREE_ON[name]
    model = loaded(name) if name in CLIPPED else shared(name)
    streamed, hooked = (
        ma.run(model, PROMPT, {"slash": SLASH}, analyses, engine=engine)
        for engine in ("streaming", "hooks")
    )
    for analysis in analyses:
        for variable, values in streamed[analysis.name].items():
            if values.dtype.kind == "f" and "counts" not in str(variable):
                other = hooked[analysis.name][variable]
                np.testing.assert_allclose(values, other, rtol, atol, err_msg=str(variable))


def test_clipped_scores_are_no_sum():
    with pytest.raises(ModelError, match=r"clips queries and keys at ±0.5.*not a sum of parts"):
        ma.run(loaded("MPT clipped"), PROMPT, analyses=[ma.analyses.ScoreDecomposition()])


@pytest.mark.parametrize(
    ("name", "dtype"), [("AFMoE", torch.float32), ("Qwen3-Next (hybrid)", torch.bfloat16)]
)
def test_a_gate_is_found_and_limits(name, dtype):
    model = loaded(name, dtype=dtype)
    assert "times a gate of its query (sigmoid)" in facts_of(model).report.limited["values"]
    assert ma.run(model, PROMPT, {"slash": SLASH}).provenance["model"]["verified"]
    with pytest.raises(ModelError, match=r"times a gate .*λ and Σσ describe pattern · v"):
        ma.record_affine(model, PROMPT, SLASH, layers=attention_layers(model)[0])


def test_a_norm_over_all_heads_is_found_and_limits():
    model = loaded("BitNet")
    assert "after a norm over all heads (attn_sub_norm)" in facts_of(model).report.limited["values"]
    assert list(norms_of_output(model, 0)) == ["attn_sub_norm"]
    assert ma.run(
        model, PROMPT, {"slash": SLASH}, [ma.ReceivedAttention(), ma.analyses.SegmentFlow()]
    )
    for analysis in (ma.analyses.HeadUpdates(), ma.analyses.AttentionSinks()):
        with pytest.raises(
            ModelError, match=r"norms all heads together before W_O \(attn_sub_norm, layer 0\)"
        ):
            ma.run(model, PROMPT, {"slash": SLASH}, [analysis])
    with pytest.raises(ModelError, match="cannot be applied to z"):
        ma.record_affine(model, PROMPT, SLASH)


@pytest.mark.parametrize(
    ("name", "without", "reason"),
    [
        (
            "BitNet",
            "norms_of_output",
            r"its attention has attn_sub_norm, and mechattn does not know",
        ),
        ("AFMoE", "GATE_FUNCTIONS", r"its attention has .*gate_proj.*, and mechattn does not know"),
        (
            "Gemma 4",
            "_clipped_and_normed",
            r"its attention has .*v_norm.*, and mechattn does not know",
        ),
        ("OLMo clipped", "_clipped_and_normed", r"its attention has clip_qkv=0.5"),
    ],
)
def test_what_is_not_explained_is_refused_with_what_there_is(name, without, reason, monkeypatch):
    """As for a step that nobody has met yet."""
    nothing = {
        "norms_of_output": lambda *a: {},
        "GATE_FUNCTIONS": {},
        "_clipped_and_normed": lambda model, layer, v: v,
    }
    monkeypatch.setattr(
        layer_checks if without == "GATE_FUNCTIONS" else head_parts, without, nothing[without]
    )
    with pytest.raises(ModelError, match=rf"values failed in layer \d: .*{reason}"):
        loaded(name)


def test_a_gate_that_is_another_is_not_taken_for_it():
    """Half of each row of the pattern is lost behind the hook: a gate doesn't explain that."""
    model = loaded("Qwen3-Next (hybrid)", verify=False)
    model.hook_dict["blocks.1.attn.hook_z"].add_perma_hook(lambda z, hook: z.roll(1, 2))
    assert ma.verify_model(model)["values"].outcome == "failed"
