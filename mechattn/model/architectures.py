"""What is particular to each architecture, the mending of its faults, and a tiny model of each to
test what works.

Everything without an entry here is read from the common configuration fields and from
TransformerLens's names. The tiny models use the real configuration classes of transformers, with
random weights; their numbers mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.functional.attention import mpt_slopes
from mechattn.model.hooked import config_of, original_of

Fault = Literal["alibi counted twice", "rotated in float32", "an empty rotary embedding"]


@dataclass(frozen=True)
class Particulars:
    """What an architecture does that others don't."""

    # The factor of q·k, given the configuration, the layer and 1 / √d_head; the last by default.
    score_scale: Callable[[Any, int, float], float] | None = None
    # The ALiBi slopes, given the configuration and the number of heads; by default those of Press
    # et al. if TransformerLens reports ALiBi.
    slopes: Callable[[Any, int], Float[Tensor, " head"] | None] | None = None
    alibi_in_bfloat16: bool = (
        False  # are slopes, positions and products rounded to bfloat16, and scaled like q·k?
    )
    # The fields with the kind of each layer ("" where all layers that attend are alike) and the
    # width of a window.
    layer_kinds: tuple[str, str] = ("layer_types", "sliding_window")
    logit_factor: Callable[[Any], float] | None = (
        None  # of the logits after W_U, given the configuration
    )
    uses_mask: bool = (
        False  # does the model itself modify the causal mask, which must then be a tensor?
    )
    masks_edges: bool = True  # does it accept a mask of edges during generation?
    fault: Fault | None = None  # of the hooked model, which ``mend`` corrects


def _gpt2_scale(config: Any, layer: int, usual: float) -> float:
    return usual / (layer + 1) if config.scale_attn_by_inverse_layer_idx else usual


def _mpt_scale(config: Any, layer: int, usual: float) -> float:
    return config.attn_config.softmax_scale or usual


def _mpt_slopes(config: Any, heads: int) -> Float[Tensor, " head"] | None:
    return (
        mpt_slopes(heads, float(config.attn_config.alibi_bias_max))
        if config.attn_config.alibi
        else None
    )


_DIVIDED_LOGITS = Particulars(logit_factor=lambda config: 1 / config.logits_scaling)

# By the model_type of the configuration.
PARTICULARS: Mapping[str, Particulars] = {
    "bloom": Particulars(masks_edges=False),
    **dict.fromkeys(
        ("cohere", "cohere2"), Particulars(logit_factor=lambda config: config.logit_scale)
    ),
    "falcon": Particulars(alibi_in_bfloat16=True, masks_edges=False, fault="alibi counted twice"),
    **dict.fromkeys(
        ("flex_olmo", "olmo", "olmo2", "olmo3"), Particulars(fault="rotated in float32")
    ),
    "gpt2": Particulars(score_scale=_gpt2_scale),
    "gpt_neo": Particulars(
        score_scale=lambda *_: 1.0, layer_kinds=("attention_layers", "window_size")
    ),
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared"), _DIVIDED_LOGITS),
    "granitemoehybrid": replace(_DIVIDED_LOGITS, fault="an empty rotary embedding"),
    "mpt": Particulars(
        score_scale=_mpt_scale, slopes=_mpt_slopes, uses_mask=True, masks_edges=False
    ),
    "recurrent_gemma": Particulars(
        layer_kinds=("", "attention_window_size")
    ),  # all layers with attention are the same
}


def particulars_of(model: Any) -> Particulars:
    """The particulars of a hooked model; none for an architecture without an entry and for a
    ``HookedTransformer``."""
    return PARTICULARS.get(getattr(config_of(model), "model_type", ""), Particulars())


def score_scale(model: Any, layer: int, width: int) -> float:
    """The factor of q·k in a layer, for heads of this width."""
    special = particulars_of(model).score_scale
    return width**-0.5 if special is None else special(config_of(model), layer, width**-0.5)


# What the correction of each fault says.
_MENDED: Mapping[Fault, str] = {
    "alibi counted twice": (
        "Falcon's ALiBi is counted once: eager attention, which hooks need, adds it twice in"
        " transformers 4.46 to 5.23, since the mask carries it already"
    ),
    "an empty rotary embedding": (
        "no rotary embedding is called, as the model has none (NoPE): TransformerLens puts an empty"
        " one in its place where the configuration leaves position_embedding_type out"
    ),
    "rotated in float32": (
        "rotated queries and keys have the dtype of the weights, as in the model itself:"
        " TransformerLens leaves them in the float32 of OLMo's cosines, which its values are not in"
    ),
}


def mend(model: Any) -> tuple[str, ...]:
    """Correct known faults of a booted bridge, in place."""
    fault, dtype = particulars_of(model).fault, next(model.parameters()).dtype
    rotary = getattr(model, "rotary_emb", None)
    if fault == "rotated in float32" and dtype in (torch.bfloat16, torch.float16):
        for point in (
            getattr(block.attn, f"hook_rot_{part}", None) for block in model.blocks for part in "qk"
        ):
            if point is not None:
                point.register_forward_hook(lambda module, given, rotated: rotated.to(dtype))
    elif fault == "alibi counted twice" and config_of(model).alibi:
        for block in model.blocks:
            if not hasattr(block.attn, "_mechattn_alibi_once"):
                block.attn._reconstruct_attention = _without_second_alibi(
                    block.attn._reconstruct_attention
                )
                block.attn._mechattn_alibi_once = True
    elif (
        fault == "an empty rotary embedding"
        and rotary is not None
        and rotary.original_component is None
    ):
        for module in original_of(model).modules():
            if module._modules.get("rotary_emb") is rotary:
                module._modules["rotary_emb"] = None  # so that the model does not try to use it
        for cfg in (
            model.cfg,
            *(block.attn.config for block in model.blocks if hasattr(block, "attn")),
        ):
            cfg.positional_embedding_type = "none"
    else:
        return ()
    return (_MENDED[fault],)


def _without_second_alibi(reconstruct: Callable[..., Any]) -> Callable[..., Any]:
    """Leave out ``alibi`` if the mask already has it: a mask alone is never positive, ALiBi at
    later keys always is."""

    def once(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.is_floating_point() and bool((mask[..., -1, :] > 0).any()):
            kwargs["alibi"] = None
        return reconstruct(q, k, v, **kwargs)

    return once


_WINDOW = 8
_NEO = {
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": _WINDOW,
}
_SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_POSITIONS = {"max_position_embeddings": 256}
_PLAIN = {**_SIZE, **_POSITIONS, "intermediate_size": 128}
_GROUPED = {**_PLAIN, "num_key_value_heads": 2}
_WIDE = {**_GROUPED, "head_dim": 16}
_ALTERNATING = {"sliding_window": _WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_FALCON = {
    **_SIZE,
    "alibi": True,
    "new_decoder_architecture": False,
    "multi_query": False,
    "parallel_attn": False,
}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LINEAR = {
    **{
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "layer_types": ["linear_attention", "full_attention"],
}

# Family: the configuration class of transformers, and its settings apart from the vocabulary.
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Llama": ("LlamaConfig", _WIDE),
    "Mistral": ("MistralConfig", {**_WIDE, "sliding_window": _WINDOW}),
    "Mixtral": ("MixtralConfig", {**_WIDE, "num_local_experts": 4, "sliding_window": None}),
    "Qwen2": ("Qwen2Config", _GROUPED),
    "Qwen3": ("Qwen3Config", _WIDE),
    "Qwen3-MoE": (
        "Qwen3MoeConfig",
        {**_WIDE, **_EXPERTS, "num_experts": 4, "norm_topk_prob": True},
    ),
    "Qwen3-Next (hybrid)": (
        "Qwen3NextConfig",
        {**_WIDE, **_EXPERTS, **_LINEAR, "num_experts": 4, "shared_expert_intermediate_size": 32},
    ),
    "Gemma 1": ("GemmaConfig", _WIDE),
    "Gemma 2": ("Gemma2Config", {**_WIDE, **_ALTERNATING, "query_pre_attn_scalar": 16}),
    "Gemma 3": ("Gemma3TextConfig", {**_WIDE, **_ALTERNATING, "query_pre_attn_scalar": 16}),
    "BLOOM": ("BloomConfig", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "Falcon-RW (ALiBi)": ("FalconConfig", {**_FALCON, "bias": True}),
    "Falcon (RoPE)": (
        "FalconConfig",
        {**_FALCON, "alibi": False, "multi_query": True, "parallel_attn": True},
    ),
    "MPT": ("MptConfig", {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 256}),
    "GPT-2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "GPT-Neo": ("GPTNeoConfig", {**_POSITIONS, **_NEO, "hidden_size": 64}),
    "GPT-NeoX": ("GPTNeoXConfig", _PLAIN),
    "GPT-J": (
        "GPTJConfig",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 256},
    ),
    "GPT-OSS": (
        "GptOssConfig",
        {**_WIDE, **_ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "OPT": ("OPTConfig", {**_SIZE, **_POSITIONS, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "Phi": ("PhiConfig", _PLAIN),
    "Phi-3": ("Phi3Config", {**_GROUPED, "pad_token_id": 0}),
    "OLMo": ("OlmoConfig", _GROUPED),
    "OLMo 2": ("Olmo2Config", _GROUPED),
    "Cohere": ("CohereConfig", _GROUPED),
    "GLM": ("GlmConfig", {**_WIDE, "pad_token_id": 0}),
    "Granite": ("GraniteConfig", _GROUPED),
    "StableLM": ("StableLmConfig", _GROUPED),
    "StarCoder2": ("Starcoder2Config", _GROUPED),
    "DeepSeek-V3 (latent attention)": (
        "DeepseekV3Config",
        {**_PLAIN, **_LATENT, **_EXPERTS, **_ROUTED},
    ),
    "Mamba (no attention)": (
        "MambaConfig",
        {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    ),
}


def tiny_model(family: str, vocabulary: int, seed: int = 0, **settings: Any) -> Any:
    """A transformers model of this family, with random weights large enough that attention is not
    uniform."""
    import transformers

    if family not in FAMILIES:
        raise ModelError(f"there is no family {family!r}; the families are {', '.join(FAMILIES)}")
    name, usual = FAMILIES[family]
    if not hasattr(transformers, name):
        raise ModelError(f"transformers {transformers.__version__} has no {name}")
    return random_model(
        getattr(transformers, name)(vocab_size=vocabulary, **{**usual, **settings}), seed
    )


def random_model(config: Any, seed: int = 0) -> Any:
    """A transformers model with this configuration, with random weights large enough that attention
    is not uniform."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model
