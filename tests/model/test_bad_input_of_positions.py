"""What a model's positions do not allow is refused before the first forward pass, with the reason."""

import pytest
import torch

import mechattn as ma
from mechattn.errors import ModelError, OptionError, PromptError, PromptTooLong
from tests.model.unusual import unusual_model
from tests.tiny_families import bridge_of, tiny_model


def loaded(name):
    return bridge_of(unusual_model(name), verify=False)


def prompt_of(length, tokenizer, **more):
    drawn = torch.randint(
        5, len(tokenizer), (length - 1,), generator=torch.Generator().manual_seed(length)
    ).tolist()
    return ma.Prompt(tokens=(tokenizer.bos_token_id, *drawn), id="17", solution="3", **more)


def test_conditions_on_both_sides(unreached, tokenizer):
    said = (
        r'prompt 17 \("28 token ids"\) has 28 positions with the condition "baseline" and 38 with "slash": beyond 32 '
        r"positions Phi3ForCausalLM computes with other factors \(LongRoPE\).*two models.*insert fewer tokens, or .*unshifted"
    )
    model = unreached(loaded("Phi-3 LongRoPE"))
    conditions = {"slash": ma.MeaninglessTokens("/", 10), "three": ma.MeaninglessTokens("/", 3)}
    with pytest.raises(PromptError, match=said):
        ma.run(model, prompt_of(28, tokenizer), conditions)


def test_both_sides_in_evaluate(tokenizer):
    model = loaded("Phi-4-mini")
    prompts = [prompt_of(28, tokenizer)]
    with pytest.raises(
        PromptError, match=r'28 positions with the condition "baseline" and 38 with "slash"'
    ):
        ma.evaluate(model, prompts, {"slash": ma.MeaninglessTokens("/", 10)}, new_tokens=4)
    with pytest.raises(
        PromptError,
        match=r"8 new tokens are allowed.*middle of an answer. .* give new_tokens=4 at most",
    ):
        ma.evaluate(model, prompts, new_tokens=8)
    with pytest.raises(PromptError, match=r"Omit the prompt$"):
        ma.evaluate(model, [prompt_of(32, tokenizer)], new_tokens=8)
    assert len(ma.evaluate(model, prompts, new_tokens=4).answers) == 1


def test_dynamic_ntk_beyond_what_the_model_was_made_for(tokenizer):
    said = r'has 40 positions with the condition "slash": beyond 32 positions LlamaForCausalLM computes with the'
    model = loaded("Llama dynamic NTK")
    for n_ctx in (32, 256):  # its own, and one that load_model may be asked for
        model.cfg.n_ctx = n_ctx
        with pytest.raises(PromptTooLong, match=said):
            ma.run(model, prompt_of(30, tokenizer), {"slash": ma.MeaninglessTokens("/", 10)})
    with pytest.raises(
        PromptTooLong, match=r"30 positions .* and 4 new tokens are allowed: beyond 32"
    ):
        ma.evaluate(model, [prompt_of(30, tokenizer)], new_tokens=4)
    with pytest.raises(PromptTooLong, match="dynamic NTK"):
        ma.head_means(model, [prompt_of(40, tokenizer)])
    assert ma.run(model, prompt_of(32, tokenizer))


def test_head_means_of_a_prompt_that_is_too_long(tokenizer):
    model = bridge_of(tiny_model("GPT-2"), verify=False)
    with pytest.raises(PromptTooLong, match="has 300 tokens"):
        ma.head_means(model, [prompt_of(300, tokenizer)])


def test_ids_before_the_first_row_of_a_table(tokenizer):
    start = ma.MeaninglessTokens("/", 19, place="start").unshifted()
    said = r"has a table of positions, in which a negative one is .*'kept' needs 18 positions before the first: insert no more"
    model = loaded("CodeGen")
    for measure in (ma.run, ma.evaluate):
        with pytest.raises(OptionError, match=said):
            measure(model, [prompt_of(40, tokenizer)], {"kept": start})


def test_a_model_without_positions_has_none_to_keep(tokenizer):
    start = ma.MeaninglessTokens("/", 19, place="start").unshifted()
    with pytest.raises(OptionError, match="or has none"):
        ma.run(loaded("Granite hybrid NoPE"), prompt_of(40, tokenizer), {"kept": start})


def test_a_model_that_keeps_what_it_read_in_another_way(tokenizer, shared):
    with pytest.raises(ModelError, match="another cache than past_key_values"):
        ma.evaluate(shared("Mamba (no attention)"), [prompt_of(10, tokenizer)])
