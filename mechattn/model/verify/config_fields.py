"""Checks that mechattn uses every configuration field about attention or knows it to be harmless.

The probe compares patterns on a few tokens with the model's own, so it finds everything that
changes the pattern of a short text. It cannot find what acts only on longer texts, such as a
window, a chunk, a selection of keys, or a scale that depends on position. Each of these has a
configuration field, and a model with an unknown field is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mechattn.model.hooked import HookedModel, config_of
from mechattn.model.verify.verification import Check

_ABOUT_ATTENTION = re.compile(
    r"attn|attention|window|sliding|rope|rotary|alibi|cap$|capping|head|sink|chunk|mask|causal"
    r"|prefix|bidirect|qk|query|key|kv|clip|topk$|top_k$|sparse_(att|config)|^index_|indexer"
    r"|compress|layer_types|local|global|decoder$|temperature|floor|mscale|ntk"
)
# Anchored, so that a field such as attention_sink_tokens is not taken for one of the vocabulary.
_OF_OTHER_PARTS = re.compile(
    r"^(mamba|time_step|linear|moe|router|image|vision|audio|lm_head)_|^n_mamba_heads$"
    r"|^(mtp_)?mlp_|^(n_|num_)?((local|shared|routed)_)?expert|sinkhorn|^altup_|_lm_head$"
    r"|_token_(id|index)$"
)
# The fields that need no check, under the reason why.
_KNOWN_NAMES = (
    # Used: which keys a query sees (model/hooks.py).
    "sliding_window layer_types attention_types attention_layers window_size use_sliding_window",
    "max_window_layers sliding_window_pattern _sliding_window_pattern local_attention",
    "global_attn_every_n_layers attention_window_size",
    # Used: what is added to scores, their scale, clips (model/scores.py, model/architectures.py).
    "alibi attn_config.alibi attn_config.alibi_bias_max attn_config.softmax_scale",
    "attn_config.clip_qkv clip_qkv scale_attn_by_inverse_layer_idx",
    # They turn q and k before their product. Lengths beyond which this changes are used
    # (model/positions.py).
    "rope_parameters rope_scaling rope_theta rope_interleave rope_local_base_freq",
    "partial_rotary_factor rotary_dim rotary_pct rotary_emb_base no_rope_layers",
    "no_rope_layer_interval qk_rope_head_dim qk_nope_head_dim",
    # They act in the same way at every length, so the patterns of the probe show them.
    "attn_logit_softcapping attention_multiplier query_pre_attn_scalar scale_attn_weights",
    "attention_in_multiplier attention_out_multiplier key_multiplier attention_k_eq_v",
    "use_shared_attention_adapter parallel_attn",
    # Sizes of the projections, which q, k and v themselves show.
    "num_attention_heads num_key_value_heads num_kv_heads num_heads n_head n_heads",
    "attention_heads head_dim attention_head_dim attention_hidden_size kv_channels kv_lora_rank",
    "qk_head_dim v_head_dim num_query_groups multi_query new_decoder_architecture",
    "num_attention_heads_per_layer num_kv_shared_layers attn_config.kv_n_heads",
    "num_global_key_value_heads global_head_dim",
    # Biases and norms of the projections, which hook_q, hook_k and hook_v, or the scores, hold.
    "attention_bias attention_out_bias use_qk_norm qk_layernorm qkv_bias use_qkv_bias",
    "use_attention_bias attn_config.qk_ln attn_config.qk_gn",
    # Dropout, which is off while a model is measured.
    "attention_dropout attn_pdrop attention_probs_dropout_prob attn_config.attn_pdrop",
    # The dtype or the code of the softmax, but not its result.
    "reorder_and_upcast_attn attention_softmax_in_fp32 scale_attention_softmax_in_fp32",
    "attn_config.attn_type attn_config.attn_impl",
    # They concern layers without attention, which layers have it, or parts outside it.
    "attn_layer_indices attn_layer_offset attn_layer_period full_attn_idxs chunk_size",
    "final_logit_softcapping logits_soft_cap num_ln_in_parallel_attn mask_token_id",
    "keys_to_ignore_at_inference is_decoder add_cross_attention",
    # They matter only with attention_chunk_size or index_topk, which are refused.
    "floor_scale attn_scale index_head_dim index_n_heads indexer_types compress_rope_theta",
)
KNOWN = frozenset(" ".join(_KNOWN_NAMES).split())
# Fields that change which keys a query sees, or its scores, in an unsupported way: what they do,
# and the values that turn them off.
REFUSED: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "attention_chunk_size": ("queries see only the keys of their own chunk", (None,)),
    "attn_temperature_tuning": ("queries are scaled by position in long texts", (None, False, 0)),
    "use_bidirectional_attention": ("queries see the keys after them", (None, False, "vision")),
    "prefix_lm": ("queries of the prefix see the keys after them", (None, False)),
    "attn_config.prefix_lm": ("queries of the prefix see the keys after them", (None, False)),
    "attn_config.attn_uses_sequence_id": ("sequences in one row are kept separate", (None, False)),
    "index_topk": ("a query sees only the keys that an indexer chooses", (None,)),
    "is_causal": ("queries see the keys after them", (None, True)),
}


def unknown_fields(config: Any) -> dict[str, str]:
    """The configuration fields that may mean an unsupported kind of attention.

    Each has a text with its value and what is known about it.
    """
    layer_types = getattr(config, "layer_types", None)
    has_no_chunks = layer_types is not None and "chunked_attention" not in layer_types

    texts = {}
    for name, value in _fields(config):
        if name in KNOWN:
            continue
        if name == "attention_chunk_size" and has_no_chunks:
            continue
        if name in REFUSED:
            effect, values_off = REFUSED[name]
            is_off = value in values_off
        else:
            effect = "unknown effect on attention"
            is_off = value is False or value in (None, "", [], {}, ())
        if not is_off:
            texts[name] = f"{name} = {value!r} ({effect})"

    return texts


def check_config(model: HookedModel, native: Any = None) -> Check:
    """Check that every field about attention is known.

    The configuration is the model's or, if it has none, that of ``native``.
    """
    config = config_of(model) or getattr(native, "config", None)
    if config is None:
        return Check(
            "config",
            "not checked",
            detail=f"a {type(model).__name__} has no configuration of transformers",
        )

    count = len(dict(_fields(config)))
    detail = f"fields unknown to mechattn, of {count} about attention"
    unknown_texts = unknown_fields(config).values()
    if not unknown_texts:
        return Check("config", "passed", detail=f"no {detail}")
    return Check(
        "config",
        "failed",
        detail=f"{detail}: {'; '.join(unknown_texts)}",
        remedy="a short probe may not reveal its effect, so please report it; verify=False measures"
        " anyway and records this",
    )


def _fields(config: Any) -> Iterator[tuple[str, Any]]:
    """The names and values of the fields that may concern attention.

    Those of a nested ``attn_config`` are included.
    """
    from transformers import PretrainedConfig

    general_fields = PretrainedConfig().to_dict()  # those of every model
    for name, value in config.to_dict().items():
        if name == "attn_config" and isinstance(value, Mapping):
            for field, nested_value in value.items():
                if field not in general_fields:
                    yield f"{name}.{field}", nested_value
        elif (
            name not in general_fields
            and _ABOUT_ATTENTION.search(name)
            and not _OF_OTHER_PARTS.search(name)
        ):
            yield name, value
