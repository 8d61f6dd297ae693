# %% [markdown]
# # Gallery
#
# Every figure and view of mechattn, each below the line that makes it. Most come from the runs in the next cell:
# `toy:llama`, a toy of 1.0 M parameters, on twelve word problems, with and without inserted tokens. Nothing here is a
# finding about large models, and with so few prompts the intervals are wide.

# %%
import mechattn as ma
from tests.known_answers.known_circuits import known_circuits

model = ma.load_model("toy:llama")
prompts = ma.load_prompts("word-problems", limit=12)
slash = ma.MeaninglessTokens("/", count=55)
conditions = {
    "slash": slash,
    "masked": slash.masked(),
    "unshifted": slash.unshifted(),
    "sentence": ma.RandomSentence(count=55),
    "arm": ma.Baseline(intervention=ma.interventions.ARM()),
}
analyses = [
    ma.ReceivedAttention(),
    ma.analyses.AttentionBudget(),
    ma.analyses.AffineShift(),
    ma.analyses.AttentionFocus(per_query=True),
    ma.analyses.AttentionSinks(),
    ma.analyses.HeadUpdates(per_query=True),
    ma.analyses.MlpActivations(),
]
result = ma.run(model, prompts, conditions, analyses, keep="prompts")

# %% [markdown]
# ## How much attention does the question lose?
#
# The answer in one sentence, next to what uniform attention would give:

# %%
print(ma.render.verdict_words(result, "slash"))

# %% [markdown]
# Who pays for the attention to the inserted tokens, and why?

# %%
ma.render.attention_budget(result, ["slash", "sentence"])

# %% [markdown]
# At which tokens do these heads lose attention?

# %%
ma.render.received_attention(result, layer=0, top=3, condition="slash")

# %% [markdown]
# Which heads change by more, or by less, than a head with uniform attention?

# %%
ma.render.change_map(result, "slash", "received")

# %% [markdown]
# Do the heads of other layers change in the same way?

# %%
ma.render.received_attention(result, layer=[0, 1, 2], heads=[1], condition="slash")

# %% [markdown]
# Do meaningless tokens act differently from a sentence of the same length?

# %%
ma.render.received_by_model(result, layer=0, heads=1)

# %% [markdown]
# Is it dilution (attention taken) or distance (tokens moved apart)?

# %%
ma.render.changes(result, ["slash", "masked", "unshifted", "sentence"])

# %% [markdown]
# Is it so in other models?

# %%
other = ma.run("toy:qwen2", prompts, {"slash": slash})
ma.render.verdicts([result, other], "slash")

# %% [markdown]
# Does the effect grow with the number of inserted tokens?

# %%
counts = ma.sweep(slash, count=[10, 25, 55])
ma.render.changes(ma.run(model, prompts, counts), over="count")

# %% [markdown]
# ## What happens in one prompt?
#
# Where does each token look?

# %%
ma.pattern(model, "Tom has 3 apples. How many?", layer=0, heads=[1, 2, 3])

# %% [markdown]
# Between which tokens does attention change?

# %%
ma.pattern(model, "Tom has 3 apples. How many?", 0, [1, 2, 3], slash, difference=True)

# %% [markdown]
# Which words receive attention, without and with the inserted tokens?

# %%
ma.render.received_text(result, layer=0, condition="slash")

# %% [markdown]
# Each of these runs the model on one prompt. A result that holds attention maps gives the same views without a new run:

# %%
five = {"slash": ma.MeaninglessTokens("/", count=5)}
text = "Tom has 3 apples."
one = ma.run("toy:falcon", text, five, ma.analyses.AttentionMap())

# %%
ma.render.pattern(one, layer=0, heads=[0, 1])

# %%
ma.render.pattern(one, layer=0, heads=[0, 1], condition="slash", difference=True)

# %% [markdown]
# ## Is a head's output only scaled and shifted?
#
# How large is λ in each head, and what does the affine form miss?

# %%
ma.render.scale_by_layer(result, "slash")

# %% [markdown]
# Does every query get the same shift, up to its length?

# %%
ma.render.by_layer(result, "shift_rank_one_share", conditions=["slash", "sentence"])

# %% [markdown]
# ## What do heads look at?
#
# How do the heads of each layer differ in how far back they look?

# %%
ma.render.heads_by_layer(result, "distance", conditions=["baseline", "slash"])

# %% [markdown]
# Do the inserted tokens become an attention sink?

# %%
ma.render.by_layer(result, "span_mass", conditions=["slash", "sentence"])

# %% [markdown]
# ## What do heads write?
#
# How large are the updates that heads add to the residual stream?

# %%
ma.render.update_histogram(result)

# %% [markdown]
# Do heads add something new, or do they strengthen or erase what is already there?

# %%
ma.render.update_map(result, "slash")

# %% [markdown]
# Does a head write nothing where it looks at the first token? (A figure for real models: in a toy few heads do so.)

# %%
ma.render.focus_and_impact(result)

# %% [markdown]
# At which positions do heads write most?

# %%
ma.render.update_by_position(result)

# %% [markdown]
# ## What happens to MLP activations?
#
# Does the distribution of activations change?

# %%
ma.render.activation_histogram(result, ["slash", "arm"])

# %% [markdown]
# Do activations become sparser or denser than in the baseline?

# %%
ma.render.activation_metrics(result, ["slash", "sentence", "arm"])

# %% [markdown]
# At which kinds of token are activations near zero?

# %%
ma.render.near_zero_by_class(result, ["slash", "arm"])

# %% [markdown]
# Do two conditions move activations in the same direction?

# %%
ma.render.agreement(result, "slash", ["unshifted", "sentence", "arm"])

# %% [markdown]
# ## Do the answers change?
#
# The figures of this part show `toy:qwen2` (1.0 M parameters), whose answers suffer more from inserted tokens.

# %%
solver, problems = ma.load_model("toy:qwen2"), ma.load_prompts("word-problems", limit=16)
counted = ma.evaluate(solver, problems, counts, new_tokens=60)

# %% [markdown]
# How many answers are right in each condition?

# %%
ma.render.accuracy({"toy:qwen2": counted.accuracy()})

# %% [markdown]
# How does accuracy change with the number of inserted tokens?

# %%
ma.render.accuracy({"toy:qwen2": counted.accuracy()}, "count")

# %% [markdown]
# Do accuracy and attention change together?

# %%
dose = ma.run(solver, problems, counts)
ma.render.dose_curves(counted.accuracy(), dose)

# %% [markdown]
# How much do several sampled answers to each problem gain?

# %%
sampled = ma.evaluate(
    solver, prompts[:8], {"slash": slash}, samples=4, temperature=1.5, new_tokens=60
)

# %%
ma.render.by_samples({"pass@k": sampled.pass_at_k([1, 2, 4])}, "toy:qwen2")

# %% [markdown]
# Does the model look elsewhere while it writes a wrong answer?

# %%
answers = ma.while_answering(solver, counted, problems, counts)
ma.render.while_answering(answers)

# %% [markdown]
# Which heads carry the effect on the answer? Each head's output is [patched](how-to/which-heads.md) with what it is in
# the run without inserted tokens.

# %%
answered = ma.load_prompts("word-problems", limit=4, with_answer=True)
patched = ma.patch(solver, answered, slash, method="attribution", direction="denoising")
ma.render.patching_map(patched)

# %% [markdown]
# Is the largest effect larger than that of a random direction, or of another prompt's output?

# %%
ma.render.patching_effects(patched, top=6)

# %% [markdown]
# Through which edges does it pass? Between two versions of a prompt, [edges](how-to/which-circuit.md) are ranked on one
# half of the pairs; the other half says what the first of them carry alone. The circuit here was written by hand.

# %%
known = known_circuits()[0]
circuit = ma.circuit(known.model(), known.prompts(12, 0), ma.conditions.Counterpart())
ma.render.circuit_map(circuit, size=8)

# %% [markdown]
# ## Everything in one page
#
# Which head is worth a closer look? Click on any. `result.page("llama.html")` writes the same to a file.

# %%
some = [ma.ReceivedAttention(), ma.analyses.AttentionFocus()]
few = ma.run(model, prompts, {"slash": slash}, some, keep="prompts")

# %%
ma.browse(few)

# %% [markdown]
# ## For a paper
#
# What does a figure look like in a column of a paper? 85 or 170 mm wide, with 8-point text, in the colours of Okabe
# and Ito. `ma.render.write_image(figure, "figure-1.pdf", "single")` writes it as PDF, SVG or PNG.

# %%
figure = ma.render.changes(result, ["slash", "masked", "unshifted", "sentence"])
ma.render.for_paper(figure, column="single")

# %% [markdown]
# What does its caption say? Its title, its small print and its sentence.

# %%
print(ma.render.caption(figure))

# %% [markdown]
# Which numbers does it show? Any figure gives them as a table, for a CSV file.

# %%
ma.render.figure_table(figure)
