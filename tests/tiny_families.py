"""A tiny model of each family: the real configuration classes of transformers, with random weights.

Their numbers mean nothing; they show what works.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

import mechattn as ma
from mechattn.model.checkpoint import toy_tokenizer

VOCABULARY = 784  # of the tokenizer of toy:llama
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


def tiny_model(family: str, vocabulary: int = VOCABULARY, seed: int = 0, **settings: Any) -> Any:
    """A transformers model of this family, with random weights large enough that attention is not
    uniform."""
    import transformers

    if family not in FAMILIES:
        raise LookupError(f"there is no family {family!r}; the families are {', '.join(FAMILIES)}")
    name, usual = FAMILIES[family]
    if not hasattr(transformers, name):
        raise LookupError(f"transformers {transformers.__version__} has no {name}")
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


@cache
def _tokenizer() -> Any:
    return toy_tokenizer("toy:llama")


def bridge_of(model: Any, **options: Any) -> Any:
    """The hooked model of a transformers model, with the tokenizer of toy:llama."""
    return ma.load_model(model, tokenizer=_tokenizer(), **options)
