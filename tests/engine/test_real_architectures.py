"""The real models' shapes (heads, groups, windows) with random weights, through the config of the experiments."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import mechattn as ma
from mechattn.commands.run_config import run_from_config

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SHAPES = {  # Qwen2.5-Math-7B, gemma-3-4b-it: query heads, key-value heads, d_head
    "qwen2": (28, 4, 128),
    "gemma3_text": (8, 4, 256),
}


def checkpoint(folder, kind, tokenizer):
    """Two layers of a real architecture at its own head count, narrow elsewhere, written as its users would have it."""
    heads, kv_heads, d_head = SHAPES[kind]
    options = dict(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=d_head,
        max_position_embeddings=512,
        initializer_range=0.06,
    )
    if kind == "gemma3_text":
        options |= {
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        }
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    "kind",
    ["qwen2", pytest.param("gemma3_text", marks=pytest.mark.slow)],
)
def test_a_real_architecture_goes_through_the_same_config(kind, tokenizer, tmp_path, monkeypatch):
    folder = tmp_path / kind
    checkpoint(folder, kind, tokenizer)
    text = (EXPERIMENTS / "redistribution" / "config.toml").read_text()
    lines = text.splitlines()
    where = next(i for i, line in enumerate(lines) if line.startswith("model = "))
    lines[where] = f'model = "{folder}"'  # the one line
    (tmp_path / "config.toml").write_text("\n".join(lines).replace("limit = 64", "limit = 6"))
    monkeypatch.chdir(tmp_path)
    stored, page = run_from_config(tmp_path / "config.toml")
    result = ma.load_result(stored)
    assert result["received_attention"].sizes["head"] == SHAPES[kind][0]
    assert result.provenance["model"]["heads"] == SHAPES[kind][0]
    assert result.provenance["engine"] == "streaming"
    assert page.read_text().startswith("<!doctype html>")
