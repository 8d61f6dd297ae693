"""A GGUF file is the model that its numbers make: verified like any other, and named in the results."""

import hashlib
import json
import shutil
import sys

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import mechattn as ma
from mechattn.errors import ModelError, OptionError
from mechattn.model.checkpoint import (
    architecture_named,
    layers_and_heads,
    text_config,
    tokenizer_named,
)
from mechattn.model.gguf_files import read_once
from mechattn.model.hooked import facts_of
from mechattn.model.weights import stored_hash
from mechattn.render.words import model_caption

TEXT = "Tom has 3 apples and gives 2 to Mia."
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}
Q4_0 = GGMLQuantizationType.Q4_0


def in_llama_cpps_order(weight, heads):
    """Rows of queries or keys: llama.cpp rotates neighbouring pairs, transformers halves."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(model, tokenizer, path, quantised=None, architecture="llama"):
    """Write a Llama as llama.cpp's converter does; with a type, all matrices of the layers in it."""
    config = model.config
    writer = GGUFWriter(path, architecture)
    for field, value in {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": 10_000.0,
        "vocab_size": config.vocab_size,
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "gpt-2",
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "add_bos_token": True,
    }.items():
        getattr(writer, f"add_{field}")(value)
    parts = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    vocabulary = sorted(parts["vocab"], key=parts["vocab"].get)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token.startswith("<") else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in parts["merges"]])
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if "q_proj" in name:
            values = in_llama_cpps_order(values, config.num_attention_heads)
        if "k_proj" in name:
            values = in_llama_cpps_order(values, config.num_key_value_heads)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        values = np.ascontiguousarray(values)
        if quantised is not None and "blk" in name and values.ndim == 2:
            writer.add_tensor(name, quantize(values, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def llama(checkpoint):
    """A random Llama whose widths are those of blocks of quantised weights."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    return LlamaForCausalLM.from_pretrained(checkpoint).eval(), tokenizer


@pytest.fixture(scope="module")
def quantised(llama, tmp_path_factory):
    """The Llama's layers in 4 bits."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(*llama, path, Q4_0)
    return path


def logits_of(model, tokens):
    with torch.no_grad():
        outcome = model(tokens)
    return getattr(outcome, "logits", outcome)


def test_the_logits_are_those_of_the_dequantised_weights(llama, quantised):
    """The oracle dequantises each matrix of the model itself, without the file's names and its order of rows."""
    model, tokenizer = llama
    hooked = ma.load_model(str(quantised))
    tokens = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    own = logits_of(model, tokens)
    weights = {}
    for name, tensor in model.state_dict().items():
        if "layers" in name and tensor.ndim == 2:
            tensor = torch.tensor(dequantize(quantize(tensor.numpy(), Q4_0), Q4_0))
        weights[name] = tensor
    oracle = LlamaForCausalLM(model.config).eval()
    oracle.load_state_dict(weights)

    got = logits_of(hooked, tokens)
    torch.testing.assert_close(got, logits_of(oracle, tokens), atol=2e-4, rtol=1e-4)
    assert (got - own).abs().max() > 0.1, "negative control: four bits change the logits"
    assert {p.dtype for p in hooked.parameters()} == {torch.float32}


def test_config_and_tokenizer_come_from_the_file(llama, quantised):
    name = str(quantised)
    assert layers_and_heads(name) == (3, 4)
    assert architecture_named(name) == "LlamaForCausalLM"
    assert text_config(name).num_key_value_heads == 2
    ours = tokenizer_named(name)
    assert ours(TEXT)["input_ids"] == llama[1](TEXT)["input_ids"]
    assert ours.eos_token_id == llama[1].eos_token_id


def test_the_result_names_the_file(quantised):
    result = ma.run(str(quantised), TEXT)
    about = result.provenance["model"]
    assert about["name"] == "tiny.gguf"
    assert about["verified"] is True
    assert about["gguf"]["file"] == "tiny.gguf"
    assert about["gguf"]["sha256"] == hashlib.sha256(quantised.read_bytes()).hexdigest()
    layers = 3 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64)
    assert about["gguf"]["types"]["Q4_0"] == layers
    assert model_caption(result).endswith("parameters, 4-bit weights, dequantised)")


def test_a_model_transformers_read_from_gguf_is_verified(llama, quantised):
    """transformers marks it as quantised, though its tensors are float32."""
    model = AutoModelForCausalLM.from_pretrained(quantised.parent, gguf_file=quantised.name)
    hooked = ma.load_model(model, tokenizer=llama[1])
    report = facts_of(hooked).report
    assert report.not_checked == []
    assert facts_of(hooked).gguf["file"] == "tiny.gguf"
    assert not hasattr(model.config, "quantization_config")


def test_gguf_file_names_a_file_in_a_directory(quantised):
    hooked = ma.load_model(quantised.parent, gguf_file=quantised.relative_to(quantised.parent))
    assert hooked.cfg.n_layers == 3
    with pytest.raises(OptionError, match=r"ends in .gguf"):
        ma.load_model(quantised.parent, gguf_file="config.json")
    with pytest.raises(ModelError, match=r"there is no file .*other.gguf"):
        ma.load_model(quantised.parent, gguf_file="other.gguf")


def test_the_file_is_read_once_as_the_package_reads_it(quantised):
    """Our quick reader finds the fields and tensors that gguf's own finds."""
    theirs = GGUFReader(quantised)
    with read_once():
        from gguf import GGUFReader as Quick

        ours = Quick(str(quantised))
        with read_once():
            assert Quick(str(quantised)) is ours
    with read_once():
        from gguf import GGUFReader as Later

        assert Later(str(quantised)) is ours, "configuration, tokenizer and weights are read apart"
    assert list(ours.fields) == list(theirs.fields)
    for name, field in theirs.fields.items():
        assert ours.fields[name].contents() == field.contents(), name
        assert ours.fields[name].types == field.types, name
    for mine, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert mine.name == other.name
        assert (mine.data == other.data).all()


def test_a_job_notices_another_file(llama, quantised, tmp_path):
    copied = tmp_path / "tiny.gguf"
    shutil.copy(quantised, copied)
    assert stored_hash(str(copied)) == stored_hash(str(quantised))
    write_gguf(*llama, copied)
    assert stored_hash(str(copied)) != stored_hash(str(quantised))


@pytest.mark.parametrize("load", [ma.load_model, tokenizer_named, layers_and_heads])
def test_a_file_that_cannot_be_read_is_refused(load, llama, quantised, tmp_path, monkeypatch):
    content = quantised.read_bytes()
    key = b"tokenizer.ggml.tokens"
    count_at = content.index(key) + len(key) + 8  # after the types of the field and its items
    endless = content[:count_at] + (2**60).to_bytes(8, "little") + content[count_at + 8 :]
    damaged = {
        "endless.gguf": (endless, "damaged or cut off"),
        "cut.gguf": (content[: len(content) // 2], r"cut.gguf is .*damaged or cut off.*again"),
        "header.gguf": (content[:900], "damaged or cut off"),
        "renamed.gguf": (b"Not a model.", "is not a GGUF file, or is damaged"),
        "big-00001-of-00003.gguf": (content, "a part of a split model.*--merge"),
    }
    for name, (written, reason) in damaged.items():
        (tmp_path / name).write_bytes(written)
        with pytest.raises(ModelError, match=reason):
            load(str(tmp_path / name))
    with pytest.raises(ModelError, match=r"there is no file .*absent.gguf"):
        load(str(tmp_path / "absent.gguf"))
    encoder = tmp_path / "encoder.gguf"
    write_gguf(*llama, encoder, architecture="bert")
    with pytest.raises(ModelError, match=r"architecture .*bert"):
        load(str(encoder))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r'needs the package gguf: pip install "mechattn\[gguf\]"'):
        load(str(quantised))
