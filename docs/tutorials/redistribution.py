# %% [markdown]
# # Redistribution: from a model to a conclusion
#
# We insert 55 meaningless tokens between the system prompt and the question. What do they do to attention? This
# tutorial asks what a reviewer would: how large is the change, who pays for it, why, in which heads, and would any other
# text do the same?
#
# The model is SmolLM2-135M-Instruct, a real model of 135 M parameters that `make figures` brings. To use your model,
# change one line. Sixteen questions keep this page short; publish more.

# %%
import mechattn as ma

# Or "Qwen/Qwen2.5-Math-7B"; verified against its own attention.
model = ma.load_model("real:smollm2")
system = r"Please reason step by step and put your final answer within \boxed{}."
prompts = ma.load_prompts("gsm8k", limit=16, system=system, template="chat")

# %% [markdown]
# Four conditions in addition to the baseline. The sentence is the matched control: as many tokens, a different sentence
# for each prompt. The last two separate the two things that inserted tokens do ([prompts and
# conditions](../concepts/conditions.md)).

# %%
slash = ma.MeaninglessTokens("/", count=55)
conditions = {
    "slash": slash,
    "sentence": ma.RandomSentence(count=55),
    "masked": slash.masked(),  # tokens moved apart, no attention taken
    "unshifted": slash.unshifted(),  # attention taken, nothing moved
}
analyses = [
    ma.ReceivedAttention(),
    ma.analyses.AttentionBudget(),
    ma.analyses.AffineShift(),
]
result = ma.run(model, prompts, conditions, analyses, keep="prompts")

# %%
slash.apply(prompts[0], model)  # what the model reads, with the inserted tokens marked

# %% [markdown]
# ## 1. Does the question receive less attention?

# %%
print(ma.render.verdict_words(result, "slash"))

# %% [markdown]
# ## 2. Who pays, and why?
#
# A query's attention sums to 1, so what the inserted tokens get, others lose. The upper row divides the attention of the
# question's tokens among those that they attend to. The lower row explains the change of what the question keeps
# ([attention budget](../concepts/attention-budget.md)).

# %%
ma.render.attention_budget(result, conditions=["slash", "sentence"])


# %%
def in_points(shares):
    """Shares of attention in points of 100, for printing; segments without tokens are left out."""
    points = (100 * shares).to_series().dropna()
    return ", ".join(f"{name} {value:+.1f}" for name, value in points.items())


budget = result["attention_budget"].sel(condition="slash")
question = budget.by_cause.sel(segment="question")
print("all layers:", in_points(budget.change.mean(("prompt", "layer", "head"))))
print("the question, by cause:", in_points(question.mean(("prompt", "layer", "head"))))
print("the question in layer 0:", in_points(question.sel(layer=0).mean(("prompt", "head"))))

# %% [markdown]
# ## 3. Which heads?
#
# Heads are found on one half of the prompts and reported on the other. Each row is a change (−0.3 is a
# fall of 30 %) with its interval, and the q-value of no change.

# %%
heads = result.compare("slash", select="half")
shown = ["layer", "head", "change", "change_low", "change_high", "q_difference"]
print(heads[shown].head().round(3).to_string(index=False))
ma.render.received_attention(result, layer=0, top=3, condition="slash")

# %% [markdown]
# The three heads are chosen on one half of the prompts and drawn from the other. Blue is without the tokens, orange
# with them. The lower row shows the sequence itself, with the inserted tokens shaded.
#
# ## 4. Is it the slashes, or anything of that length?

# %%
print(ma.render.verdict_words(result, "sentence"))

# %% [markdown]
# ## 5. Dilution, or distance?

# %%
for name in ("masked", "unshifted"):
    change = 100 * result["attention_budget"].change.sel(condition=name, segment="question")
    print(f"{name}: {float(change.mean()):+.1f} points")

# %% [markdown]
# ## 6. Is the output scaled and shifted, as the paper writes?
#
# $\text{output}' = \lambda \, \text{output} + \sum\sigma$ leaves out two terms ([the affine
# reading](../concepts/affine-shift.md)). How much of the output's norm does it miss, in layer 0 and deeper?

# %%
error = result["affine_shift"].relative_error.sel(segment="question").mean(("prompt", "head"))
for layer in (0, 1, 15):
    missed = 100 * float(error.sel(condition="slash", layer=layer))
    kept_positions = 100 * float(error.sel(condition="unshifted", layer=layer))
    print(f"layer {layer}: missed {missed:.1f} %, with kept positions {kept_positions:.1f} %")

# %% [markdown]
# ## What it says
#
# - Over all layers the question loses next to nothing: its tokens receive 1.0 % less, and its attention to itself
#   changes by 0.1 points of 100. The tokens take 4.3 points, and others pay: the first token and the template 1.6 points
#   each, the system prompt 1.1.
# - Two causes nearly cancel. The prefix is further away, which gives the question 2.5 points; the inserted tokens take
#   1.8, and changed hidden states 0.8.
# - In layer 0 they do not cancel: the tokens take 20.8 points from the question and distance gives back 9.5. There its
#   tokens receive 16.8 % less, and head L0H2 loses 0.406 of its own. This is the layer that the paper shows.
# - A sentence of the same length does far more: the question loses 15.0 %, or 7.6 points. The model reads a sentence;
#   it hardly reads slashes.
# - Masked tokens, which only move the question away from its prefix, give it 2.7 points; tokens that only take attention
#   cost it 1.5. Both effects are there, with opposite signs, so a comparison with the baseline alone shows neither.
# - In layer 0 the published form misses 6.6 % of the output, and nothing at all if positions are kept. In deeper layers
#   it misses more, even with positions kept, because the original tokens themselves have changed there.
