# %% [markdown]
# # The circuit of a model trained here
#
# A model of two attention layers learns in a minute to continue a repeated span of random tokens. How does it do this?
# [Edges and circuits](../how-to/which-circuit.md) answer without knowing what to look for. The model is a toy of 80,000
# parameters, trained below: this page shows the method, not a fact about large models.

# %%
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import mechattn as ma
from mechattn.model.checkpoint import (
    lettered_tokenizer,
)  # letters for token ids, as this model reads no text

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=48, n_positions=49, n_embd=64, n_layer=2, n_head=4, n_inner=1, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
)  # fmt: skip
native = GPT2LMHeadModel(config)
for name, weight in native.named_parameters():
    if ".mlp." in name:
        weight.requires_grad_(False).zero_()


def batch(size=64):
    """Spans of 8 to 24 different tokens, repeated to 48 tokens; the first copy cannot be foreseen."""
    places = torch.arange(48)
    spans = torch.randint(8, 25, (size, 1))
    shuffled = torch.rand(size, 48).argsort(1)
    return shuffled.gather(1, places % spans), (places > spans)[:, 1:]


optimizer = torch.optim.AdamW(
    [w for w in native.parameters() if w.requires_grad], lr=3e-3, weight_decay=0.01
)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=600, pct_start=0.1)
for _ in range(600):
    tokens, foreseen = batch()
    logits = native(tokens).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits[foreseen], tokens[:, 1:][foreseen])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
print(f"loss {loss.item():.3f} nats; guessing would give {torch.tensor(48.0).log().item():.2f}")
model = ma.load_model(native.eval(), tokenizer=lettered_tokenizer(48))

# %% [markdown]
# ## Two versions of each prompt
#
# A span and the beginning of its repetition; the next token is the answer. In the other version the first copy has the
# same tokens in another order, so the answer is another. Orange tokens are those that differ.

# %%
pairs = ma.pairs(model, "repeated-random", limit=24, span=(8, 12))
other = ma.conditions.Counterpart()
other.apply(pairs[0], model)

# %% [markdown]
# ## Which heads?
#
# Each head's output is taken from the other version. All heads of layer 1 carry some of the effect.

# %%
heads = [(layer, head) for layer in range(2) for head in range(4)]
print(
    ma.patch(model, pairs, other, at=heads, metric="logit_diff", direction="denoising").table()[
        ["layer", "head", "effect", "effect_low", "effect_high", "q_effect"]
    ]
)

# %% [markdown]
# ## Which edges?
#
# Half of the prompts rank the edges, the other half says what the first of them carry alone, while every other edge
# carries what it does in the other version.

# %%
circuit = ma.circuit(model, pairs, other)
print(circuit)

# %%
ma.render.circuit_map(circuit)

# %%
print(
    circuit.table()[
        ["writer", "reader", "effect", "effect_low", "effect_high", "q_effect"]
    ].to_string(index=False)
)

# %% [markdown]
# ## Is this the induction circuit?
#
# The textbook's: a head of layer 0 carries each token one place forward, a head of layer 1 finds that place by its
# *keys* and copies the token that stands there. So heads of layer 0 should reach those of layer 1 through k, not
# through q or v. The circuit's edges between the layers, by what they enter, and all paths between heads, each patched
# exactly, with the sum of their mean effects:

# %%
found = circuit.table()
between = found[found.writer.str.startswith("L0") & found.reader.str.startswith("L1")]
print(between.reader.str[-1].value_counts().to_dict())
named = [(f"L0H{a}", f"L1H{b}.{part}") for part in "qkv" for a in range(4) for b in range(4)]
paths = ma.paths(model, pairs, other, named).table()
print(paths.groupby(paths.path.str[-1]).effect.sum().round(2).to_dict())

# %%
focus = ma.run(model, pairs, {}, [ma.analyses.AttentionFocus()])["attention_focus"]
mass = (
    focus[["previous_mass", "induction_mass"]]
    .sel(condition="baseline", segment="question")
    .mean("prompt")
)
print(mass.to_dataframe()[["previous_mass", "induction_mass"]].round(2))

# %% [markdown]
# ## What it says
#
# - A fifth of the edges carries nearly all of the effect on prompts that did not choose them; as many random edges
#   carry nothing. The choice is stable: two halves of the prompts name nearly the same edges.
# - Between the layers the circuit has edges into keys alone, and exact patching agrees: paths into queries and values
#   have next to no effect. This is the induction circuit, found without naming it. The heads of layer 0 that it names
#   attend to the token before.
# - Single paths have smaller effects than their attributed scores, because several heads of each layer do the same.
#   Where heads stand in for each other, patch them together.
# - Nothing here says *where* tokens stand: positions are the same in both versions, so what carries them is not found.
