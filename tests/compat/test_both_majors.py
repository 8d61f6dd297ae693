"""transformer-lens 3.9, beside which 4.3 is installed: every analysis gives the same numbers on the same weights.

`make test-compat` puts 3.9 (the last version with a HookedTransformer) first on the path; the numbers of 4.3 come from
a process of their own without it.
"""

import os
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from importlib.metadata import version

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import mechattn as ma
from mechattn.analysis import ANALYSES
from mechattn.analysis.score_decomposition import ScoreDecomposition
from mechattn.functional import attention as rows
from mechattn.model.checkpoint import toy_folder, toy_tokenizer
from mechattn.model.verify.checks import check_streaming

TOLERANCE = 1e-5
PROBABILITIES = ("received_attention", "affine_shift", "segment_flow", "attention_map")
STEPS = ("histogram", "near_zero", "saturated")
TURNS = ("self_share", "first_share", "previous_share")  # a tie of the strongest target may turn
ORIGINAL = """
import sys, mechattn as ma
from importlib.metadata import version
from mechattn.analysis import ANALYSES
assert version("transformer-lens").startswith("4."), version("transformer-lens")
prompts = ma.load_prompts("word-problems", limit=2)
slash = ma.MeaninglessTokens("/", 20)
analyses = [make() for make in ANALYSES if make is not ma.analyses.ScoreDecomposition]
ma.run("toy:llama", prompts, {"slash": slash}, analyses).save(sys.argv[1])
"""


@pytest.fixture(scope="module")
def newest(tmp_path_factory):
    """What transformer-lens 4 gives."""
    place = tmp_path_factory.mktemp("newest") / "result.zarr"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", ORIGINAL, str(place)], check=True, env=environment)
    return ma.load_result(place)


def hooked_transformer(fold: bool):
    """toy:llama as a HookedTransformer, built offline; with ``fold`` as ``from_pretrained`` would process it."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions import convert_llama_weights

    native = AutoModelForCausalLM.from_pretrained(toy_folder("toy:llama"), dtype=torch.float32)
    old = native.config
    cfg = HookedTransformerConfig(
        n_layers=old.num_hidden_layers, d_model=old.hidden_size, n_heads=old.num_attention_heads,
        n_key_value_heads=old.num_key_value_heads, d_head=old.head_dim, d_mlp=old.intermediate_size,
        n_ctx=old.max_position_embeddings, d_vocab=old.vocab_size, act_fn="silu", normalization_type="RMS",
        positional_embedding_type="rotary", rotary_dim=old.head_dim, rotary_base=old.rope_parameters["rope_theta"],
        rotary_adjacent_pairs=False, final_rms=True, gated_mlp=True, eps=old.rms_norm_eps, device="cpu",
        original_architecture="LlamaForCausalLM", default_prepend_bos=True, model_name="toy-llama",
    )  # fmt: skip
    model = HookedTransformer(cfg)
    model.load_and_process_state_dict(
        convert_llama_weights(native, cfg), fold_ln=fold, center_writing_weights=False, center_unembed=fold,
        fold_value_biases=False, refactor_factored_attn_matrices=False,
    )  # fmt: skip
    model.tokenizer = toy_tokenizer("toy:llama")
    model.cfg.default_prepend_bos = True
    return model, native


def bridge(compatibility: bool):
    """toy:llama as a TransformerBridge that was not made by ``load_model``."""
    from transformer_lens.model_bridge import TransformerBridge

    model = TransformerBridge.boot_transformers(
        str(toy_folder("toy:llama")), dtype=torch.float32, device="cpu"
    )
    if compatibility:
        model.enable_compatibility_mode(no_processing=True)
    return model


MODELS = {
    "HookedTransformer": lambda: hooked_transformer(fold=False)[0],
    "HookedTransformer, folded": lambda: hooked_transformer(fold=True)[0],
    "TransformerBridge": lambda: bridge(compatibility=False),
    "TransformerBridge, compatibility mode": lambda: bridge(compatibility=True),
    "load_model": lambda: ma.load_model("toy:llama"),
}


def test_this_is_the_older_major():
    assert version("transformer-lens").startswith("3.9"), "run this with make test-compat"


@pytest.mark.parametrize("made", MODELS)
def test_every_analysis_gives_the_numbers_of_the_newest(newest, made):
    model = MODELS[made]()
    prompts = ma.load_prompts("word-problems", limit=2)
    analyses = [
        make() for make in ANALYSES if make is not ScoreDecomposition
    ]  # refused: this toy has RoPE
    result = ma.run(model, prompts, {"slash": ma.MeaninglessTokens("/", 20)}, analyses)
    about = result.provenance["model"]
    assert about["verified"]
    assert about["hooked_by"] == made.split(",")[0].replace("load_model", "TransformerBridge")
    assert result.provenance["engine"] == "streaming"
    for name in (analysis.name for analysis in analyses):
        for quantity, values in newest[name].data_vars.items():
            got = result[name][quantity]
            if quantity == "by_cause" and result[name].attrs["one_cause"]:
                # A HookedTransformer takes no position ids, so mass is counted without distance before it: only
                # the sums of causes are equal.
                assert got.sel(cause="distance").isnull().all()
                values = values.sum("cause")
                got = got.sum("cause")
            atol, rtol = tolerances(name, quantity, values)
            np.testing.assert_allclose(
                got.values, values.values, atol=atol, rtol=rtol, err_msg=quantity
            )


def tolerances(analysis, quantity, values):
    """The absolute and the relative one."""
    rtol = 1e-4  # norms and products are no probabilities
    if analysis in PROBABILITIES and not quantity.startswith("fit_"):
        rtol = 0
    if quantity == "change_product":  # a cosine's numerator: rounding is that of the norms
        return 1e-4 * float(abs(values).max()), rtol
    # Shares and counts move by steps where something lies at an edge.
    if analysis == "mlp_activations" and quantity.startswith(STEPS):
        return 5e-4, rtol
    if quantity.endswith("_counts"):
        return 1.5, rtol
    if quantity in TURNS:
        return 0.05, rtol
    return TOLERANCE, rtol


ATTENTIONS = {
    "ALiBi": {"positional_embedding_type": "alibi"},
    "grouped heads, a cap": {"n_key_value_heads": 2, "attn_scores_soft_cap": 2.0},
    "windows": {"use_local_attn": True, "attn_types": ["local", "global"], "window_size": 8},
    "partial RoPE, no scale": {
        "positional_embedding_type": "rotary",
        "rotary_dim": 8,
        "use_attn_scale": False,
    },
    "learned sinks": {"use_attention_sinks": True},
}


def tiny_hooked_transformer(**settings):
    """Of two layers, with random weights that make attention far from uniform."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    cfg = HookedTransformerConfig(
        **{"n_layers": 2, "d_model": 64, "n_heads": 4, "d_head": 16, "n_ctx": 128, "d_vocab": 784, "act_fn": "relu"},
        **settings, seed=0, device="cpu", model_name="tiny",
    )  # fmt: skip
    model = HookedTransformer(cfg)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.25)
    model.tokenizer = toy_tokenizer("toy:llama")
    model.cfg.default_prepend_bos = True
    return model


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_a_hooked_transformer_is_streamed(kind, monkeypatch):
    """Every kind of attention that it has; a fault in what is streamed is noticed."""
    model = tiny_hooked_transformer(**ATTENTIONS[kind])
    check = check_streaming(model)
    assert check.outcome == "passed", str(check)
    prompts = [
        ma.Prompt("Tom has 3 apples and gives 2 to Mia. How many?", id="a"),
        ma.Prompt("Add 2 and 5.", id="b"),
    ]
    conditions = {"slash": ma.MeaninglessTokens("/", 20)}
    both = {
        engine: ma.run(model, prompts, conditions, engine=engine)
        for engine in ("streaming", "hooks")
    }
    for quantity in ("received", "received_by_segment"):
        got, expected = (both[engine]["received_attention"][quantity] for engine in both)
        np.testing.assert_allclose(got, expected, atol=1e-5)

    def spoilt(attention, see, block, given=rows.attention_by_rows):
        return given(replace(attention, scale=1.1 * attention.scale), see, block)

    monkeypatch.setattr("mechattn.model.patch.streaming.attention_by_rows", spoilt)
    assert check_streaming(model).outcome == "limited"


def test_the_comparison_would_notice_another_model(newest):
    """One head's queries changed by a hundredth."""
    model, _ = hooked_transformer(fold=False)
    model.blocks[0].attn.W_Q.data[3] *= 1.01
    result = ma.run(
        model, ma.load_prompts("word-problems", limit=2), {"slash": ma.MeaninglessTokens("/", 20)}
    )
    theirs = newest["received_attention"].received_by_segment
    assert (
        float(abs(result["received_attention"].received_by_segment - theirs).max()) > 10 * TOLERANCE
    )


@pytest.mark.parametrize("fold", [False, True])
def test_a_hooked_transformer_is_verified_against_its_source(fold):
    model, native = hooked_transformer(fold)
    assert ma.verify_model(model).not_checked == ["logits", "kernel", "config"]
    report = ma.verify_model(model, native=native)
    assert report.passed
    assert report.not_checked == []
    model.blocks[1].attn.W_O.data = model.blocks[1].attn.W_O.data.roll(1, 0)
    assert not ma.verify_model(model, native=native).passed


def test_falcon_is_mended_in_a_bridge_of_3_9_too():
    from tests.tiny_families import tiny_model

    tokenizer = toy_tokenizer("toy:llama")
    report = ma.verify_model(tiny_model("Falcon-RW (ALiBi)", len(tokenizer)), tokenizer=tokenizer)
    assert report.passed
    assert report.mended


def test_tokens_after_a_cache_are_not_recorded():
    """The mask that is given covers only the new tokens; a row may come without a batch."""
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

    model = tiny_hooked_transformer()
    prompt = ma.Prompt("Tom has 3 apples and gives 2 to Mia. How many?", id="a")
    recorded = ma.record_affine(model, [prompt], ma.MeaninglessTokens("/", 20), layers=1)
    tokens = ma.Baseline().apply(prompt, model).tokens[None]
    later = tokens[:, 1:6]
    cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 1)
    given = {"past_kv_cache": cache, "attention_mask": torch.ones_like(tokens)}
    with recorded.on(model, ["a"]), torch.no_grad():
        changed = model(tokens, **given)
        without_batch = model(tokens[0])
        given = {"past_kv_cache": deepcopy(cache), "attention_mask": torch.ones_like(later)}
        after = model(later, **given)
    given["past_kv_cache"] = cache
    with torch.no_grad():
        torch.testing.assert_close(after, model(later, **given))
        torch.testing.assert_close(without_batch, changed)
        assert (model(tokens) - changed).abs().max() > 0.01, "negative control"
