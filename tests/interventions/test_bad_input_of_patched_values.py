"""Transplants that cannot be: told before anything is run."""

import pytest

import mechattn as ma
from mechattn.errors import ModelError, OptionError

SLASH = ma.MeaninglessTokens("/", 3)


@pytest.fixture(scope="module")
def recorded(toy):
    return ma.record_keys_values(toy, ma.load_prompts("word-problems", limit=2), SLASH, layers=[0])


def test_options(recorded):
    with pytest.raises(OptionError, match=r"recorded at 'inserted' tokens, not at 'question'"):
        ma.interventions.KVPatch("question", recorded)
    with pytest.raises(OptionError, match=r"layers=\(1,\): the recorded layers are \[0\]"):
        ma.interventions.KVPatch("inserted", recorded, layers=1)


def test_other_prompts_and_other_lengths(toy, recorded, prompts):
    longer = {
        "longer": ma.MeaninglessTokens("/", 4).under(ma.interventions.KVPatch("inserted", recorded))
    }
    with pytest.raises(
        OptionError, match=r"has 4 inserted tokens, but 3 were recorded for prompt 0"
    ):
        ma.run(toy, prompts[:2], longer)
    unknown = {"unknown": SLASH.under(ma.interventions.KVPatch("inserted", recorded))}
    with pytest.raises(OptionError, match=r"prompt '2' was not recorded"):
        ma.evaluate(toy, prompts[:3], unknown, new_tokens=2)


def test_nothing_to_record(toy, prompts):
    with pytest.raises(OptionError, match="has no inserted token"):
        ma.record_keys_values(toy, prompts[:2], ma.Baseline())
    with pytest.raises(OptionError, match=r"segment='filler': choose one of"):
        ma.record_keys_values(toy, prompts[:2], SLASH, segment="filler")
    alone = ma.record_keys_values(toy, prompts[:1], SLASH, layers=[0])
    with pytest.raises(OptionError, match="one prompt was recorded"):
        alone.from_other_prompts()


def test_models_without_keys_and_values_by_head(shared, prompts):
    latent = shared("DeepSeek-V3 (latent attention)")
    with pytest.raises(ModelError, match="keeps latents"):
        ma.record_keys_values(latent, prompts[:2], SLASH)
    none = shared("Mamba (no attention)")
    with pytest.raises(ModelError, match="has no layer with attention"):
        ma.record_keys_values(none, prompts[:2], SLASH)


def test_a_model_whose_other_layers_carry_on(shared, prompts):
    hybrid = shared("Qwen3-Next (hybrid)")
    recorded = ma.record_keys_values(hybrid, prompts[:2], SLASH)
    swapped = {
        "swapped": SLASH.under(ma.interventions.KVPatch("inserted", recorded.from_other_prompts()))
    }
    with pytest.raises(OptionError, match="the other layers pass on these tokens' content"):
        ma.run(hybrid, prompts[:2], swapped)
