"""The fields of a configuration that say something of attention: known, or refused."""

import warnings

import pytest
from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import mechattn as ma
from mechattn.errors import ModelError
from mechattn.model.verify.config_fields import unknown_fields
from tests.tiny_families import bridge_of, tiny_model

KINDS = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
# What they do to attention shows beyond a probe's length, or in texts of another kind, and mechattn has no null for it.
REFUSED_KINDS = {
    "deepseek_v4": "index_topk",
    "glm_moe_dsa": "index_topk",
    "hrm_text": "prefix_lm",
    "llama4_text": "attention_chunk_size",
}


@pytest.mark.parametrize(
    "kind", sorted(KINDS[name] for name in SUPPORTED_ARCHITECTURES if name in KINDS)
)
def test_every_architecture_that_transformer_lens_knows_is_known_or_refused(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = CONFIG_MAPPING[kind]()
    unknown = unknown_fields(getattr(config, "text_config", None) or config)
    assert set(unknown) >= ({REFUSED_KINDS[kind]} if kind in REFUSED_KINDS else set())
    assert bool(unknown) == (kind in REFUSED_KINDS), unknown


def test_a_field_that_nobody_has_looked_at_stops_the_model():
    given = tiny_model("Llama")
    given.config.attention_gap = 3
    with pytest.raises(ModelError, match=r"attention_gap = 3.*verify=False measures anyway"):
        bridge_of(given)
    taken = bridge_of(given, verify=False)
    assert ma.verify_model(taken)["config"].outcome == "failed"


def test_a_field_that_is_off_stops_nothing():
    given = tiny_model("Llama")
    given.config.attention_gap = 0
    given.config.index_topk = None
    given.config.attention_chunk_size = None
    assert list(unknown_fields(given.config)) == ["attention_gap"]
    given.config.attention_gap = False
    assert unknown_fields(given.config) == {}
    given.config.use_bidirectional_attention = True
    given.config.index_topk = 2048
    assert set(unknown_fields(given.config)) == {"index_topk", "use_bidirectional_attention"}
    given.config.attention_sink_tokens = given.config.init_window = given.config.compress_ratios = 4
    assert len(unknown_fields(given.config)) == 5
