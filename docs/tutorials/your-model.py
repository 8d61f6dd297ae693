# %% [markdown]
# # Bring your own model, and your own analysis
#
# A model can be a name on the Hugging Face hub, a directory, a transformers object, or a model that is already hooked.
# This page makes one from a config, with random weights. An untrained network is also the best negative control.

# %%
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mechattn as ma

tokenizer = ma.load_model("toy:llama").tokenizer
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    bos_token_id=tokenizer.bos_token_id,
    eos_token_id=tokenizer.eos_token_id,
)
folder = "random-llama"  # in the current folder
tokenizer.save_pretrained(folder)
LlamaForCausalLM(config).save_pretrained(folder)

# %% [markdown]
# ## Load and verify
#
# `load_model` verifies what it loads: logits against the model's own attention, patterns, masks, heads' outputs,
# padding. The report shows what was compared and the tolerance ([a verified
# model](../concepts/verification.md)).

# %%
random_llama = ma.load_model(folder, tokenizer=tokenizer)
ma.verify_model(random_llama)

# %% [markdown]
# You can also pass a transformers object or your own bridge; both are verified too. Booting changes a model
# object in place, so pass one that you don't need elsewhere.

# %%
from transformer_lens.model_bridge import TransformerBridge

from_object = ma.load_model(LlamaForCausalLM.from_pretrained(folder), tokenizer=tokenizer)
bridge = TransformerBridge.boot_transformers(folder, tokenizer=tokenizer)
bridge.enable_compatibility_mode(no_processing=True)  # hook names of HookedTransformer, raw weights
tokens = torch.tensor([[tokenizer.bos_token_id, 5, 6, 7, 8]])
with torch.no_grad():
    for other in (from_object, ma.load_model(bridge)):
        print(
            f"largest difference of the logits: {float((other(tokens) - random_llama(tokens)).abs().max()):.0e}"
        )

# %% [markdown]
# ## Compare it with a trained model
#
# Random weights attend almost uniformly, so the measured change must equal the uniform null. If it did not, the
# measurement would be wrong.

# %%
prompts = ma.load_prompts("word-problems", limit=24)
conditions = {"slash": ma.MeaninglessTokens("/", count=55)}
for name, model in {"random weights": random_llama, "toy:llama": "toy:llama"}.items():
    print(f"{name}: {ma.render.verdict_words(ma.run(model, prompts, conditions))}")

# %% [markdown]
# ## An analysis of your own
#
# What fraction of a query's attention goes to tokens identical to itself? An analysis receives blocks of query
# rows, adds each to its own sums, and turns the sums into values per prompt. It never sees a whole [query, key]
# matrix. It runs once more on the rows of a head that attends uniformly. That gives `same_uniform`, against which a
# fall under inserted tokens is tested.

# %%
from mechattn.analysis.analysis import Quantity


@dataclass(frozen=True)
class SameToken:
    name = "same_token"
    options = {}
    quantities = {
        "same": Quantity(
            ("head",), "probability", "attention to earlier copies of the query's token"
        ),
    }

    def problem(self, sequence):
        return None

    def start(self, batch, heads):  # a sum for each head, and the number of queries
        return {"sum": torch.zeros(len(batch.tokens), heads + 1, device=batch.tokens.device)}

    def add(self, sums, rows):
        tokens, at = (
            rows.batch.tokens,
            torch.arange(rows.batch.tokens.shape[1], device=rows.batch.tokens.device),
        )
        q, k = at[rows.queries, None], at[None, rows.keys]
        copies = ((tokens[:, rows.queries, None] == tokens[:, None, rows.keys]) & (k < q)).float()
        counted = (copies.sum(-1) > 0) & (rows.batch.origin[:, rows.queries] >= 0)
        each = torch.cat(
            [(rows.pattern * copies[:, None]).sum(-1), torch.ones_like(counted[:, None].float())], 1
        )
        sums["sum"] += (each * counted[:, None]).sum(-1)

    def values(self, sums, batch, window):
        return {"same": sums["sum"][:, :-1] / sums["sum"][:, -1:]}


# %% [markdown]
# It runs together with the others, under every condition, on any model, and its numbers are compared in the same way.

# %%
for name, model in {"random weights": random_llama, "toy:llama": "toy:llama"}.items():
    result = ma.run(model, prompts, conditions, SameToken())
    baseline = result["same_token"].mean("prompt").sel(condition="baseline")
    cell = baseline.same.stack(cell=("layer", "head")).idxmax().item()
    print(f"{name}: mean {float(baseline.same.mean()):.3f}, uniform {float(baseline.same_uniform.mean()):.3f}, "
          f"largest {float(baseline.same.max()):.3f} (layer {cell[0]}, head {cell[1]})")  # fmt: skip
    table = result.compare("slash", quantity="same", segment=None, columns="all")
    further = ((table.q_beyond < 0.05) & (table.beyond < 0)).sum()
    print(f"    slashes: log-ratio {table.difference.mean():+.3f}, under uniform attention {table.null.mean():+.3f}; "
          f"{further} of {len(table)} heads fall further")  # fmt: skip

# %% [markdown]
# ## What it says
#
# - Random weights lose 53.9 % of question attention, and so does uniform attention: where nothing was learned, the
#   measurement gives the null. Single heads still depart from it (of 12, 3 fall further and 6 less far), because random
#   projections are not exactly uniform. The trained toy loses 30.7 %.
# - Copies of the same token get 0.063 from random weights and from uniform attention alike. The trained toy gives
#   them less, 0.054 on average, and has a head that gives them more, 0.088.
# - With slashes every one of these numbers falls, even in the untrained model, by −0.379 in log-ratio. The null falls
#   too (−0.381), and only 3 of the toy's 32 heads fall further. An analysis without its uniform null would have
#   reported all of them.
