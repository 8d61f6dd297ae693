"""What a model of transformers computes, in float64: patterns, values, each head's output, the residual stream."""

import contextlib
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.falcon.modeling_falcon import FalconAttention

import mechattn as ma
from mechattn.model.checkpoint import toy_folder, toy_names
from tests.conftest import loaded_once
from tests.tiny_families import bridge_of, tiny_model

# A short prompt, so that loops over its tokens end soon.
SHORT = ma.Prompt("Tom has 3 apples and gives 2 to Mia. How many has he?", "Count.", id="short")
# Windows, grouped heads and a norm after attention; ALiBi and one projection for queries, keys and values.
# What a family does otherwise shows in received attention, which is compared for every one of them.
MECHANISMS = ("toy:gemma3", "toy:falcon")
# Slopes of a number of heads that is no power of 2; what blocks give is multiplied before it is added.
SETTINGS = {
    "BLOOM": {"hidden_size": 96, "n_head": 12},
    "MPT": {"d_model": 96, "n_heads": 12},
    "Granite": {"residual_multiplier": 0.22},
}


def plain_and_hooked(name):
    """A model of transformers in float64, and the same one hooked, in float32."""
    if name in toy_names():
        folder = toy_folder(name)
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
        return plain, loaded_once(name)
    settings = SETTINGS.get(name, {})
    plain = tiny_model(name, **settings).double()
    if not settings:
        return plain, loaded_once(name)
    same = tiny_model(name, **settings)
    return plain, bridge_of(same)


def models(name):
    """The model in float64 with eager attention, and the hooked one."""
    plain, hooked = plain_and_hooked(name)
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
    mlp: list  # pos d_model, what the MLP adds
    gain: list  # pos d_model, the factor of that norm or of a multiplier; 1 where there is none
    logits: np.ndarray


@contextlib.contextmanager
def alibi_in_the_mask_only(model):
    """Falcon's eager attention adds ALiBi a second time: here the second is zero."""
    forward = FalconAttention.forward

    def once(self, hidden_states, alibi, *args, **kwargs):
        second = None if alibi is None else torch.zeros_like(alibi)
        return forward(self, hidden_states, second, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if model.config.model_type == "falcon":
            patch.setattr(FalconAttention, "forward", once)
        yield


def windows(config):
    """For each layer how far back a query sees, read from the configuration by hand."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    width = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        width = None
    return [width if kind == "sliding_attention" and width else 10**9 for kind in kinds]


def seen_in(plain, ids, into, out_of=(), **options):
    """What goes into and comes out of modules in a run [pos, …], by their keys; and what the model gives."""
    seen = {}

    def keep(key, value):
        value = value[0] if isinstance(value, tuple) else value
        if value.dtype == torch.bfloat16:  # which numpy lacks
            value = value.float()
        seen[key] = value[0].detach().numpy().copy()

    with contextlib.ExitStack() as stack:
        for key, module in dict(into).items():
            hook = module.register_forward_pre_hook(lambda m, given, key=key: keep(key, given))
            stack.callback(hook.remove)
        for key, module in dict(out_of).items():
            hook = module.register_forward_hook(lambda m, given, out, key=key: keep(key, out))
            stack.callback(hook.remove)
        with alibi_in_the_mask_only(plain), torch.no_grad():
            return seen, plain(torch.tensor([ids]), **options)


def blocks_of(plain):
    return max((m for m in plain.modules() if isinstance(m, torch.nn.ModuleList)), key=len)


def module_of(block, *names):
    for name, module in block.named_modules():
        if name.rpartition(".")[2] in names:
            return module
    return None


def by_head(x, heads):
    """[head pos width] from [pos, head · width]."""
    return x.reshape(-1, heads, x.shape[-1] // heads).swapaxes(0, 1)


def queries_keys_values(seen, config, heads):
    """q, k, v [head pos d_head] from what the projections of a layer give, by their names."""
    if "kv_b_proj" in seen:  # of each head, the part of the key that is not rotated, then the value
        keys_and_values = by_head(seen["kv_b_proj"], heads)
        k, v = np.split(keys_and_values, [config.qk_nope_head_dim], -1)
        return by_head(seen["q_b_proj"], heads), k, v
    if "query_key_value" in seen:  # Falcon, BLOOM: head by head
        out = seen["query_key_value"]
        return out.reshape(len(out), heads, 3, -1).transpose(2, 1, 0, 3)
    for name in ("Wqkv", "c_attn"):  # MPT, GPT-2: all queries, all keys, all values
        if name in seen:
            return [by_head(part, heads) for part in np.split(seen[name], 3, -1)]
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    parts = [seen[f"{part}_proj"] for part in "qkv"]
    q, k, v = (by_head(part, part.shape[-1] // width) for part in parts)
    return q, *(np.repeat(x, heads // len(x), 0) for x in (k, v))


PROJECTIONS = (
    "q_b_proj", "kv_b_proj", "query_key_value", "Wqkv", "c_attn", "q_proj", "k_proj", "v_proj",
)  # fmt: skip


def passed(plain, ids):
    """Run the model once and keep all of it."""
    blocks = blocks_of(plain)
    config = plain.config
    heads = getattr(config, "num_attention_heads", None) or config.n_heads
    into = {}
    out_of = {("after", len(blocks) - 1): blocks[-1]}
    outputs = []
    for n, block in enumerate(blocks):
        attention = getattr(block, "attn", None) or getattr(block, "self_attn", block)
        outputs.append(module_of(attention, "c_proj", "o_proj", "dense", "out_proj"))
        into |= {("z", n): outputs[n], ("resid", n): block}
        for name in PROJECTIONS:
            if module_of(block, name) is not None:
                out_of[name, n] = module_of(block, name)
        if hasattr(block, "post_feedforward_layernorm"):  # Gemma 3
            out_of["normed", n] = block.post_attention_layernorm
            out_of["mlp", n] = block.post_feedforward_layernorm
        elif hasattr(block, "mlp"):
            out_of["mlp", n] = block.mlp

    seen, run = seen_in(plain, ids, into, out_of, output_attentions=True)
    factor = getattr(config, "residual_multiplier", 1.0)
    found = Passed([], [], [], [], [], [], [], [], [], [], run.logits[0].numpy())
    for n, out in enumerate(outputs):
        of_layer = {name: value for (name, layer), value in seen.items() if layer == n}
        q, k, v = queries_keys_values(of_layer, config, heads)
        weight = out.weight.detach().numpy()
        weight = weight if type(out).__name__ == "Conv1D" else weight.T
        w_o = weight.reshape(heads, -1, weight.shape[-1])
        z = of_layer["z"].reshape(len(ids), heads, -1)
        bias = 0 if out.bias is None else out.bias.detach().numpy()
        added = np.einsum("phd,hdm->pm", z, w_o) + bias
        written = factor * of_layer.get("normed", added)
        found.pattern.append(run.attentions[n][0].numpy())
        found.q.append(q)
        found.k.append(k)
        found.v.append(v)
        found.z.append(z)
        found.w_o.append(w_o)
        found.resid.append(of_layer["resid"])
        found.attention.append(written)
        found.mlp.append(factor * of_layer.get("mlp", 0))
        found.gain.append(written / added)  # an RMSNorm multiplies each coordinate by γ / σ
    found.resid.append(seen["after", len(blocks) - 1])
    return found


def updates_of(run, layer):
    """Each head's Δ [pos, head, d_model], built whole, as it reaches the residual stream."""
    return np.einsum("phd,hdm->phm", run.z[layer], run.w_o[layer]) * run.gain[layer][:, None]


def weight_of(norm):
    """γ; Gemma's is stored less 1."""
    return norm.weight.detach().numpy() + (1 if "Gemma" in type(norm).__name__ else 0)


def rms(x, norm):
    eps = next(getattr(norm, n) for n in ("eps", "variance_epsilon") if hasattr(norm, n))
    return np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def read(plain, delta, stream, ids):
    """What parts [pos, …, d_model] give to the logit of the next token, with the final norm's scale of the stream."""
    norm = plain.transformer.ln_f if hasattr(plain, "transformer") else plain.model.norm
    w_u = plain.get_output_embeddings().weight.detach().numpy()
    w_u = (w_u - w_u.mean(0))[ids[1:]]
    centred = "LayerNorm" in type(norm).__name__
    less = delta - delta.mean(-1, keepdims=True) if centred else delta
    whole = stream - stream.mean(-1, keepdims=True) if centred else stream
    scale = rms(whole, norm).reshape(len(ids), *[1] * (delta.ndim - 1))
    factor = getattr(plain.config, "logit_scale", 1.0) / getattr(
        plain.config, "logits_scaling", 1.0
    )
    return factor * np.einsum("p...m,pm->p...", (weight_of(norm) * less / scale)[:-1], w_u)
