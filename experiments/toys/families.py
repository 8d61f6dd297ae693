"""The four toy architectures: the real configuration classes of transformers, about one million parameters each."""

from __future__ import annotations

from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

POSITIONS = 1024

# Which families put a BOS token before the text, as the real models do.
PREPENDS_BOS = {"llama": True, "qwen2": False, "gemma3": True, "falcon": False}


def family_config(family: str, tokenizer) -> PretrainedConfig:
    """The configuration of ``family`` ("llama", "qwen2", "gemma3" or "falcon") for this tokenizer."""
    shared = dict(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_attention_heads=8,
        max_position_embeddings=POSITIONS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    grouped = dict(num_key_value_heads=4, head_dim=16, intermediate_size=448)
    if family == "llama":
        return LlamaConfig(**shared, **grouped, num_hidden_layers=4, rms_norm_eps=1e-5)
    if family == "qwen2":
        return Qwen2Config(
            **shared, num_key_value_heads=4, intermediate_size=448, num_hidden_layers=4
        )
    if family == "gemma3":
        layer_types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        smaller = dict(grouped, intermediate_size=256)
        return Gemma3TextConfig(
            **shared,
            **smaller,
            num_hidden_layers=6,
            layer_types=layer_types,
            sliding_window=64,
            query_pre_attn_scalar=16,
        )
    if family == "falcon":
        return FalconConfig(
            **shared,
            num_hidden_layers=5,
            alibi=True,
            new_decoder_architecture=False,
            multi_query=False,
            parallel_attn=False,
            bias=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
    raise ValueError(f"unknown family {family!r}: choose from {', '.join(PREPENDS_BOS)}")


def new_model(family: str, tokenizer) -> PreTrainedModel:
    """An untrained model with native (SDPA) attention: in Falcon's eager attention ALiBi counts twice."""
    config = family_config(family, tokenizer)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
