"""What a model of transformers computes, in float64: patterns, values, each head's output, the residual stream."""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import mechattn as ma
from mechattn.model.checkpoint import load_tokenizer, toy_folder, toy_names
from tests.conftest import loaded_once
from tests.parity.test_every_toy import alibi_in_the_mask_only
from tests.tiny_families import tiny_model

# Windows, grouped heads and a norm after attention; ALiBi and one projection for queries, keys and values.
# What a family does otherwise shows in received attention, which is compared for every one of them.
MECHANISMS = ("toy:gemma3", "toy:falcon")
TWELVE = {"BLOOM": {"hidden_size": 96, "n_head": 12}, "MPT": {"d_model": 96, "n_heads": 12}}


def models(name):
    """The model in float64 with eager attention, and the hooked one."""
    if name in toy_names():
        plain = AutoModelForCausalLM.from_pretrained(toy_folder(name), dtype=torch.float64).eval()
        hooked = loaded_once(name)
    else:
        tokenizer = load_tokenizer("toy:llama")
        plain, same = (tiny_model(name, len(tokenizer), **TWELVE.get(name, {})) for _ in range(2))
        plain = plain.double()
        hooked = ma.load_model(same, tokenizer=tokenizer) if name in TWELVE else loaded_once(name)
    plain.set_attn_implementation("eager")
    loop_over_experts(plain)
    return plain, hooked


def loop_over_experts(plain):
    """A mixture of experts computes one after the other: the grouped product has no float64."""
    if hasattr(plain.config, "_experts_implementation"):
        plain.set_experts_implementation("eager")


@dataclass
class Passed:
    """Of one sequence, a list over layers of arrays."""

    pattern: list  # head query key
    v: list  # query head: head key d_head
    q: list  # with bias, before any rotation: head pos d_head
    k: list  # of latent attention the part that is not rotated
    z: list  # pos head d_head
    w_o: list  # head d_head d_model
    resid: list  # pos d_model, before each block; after the last norm at the end of the list
    attention: list  # pos d_model, what the attention block adds, after a norm where one follows
    gain: list  # pos d_model, the factor of that norm; 1 where there is none
    logits: np.ndarray


def module_of(block, *names):
    for name, module in block.named_modules():
        if name.rpartition(".")[2] in names:
            return module
    return None


def fused(out, heads, how):
    """q, k, v [head pos d_head] from a fused projection."""
    if how == "by head":  # Falcon, BLOOM
        return out.view(len(out), heads, 3, -1).permute(2, 1, 0, 3)
    return out.view(len(out), 3, heads, -1).permute(1, 2, 0, 3)  # MPT, GPT-2


def passed(plain, ids, monkeypatch):
    """Run the model once and keep all of it."""
    blocks = max((m for m in plain.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
    config = plain.config
    seen = {}
    handles = []
    heads = getattr(config, "num_attention_heads", None) or config.n_heads

    def keep(key, before=False):
        def take(module, given, out=None):
            value = given[0] if before else out
            seen[key] = (value[0] if isinstance(value, tuple) else value).detach().clone()

        return take

    for n, block in enumerate(blocks):
        one = module_of(block, "query_key_value", "Wqkv", "c_attn")
        latent = module_of(block, "kv_b_proj")
        if latent is not None:
            handles.append(module_of(block, "q_b_proj").register_forward_hook(keep((n, "q"))))
            handles.append(latent.register_forward_hook(keep((n, "kv"))))
        elif one is not None:
            handles.append(one.register_forward_hook(keep((n, "qkv"))))
        else:
            for part in "qkv":
                handles.append(
                    module_of(block, f"{part}_proj").register_forward_hook(keep((n, part)))
                )
        out = (
            block.attn.c_proj if hasattr(block, "attn") and hasattr(block.attn, "c_proj") else None
        )
        out = out or module_of(
            block.self_attn if hasattr(block, "self_attn") else block, "o_proj", "dense", "out_proj"
        )
        handles.append(out.register_forward_pre_hook(keep((n, "z"), before=True)))
        seen[n, "out"] = out
        if hasattr(block, "post_feedforward_layernorm"):  # Gemma 3
            handles.append(
                block.post_attention_layernorm.register_forward_hook(keep((n, "normed")))
            )
        handles.append(block.register_forward_pre_hook(keep((n, "resid"), before=True)))
        handles.append(block.register_forward_hook(keep((n, "after"))))
    with alibi_in_the_mask_only(plain, monkeypatch), torch.no_grad():
        made = plain(torch.tensor([ids]), output_attentions=True)
    for handle in handles:
        handle.remove()
    found = Passed([], [], [], [], [], [], [], [], [], made.logits[0].numpy())
    for n in range(len(blocks)):
        found.pattern.append(made.attentions[n][0].numpy())
        if (
            n,
            "kv",
        ) in seen:  # of each head, the part of the key that is not rotated, then the value
            widths = [config.qk_nope_head_dim, config.v_head_dim]
            k, v = (
                seen[n, "kv"][0]
                .view(len(ids), heads, sum(widths))
                .transpose(0, 1)
                .split(widths, -1)
            )
            q = seen[n, "q"][0].view(len(ids), heads, -1).transpose(0, 1)
        elif (n, "qkv") in seen:
            how = "by head" if config.model_type in ("falcon", "bloom") else "in turn"
            q, k, v = fused(seen[n, "qkv"][0], heads, how)
        else:
            width = getattr(config, "head_dim", None) or config.hidden_size // heads
            q, k, v = (seen[n, part][0].view(len(ids), -1, width).transpose(0, 1) for part in "qkv")
            k, v = (x.repeat_interleave(heads // len(x), 0) for x in (k, v))
        for name, value in (("q", q), ("k", k), ("v", v)):
            getattr(found, name).append(value.numpy())
        weight = seen[n, "out"].weight.detach()
        weight = weight.T if type(seen[n, "out"]).__name__ != "Conv1D" else weight
        found.w_o.append(weight.view(heads, -1, weight.shape[-1]).numpy())
        found.z.append(seen[n, "z"][0].view(len(ids), heads, -1).numpy())
        found.resid.append(seen[n, "resid"][0].numpy())
        bias = 0 if seen[n, "out"].bias is None else seen[n, "out"].bias.detach().numpy()
        added = np.einsum("phd,hdm->pm", found.z[n], found.w_o[n]) + bias
        written = seen[n, "normed"][0].numpy() if (n, "normed") in seen else added
        found.attention.append(written)
        found.gain.append(written / added)  # an RMSNorm multiplies each coordinate by γ / σ
    found.resid.append(seen[len(blocks) - 1, "after"][0].numpy())
    return found
