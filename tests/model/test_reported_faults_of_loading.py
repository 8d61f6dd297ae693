"""Models as people bring them: nothing is installed, and a refusal says what the model is."""

import json
import sys

import numpy as np
import pytest
import torch
import transformers
from torch.testing import assert_close

import mechattn as ma
from mechattn.errors import ModelError
from mechattn.model.checkpoint import tokenizer_named
from mechattn.model.random_weights import random_weights
from mechattn.model.unloaded import unloaded
from tests.tiny_families import bridge_of

QUESTIONS = ["Tom has 3 apples. How many?", "What is 3 + 4? I want to know."]
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


# Nothing is installed: no process starts while a model is loaded.

_STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork"}
_watching = []


def _audit(event, arguments):
    if _watching and event in _STARTS:
        _watching[0].append((event, str(arguments)[:200]))


sys.addaudithook(_audit)  # it cannot be removed, so it does nothing outside the fixture


@pytest.fixture
def processes():
    """The processes that were started, in a list."""
    started = []
    _watching.append(started)
    yield started
    _watching.clear()


def multimodal(kind, tokenizer):
    text = {**TEXT, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    if kind == "Gemma3":
        config = transformers.Gemma3Config(
            text_config={**text, "sliding_window": 8}, vision_config=VISION, image_token_id=9
        )
        return transformers.Gemma3ForConditionalGeneration(config)
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**text),
        vision_config=transformers.CLIPVisionConfig(**VISION),
        image_token_id=9,
    )
    return transformers.LlavaForConditionalGeneration(config)


def received(model):
    return ma.run(model, QUESTIONS)["received_attention"].received.values


@pytest.mark.parametrize("kind", ["Gemma3", "LLaVA"])
def test_the_text_model_of_multimodal_models_is_loaded(kind, tokenizer, processes):
    given = multimodal(kind, tokenizer).eval()
    tokens = torch.arange(20, 32)[None]
    with torch.no_grad():
        expected = given(input_ids=tokens).logits
    model = bridge_of(given)
    with torch.no_grad():
        assert_close(model(tokens), expected, rtol=0, atol=1e-5)
    assert not processes
    assert ma.run(model, QUESTIONS).provenance["model"]["verified"]


def test_a_multimodal_checkpoint_too(tokenizer, processes, tmp_path):
    given = multimodal("Gemma3", tokenizer)
    given.generation_config.eos_token_id = [1, 7]
    given.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    expected = received(bridge_of(given, verify=False))
    model = ma.load_model(str(tmp_path), verify=False)
    assert_close(received(model), expected, rtol=0, atol=1e-6, equal_nan=True)
    assert not processes


def test_a_multimodal_checkpoint_without_a_tokenizer(tokenizer, tmp_path):
    """As any directory without one: a model whose prompts are token ids."""
    given = multimodal("Gemma3", tokenizer)
    given.save_pretrained(tmp_path)
    expected = ma.load_model(given, tokenizer=tokenizer)
    model = ma.load_model(str(tmp_path))
    assert model.tokenizer is None
    tokens = torch.arange(20, 32)[None]
    with torch.no_grad():
        assert_close(model(tokens), expected(tokens), rtol=0, atol=1e-5)
    assert ma.run(model, tokens).provenance["model"]["verified"]
    with pytest.raises(ModelError, match="a model object has no tokenizer; pass one"):
        ma.load_model(given)


def test_a_process_would_be_noticed(processes):
    import subprocess

    subprocess.run(["true"], check=True)
    assert processes


# Refusals say what the model is; its configuration is left as it was.


def tiny(config_name, class_name, tokenizer):
    config = getattr(transformers, config_name)(**TEXT, vocab_size=len(tokenizer))
    return getattr(transformers, class_name)(config)


@pytest.mark.parametrize(
    ("config_name", "class_name", "message"),
    [
        ("BertConfig", "BertForMaskedLM", "BertForMaskedLM is an encoder"),
        ("LlamaConfig", "LlamaModel", "LlamaModel is a model without its head"),
        ("LlamaConfig", "LlamaForSequenceClassification", "is a classifier"),
        ("T5Config", "T5ForConditionalGeneration", "is an encoder-decoder"),
    ],
)
def test_another_kind_of_model_is_refused_by_what_it_is(
    config_name, class_name, message, tokenizer
):
    given = tiny(config_name, class_name, tokenizer)
    before = dict(vars(given.config))
    with pytest.raises(ModelError, match=message) as refusal:
        bridge_of(given)
    assert "version" not in str(refusal.value)
    assert vars(given.config) == before


def test_a_checkpoint_of_another_kind_is_refused_early(tokenizer, tmp_path):
    tiny("BertConfig", "BertForMaskedLM", tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(ModelError, match="BertForMaskedLM is an encoder"):
        ma.load_model(str(tmp_path))


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, lambda compiled: compiled])
def test_a_wrapped_model_is_unwrapped(wrap, tokenizer):
    torch.manual_seed(0)
    given = tiny("LlamaConfig", "LlamaForCausalLM", tokenizer)
    model = bridge_of(wrap(torch.compile(given, backend="eager")), verify=False)
    assert model.original_model is given


def test_a_model_that_was_compiled_in_place_is_not_compiled(tokenizer):
    given = tiny("LlamaConfig", "LlamaForCausalLM", tokenizer)
    given.compile(backend="eager")
    bridge_of(given, verify=False)
    assert given._compiled_call_impl is None


def test_adapters_are_to_be_merged(tokenizer):
    given = tiny("LlamaConfig", "LlamaForCausalLM", tokenizer)
    given.merge_and_unload = lambda: given
    with pytest.raises(ModelError, match=r"pass model\.merge_and_unload\(\)"):
        bridge_of(given)


def test_a_model_of_another_library_is_refused():
    given = torch.nn.Linear(1, 1)
    given.config = ma.Prompt("of a dataclass")
    with pytest.raises(ModelError, match="no configuration of transformers"):
        bridge_of(given)


def test_the_hooks_of_a_refused_model_are_named(tokenizer):
    given = tiny("LlamaConfig", "LlamaForCausalLM", tokenizer)
    given.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, i, out: out * 2)
    with pytest.raises(ModelError, match=r"hooks at .*0.self_attn.q_proj"):
        bridge_of(given)


# Folders that are no whole checkpoints.


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["adapter_config.json", "adapter_model.safetensors"], "holds an adapter .* merge it"),
        (["model.Q4.gguf"], "name it with gguf_file="),
        (["consolidated.00.pth", "params.json"], "Meta's or Mistral's format"),
        (["checkpoint-500/config.json"], "name one of its folders checkpoint-"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused(files, message, tmp_path):
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    with pytest.raises(ModelError, match=message):
        ma.load_model(str(tmp_path))


def test_shards_without_their_index(tokenizer, tmp_path):
    given = tiny("LlamaConfig", "LlamaForCausalLM", tokenizer)
    given.save_pretrained(tmp_path, max_shard_size="120KB")
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(
        ModelError, match=r"parts of the weights .* without model\.safetensors\.index"
    ):
        ma.load_model(str(tmp_path))
    for shard in tmp_path.glob("model-*"):
        shard.rename(tmp_path / f"pytorch_{shard.stem}.bin")
    with pytest.raises(ModelError, match=r"without pytorch_model\.bin\.index"):
        ma.load_model(str(tmp_path))


# A tokenizer other than that of tokenizer.json.


def saved(tokenizer, folder, tokenizer_class):
    given = tiny("LlamaConfig", "LlamaForCausalLM", tokenizer)
    given.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(settings | {"tokenizer_class": tokenizer_class}), "utf-8")
    return str(folder)


def test_a_class_that_splits_otherwise_than_the_file_is_named(tokenizer, tmp_path):
    folder = saved(tokenizer, tmp_path, "Qwen2Tokenizer")
    with pytest.warns(UserWarning, match=r"Qwen2Tokenizer.* reads .* than its tokenizer\.json"):
        tokenizer_named(folder)


def test_the_file_of_the_class_itself_is_silent(tokenizer, tmp_path, recwarn):
    tokenizer_named(saved(tokenizer, tmp_path, "PreTrainedTokenizerFast"))
    assert not [each for each in recwarn if "tokenizer.json" in str(each.message)]


# End tokens that only generation_config names.


def test_answers_stop_where_generate_stops(tokenizer):
    torch.manual_seed(0)
    given = tiny("LlamaConfig", "LlamaForCausalLM", tokenizer).eval()
    ids = tokenizer(QUESTIONS[0], return_tensors="pt")["input_ids"]
    written = given.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)[0]
    later = int(written[ids.shape[1] + 2])
    given.generation_config.eos_token_id = [2, later]
    expected = given.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    model = bridge_of(given, verify=False)
    prompt = ma.Prompt(tokens=ids[0].tolist(), solution="7")
    (answer,) = ma.evaluate(model, [prompt], new_tokens=12).answers
    assert [*answer.tokens, later] == expected
    assert answer.finished
    assert later in unloaded(model).end
    assert later in unloaded(random_weights(model)).end


# What is verified can be run.


def test_layers_that_read_the_keys_of_earlier_ones(tokenizer):
    torch.manual_seed(0)
    config = transformers.Gemma4TextConfig(
        **{**TEXT, "num_hidden_layers": 4, "global_head_dim": 16},
        vocab_size=len(tokenizer),
        vocab_size_per_layer_input=len(tokenizer),
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    given = transformers.Gemma4ForCausalLM(config).eval()
    given.set_attn_implementation("eager")
    ids = tokenizer(QUESTIONS[0], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        patterns = given(ids, output_attentions=True, use_cache=False).attentions
    model = bridge_of(given)
    prompt = ma.Prompt(tokens=ids[0].tolist())
    pattern = patterns[3][0]  # of full attention, with the keys of layer 1
    length = ids.shape[1]
    expected = [pattern[:, key + 1 :, key].mean(-1).tolist() for key in range(length - 1)]
    for engine in ("hooks", "streaming"):
        result = ma.run(model, [prompt], engine=engine)
        received = result["received_attention"].received.sel(condition="baseline", layer=3)
        got = received.transpose("key", "head").values[: length - 1]
        np.testing.assert_allclose(got, expected, atol=1e-5)
