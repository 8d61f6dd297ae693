# %% [markdown]
# # ARM: what it changes, and whether it does what tokens do
#
# ARM moves near-zero activations of the first MLP away from zero, without inserting tokens
# ([interventions](../concepts/interventions.md)). The paper offers it as a substitute for meaningless tokens. Two
# questions: what does it change, and is that the same change as with tokens? On `toy:llama`, a toy of 1.0 M parameters.

# %%

import mechattn as ma

model = ma.load_model("toy:llama")
prompts = ma.load_prompts("word-problems", limit=48)
slash = ma.MeaninglessTokens("/", count=55)
recorded = ma.record_affine(model, prompts, slash, layers=0)  # λ and Σσ of every token and head
arm = dict(form="released_llama", c=0.13, p1=95.0)
conditions = {
    "slash": slash,
    "sentence": ma.RandomSentence(count=55),
    "arm": ma.Baseline(intervention=ma.interventions.ARM(**arm)),
    "direction": ma.Baseline(intervention=ma.interventions.ARM(**arm, control="random_direction")),
    "channels": ma.Baseline(intervention=ma.interventions.ARM(**arm, control="random_channels")),
    "signs": ma.Baseline(intervention=ma.interventions.ARM(**arm, control="shuffled_signs")),
    "affine": ma.Baseline(intervention=recorded),
    "scale": ma.Baseline(intervention=recorded.only("scale")),
    "shift": ma.Baseline(intervention=recorded.only("shift")),
}
result = ma.run(model, prompts, conditions, ma.analyses.MlpActivations(), layers=[0])

# %% [markdown]
# ## How large is the change, and what happens to the near-zero share?
#
# `change` is $\lVert x' - x \rVert / \lVert x \rVert$ for the activations of the same question token. The near-zero
# share is the fraction below a threshold that was fixed on other prompts before the run.

# %%
for name in conditions:
    near = result.compare(name, quantity="near_zero", matched=False).iloc[0]
    change = result.compare(name, quantity="token_change", matched=False, columns="all").iloc[0]
    middle, low, high = (100 * x for x in (near.change, near.change_low, near.change_high))
    print(
        f"{name:10} change {100 * change.value:5.1f} %   near zero {middle:+6.1f} % [{low:+.1f}, {high:+.1f}]"
    )

# %%
ma.render.activation_metrics(result)

# %% [markdown]
# The three controls change each token by exactly as much as ARM does, but in another direction, in other channels, or
# with other signs.
#
# ## Is it the same change?
#
# The cosine between two changes over all question tokens and channels: 1 is the same change, 0 nothing in common.

# %%
table = result.agreement("slash", "arm")
print(table[["other", "cosine", "cosine_low", "cosine_high"]].round(2).to_string(index=False))

# %%
ma.render.agreement(result, "slash")

# %% [markdown]
# ## What it says
#
# - ARM lowers the near-zero share by 63.1 %. That is what it is made to do, so it is not evidence of anything. The
#   same sizes with random signs lower it by 56.6 %, and a random direction of the same size by 14.5 %.
# - The tokens hardly lower it (2.0 %), although they change the activations by 66.8 % of their norm, twice as much as
#   ARM (32.2 %).
# - The two changes have no direction in common: their cosine is 0.00, as with the random controls. For a random
#   sentence and the slashes it is 0.47.
# - $\lambda$ and $\sum\sigma$ of the tokens, applied without any token, make nearly the same change: 0.99.
#   $\sum\sigma$ alone makes most of it (0.93), $\lambda$ alone little (0.39).
#
# So in this toy ARM is not a substitute for tokens. The tokens affect the first MLP through what they add to
# attention's output, not by moving activations away from zero. Whether either changes the answers is another question:
# see [evaluation](../concepts/evaluation.md), and the toys' accuracies in `experiments/README.md`.
