# %% [markdown]
# # Controls: what else could explain the effect?
#
# A change under inserted tokens may come from their number, their repetition, their words, the distance they create,
# or from looking at many heads. There is a control for each. Here all of them run in one pass, on `toy:llama` (a toy of
# 1.0 M parameters).

# %%
import numpy as np

import mechattn as ma

model = ma.load_model("toy:llama")
prompts = ma.load_prompts("word-problems", limit=48, system="Solve the problem step by step.")
slash = ma.MeaninglessTokens("/", count=55)
conditions = {
    "slash": slash,
    "word": ma.conditions.RepeatedWord("he", count=55),  # repeated, but a word
    "tokens": ma.conditions.RandomTokens(count=55),  # no repetition, no meaning
    "sentence": ma.RandomSentence(count=55),  # words and grammar
    "shuffled": ma.conditions.ShuffledSentence(count=55),  # the same words, no grammar
    "sentence 2": ma.RandomSentence(count=55, draw=1),  # another draw: a null by construction
    "masked": slash.masked(),
    "unshifted": slash.unshifted(),
    "both": slash.masked().unshifted(),
}
result = ma.run(model, prompts, conditions, ma.ReceivedAttention())

# %% [markdown]
# ## One prompt, every condition
#
# Each control inserts exactly 55 tokens, at the same place, drawn separately for each prompt.

# %%
for name in ("slash", "word", "tokens", "sentence", "shuffled"):
    sequence = conditions[name].apply(prompts[0], model)
    inserted = [token for token, origin in zip(sequence.tokens, sequence.origin) if origin < 0]
    print(f"{name:9} {len(inserted)} tokens: {model.tokenizer.decode(inserted)[:70]}…")

# %% [markdown]
# ## Every condition compared with uniform attention
#
# The log-ratio of question attention to the baseline, averaged over layers and heads, and the same under uniform
# attention.

# %%
for name in conditions:
    table = result.compare(name, quantity="received", null="uniform", columns="all")
    print(f"{name:10} {table.difference.mean():+.3f}   uniform {table.null.mean():+.3f}")

# %%
ma.render.changes(result, ["slash", "masked", "unshifted", "sentence", "shuffled", "tokens"])

# %% [markdown]
# ## Heads chosen by their effect
#
# The two draws of sentences are exchangeable: heads can differ only by chance. How often does the 95 % interval of
# the head with the largest difference exclude 0? We exchange the labels of the two draws at random, prompt by
# prompt, a thousand times; each is a run without any effect. The head is chosen once on the prompts that it is
# reported on, and once on the other half.

# %%
received = result["received_attention"].received_by_segment.sel(segment="question")
ratio = np.log(received.sel(condition="sentence") / received.sel(condition="sentence 2"))
ratio = ratio.transpose("prompt", "layer", "head").values.reshape(len(prompts), -1)
random = np.random.default_rng(0)


def t_values(values):
    return values.mean(0) / values.std(0, ddof=1) * np.sqrt(len(values))


missed = {"same prompts": 0, "other half": 0}
for _ in range(1000):
    d = ratio * random.choice([-1, 1], size=(len(ratio), 1))
    missed["same prompts"] += np.abs(t_values(d)).max() > 2.012  # t, 47 degrees of freedom
    chosen = np.abs(t_values(d[::2])).argmax()
    missed["other half"] += abs(t_values(d[1::2])[chosen]) > 2.069  # t, 23 degrees of freedom
for where, count in missed.items():
    print(
        f"largest of {ratio.shape[1]} heads, reported on the {where}: 0 excluded in {count / 10:.1f} % of the runs"
    )

# %% [markdown]
# `select="half"` makes this split: heads are found on one half (q < 0.05) and reported on the other.

# %%
for to in ("sentence 2", "shuffled", "slash"):
    every = result.compare("sentence", to=to, quantity="received")
    half = result.compare("sentence", to=to, quantity="received", select="half")
    print(f"sentence against {to}: {(every.q_difference < 0.05).sum()} of 32 heads on all prompts; found on one half "
          f"{len(half)}, of these confirmed on the other {(half.q_difference < 0.05).sum()}")  # fmt: skip

# %% [markdown]
# ## What it says
#
# - How much attention the question loses hardly depends on what is inserted: the log-ratio is −0.505 (a repeated
#   word) to −0.576 (random tokens), and −0.523 with slashes. A head with uniform attention loses more than any of them,
#   −0.903.
# - Masked tokens change it by +0.018, so distance hardly matters here. Masked and unshifted together are the baseline,
#   +0.000, as they must be. A control that must give 0, and does, is a test of the measurement.
# - The interval of the largest of 32 heads, reported on the prompts that it was chosen on, excludes 0 in 60.8 % of runs
#   without any effect; reported on the other half it does so in 4.6 %, close to its nominal rate.
# - Two draws of sentences differ in 0 heads. A sentence and its shuffled words differ in 0 too, so there is no evidence
#   for an effect of grammar. Sentence and slashes differ in 27 heads that one half finds, and 27 of these are confirmed
#   on the other.
