# %% [markdown]
# # Which heads carry the effect
#
# With fifty-five slashes before the question, `toy:qwen2` gets about a quarter fewer answers right. Attention changes
# in every head. Which of these changes does the harm? [Patching](../how-to/which-heads.md) replaces a head's output in
# the run with slashes by that from the run without them, and measures the effect on the answer. The model is a toy of
# 1.0 M parameters: this page shows the method, not a fact about large models.

# %%
import mechattn as ma

model = ma.load_model("toy:qwen2")
slash = ma.MeaninglessTokens("/", count=55)
problems = ma.load_prompts("word-problems", limit=60)
evaluation = ma.evaluate(model, problems, {"slash": slash}, new_tokens=90)
right = evaluation.accuracy().set_index("condition")[["accuracy", "low", "high"]]
print((100 * right).round(1))  # percent of the answers, with 95 % intervals

# %% [markdown]
# ## In which layer does the effect arise?
#
# At every original token, the residual stream after a layer is replaced by that of the run without slashes. The metric
# is the log-probability of the reference answer. The most that can be regained is the whole effect.

# %%
answered = ma.load_prompts("word-problems", limit=24, with_answer=True)
print(ma.patch(model, answered, slash, at="resid_post", direction="denoising"))

# %% [markdown]
# Everything is decided after layer 0: with the other run's stream there, the answer is back. So look at the eight heads
# of layer 0, in both directions: into the run with slashes ("denoising": what suffices?), and
# into the run without ("noising": what is necessary?).

# %%
first = [(0, head) for head in range(8)]
back = ma.patch(model, answered, slash, at=first, direction="denoising")
print(back)

# %%
away = ma.patch(model, answered, slash, at=first, direction="noising")
print(
    away.table(top=8)[["head", "effect", "effect_low", "effect_high", "q_effect"]]
    .round(3)
    .to_string(index=False)
)

# %% [markdown]
# Heads 2 and 3 stand out in a strange way: restoring *either* of them makes the answer worse, not better. The
# later layers read what both write together. With one restored and the other not, they read a stream that never occurs
# otherwise. Such heads have no effect of their own that could be measured. Patch them as one set:

# %%
two = ["L0H2", "L0H3"]
pair = ma.patch(model, answered, slash, at=two, together=True, direction="denoising")
print(pair)

# %% [markdown]
# ## What do they read?
#
# With `Sites("pattern")` only *where* the two heads attend is restored: nothing to the slashes, and to the question as
# in the run without slashes. In the other direction the two attend to the question as they would with slashes, but
# there are none to read.

# %%
where = ma.Sites("pattern", two)
looking = ma.patch(model, answered, slash, at=where, together=True, direction="denoising")
print(looking)

# %%
moved = ma.patch(model, answered, slash, at=where, together=True, direction="noising")
print(moved)

# %%
flow = ma.run(model, problems, {"slash": slash}, ma.analyses.SegmentFlow(), layers=[0])[
    "segment_flow"
]
to_slash = flow.flow.sel(
    condition="slash", layer=0, segment="question", to_segment="inserted"
).mean("prompt")
print({int(head): round(float(to_slash.sel(head=head)), 2) for head in to_slash["head"].values})

# %% [markdown]
# ## Where does the model attend while it goes wrong?

# %%
answers = ma.while_answering(model, evaluation, problems, {"slash": slash})
ma.render.while_answering(answers)

# %%
print(answers)

# %% [markdown]
# ## What it says
#
# - With 55 slashes 71.7 % of the answers are right, without them 96.7 %.
# - The whole effect arises in layer 0: the stream after that layer restores 1.0 of it.
# - Two of its eight heads matter. Restored alone they make the answer worse, by 1.8 nats (head 2) and 4.3 nats (head
#   3); restored together they bring back 0.99 of the effect.
# - Restoring where the two attend is enough: their patterns alone bring back as much. How they divide their attention
#   among the tokens of the prompt is not what does the harm: without slashes it changes the answer by 0.00 nats. So the
#   harm comes from what they read *from* the slashes, to which they give 0.48 and 0.57 of the question's attention, and
#   not from what they no longer read.
# - While the model answers, attention does not distinguish right from wrong answers of the same length (p = 0.96).
#
# Had we patched heads only one at a time, as is usual, the two would have seemed to protect the answer. And mind the
# intervals: with 24 prompts the whole effect is large in a few of them and small in the others.
