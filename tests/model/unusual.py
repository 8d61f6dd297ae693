"""Models of unusual shapes, tiny and random: what their configurations allow and the table of families doesn't have."""

import transformers

from tests.tiny_families import VOCABULARY, random_model

_SIZE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_PLAIN = {**_SIZE, "intermediate_size": 128, "max_position_embeddings": 256}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
BOUNDARY = 32  # positions


def factors(count):
    """Of LongRoPE: so many frequencies, far from each other."""
    return {"short_factor": [1.0] * count, "long_factor": [4.0] * count}


_PHI = {**_PLAIN, "pad_token_id": 0, "original_max_position_embeddings": BOUNDARY}
_ROPE = {"rope_theta": 1e4, "factor": 8.0}
LONGROPE = {
    "Phi-3 LongRoPE": (
        "Phi3Config",
        {**_PHI, "rope_parameters": {"rope_type": "longrope", **factors(8)}},
    ),
    "Phi-3 LongRoPE as su": (
        "Phi3Config",
        {
            **_PHI,
            "rope_scaling": {
                "type": "su",
                **factors(8),
                "original_max_position_embeddings": BOUNDARY,
            },
        },
    ),
    "Phi-4-mini": (
        "Phi3Config",
        {**_PHI, "partial_rotary_factor": 0.75, "rope_scaling": {"type": "longrope", **factors(6)}},
    ),
    "Llama LongRoPE": (
        "LlamaConfig",
        {
            **_PLAIN,
            "rope_parameters": {
                "rope_type": "longrope",
                **_ROPE,
                **factors(8),
                "original_max_position_embeddings": BOUNDARY,
            },
        },
    ),
}
DYNAMIC = {
    "Llama dynamic NTK": (
        "LlamaConfig",
        {
            **_PLAIN,
            "max_position_embeddings": BOUNDARY,
            "rope_parameters": {"rope_type": "dynamic", **_ROPE},
        },
    )
}
TABLES = {
    "CodeGen": (
        "CodeGenConfig",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 256},
    ),
    "XGLM": (
        "XGLMConfig",
        {"d_model": 64, "ffn_dim": 128, "num_layers": 2, "attention_heads": 4, **_PLAIN},
    ),
    "GPT-J": (
        "GPTJConfig",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 256},
    ),
}
GRANITE = {
    "Granite hybrid without a type of positions": (
        "GraniteMoeHybridConfig",
        {**_PLAIN, **_EXPERTS, **_MAMBA, "layer_types": ["mamba", "attention"]},
    ),
    "Granite hybrid NoPE": (
        "GraniteMoeHybridConfig",
        {
            **_PLAIN,
            **_EXPERTS,
            **_MAMBA,
            "layer_types": ["mamba", "attention"],
            "position_embedding_type": "nope",
        },
    ),
}
CLIPPED = {
    "OLMo clipped": ("OlmoConfig", {**_PLAIN, "clip_qkv": 0.5}),
    "MPT clipped": (
        "MptConfig",
        {
            "d_model": 64,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 256,
            "attn_config": {"clip_qkv": 0.5},
        },
    ),
}
GATED = {
    "AFMoE": (
        "AfmoeConfig",
        {
            **_PLAIN,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 16,
        },
    ),
}
NORMED = {
    "BitNet": ("BitNetConfig", _PLAIN),
    "Gemma 4": (
        "Gemma4TextConfig",
        {
            **_PLAIN,
            **_TWO_KINDS,
            "head_dim": 16,
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 0,
        },
    ),
}
UNUSUAL = {**LONGROPE, **DYNAMIC, **TABLES, **GRANITE, **CLIPPED, **GATED, **NORMED}


def unusual_model(name, vocabulary=VOCABULARY, **settings):
    """A random model of transformers, its attention far from uniform."""
    kind, usual = UNUSUAL[name]
    more = {"vocab_size_per_layer_input": vocabulary} if kind == "Gemma4TextConfig" else {}
    return random_model(
        getattr(transformers, kind)(vocab_size=vocabulary, **{**usual, **more, **settings})
    )
