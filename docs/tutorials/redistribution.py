"""From a model to a conclusion: what 55 meaningless tokens before the question do to attention.

python docs/tutorials/redistribution.py            # writes out/redistribution.html
"""

from pathlib import Path

import mechattn as ma

model = ma.load_model("toy:llama")  # or "Qwen/Qwen2.5-Math-7B"; verified against its own attention
system = "Solve the problem step by step. End with the word Answer and the number."
prompts = ma.load_prompts("word-problems", limit=64, system=system)

slash = ma.MeaninglessTokens("/", count=55)
conditions = {
    "slash": slash,
    "sentence": ma.RandomSentence(count=55),  # the control: a sentence of the same length, drawn for each prompt
    "masked": slash.masked(),  # moved apart, no attention taken
    "unshifted": slash.unshifted(),  # attention taken, nothing moved
}
result = ma.run(model, prompts, conditions, [ma.ReceivedAttention(), ma.AffineShift()], positions="prompts")

# 1. Question tokens receive less. Less than a head that is blind to content would leave them?
print(ma.render.verdict_words(result, "slash"))

# 2. Which heads? Found on one half of the prompts, reported on the other.
heads = result.compare("slash", quantity="received", select="half")
print(heads[["layer", "head", "difference", "low", "high", "null", "q"]].head().round(3).to_string(index=False))

# 3. Is it the slashes, or anything of that length? Against the matched control.
against = result.compare("slash", to="sentence", quantity="received")
print(f"slash against sentence: {(against.q < 0.05).sum()} of {len(against)} heads differ")

# 4. Dilution, or distance? The 2 × 2, in layer 0.
error = result["affine_shift"].relative_error.sel(segment="question", layer=0).mean(("prompt", "head"))
print(f"missed by λ · output + Σσ: {float(error.sel(condition='slash')):.3f}; with kept positions: "
      f"{float(error.sel(condition='unshifted')):.5f}")  # fmt: skip

figure = ma.render.two_by_two(result, ["slash", "masked", "unshifted", "sentence"])
Path("out").mkdir(exist_ok=True)
figure.write_html("out/redistribution.html", include_plotlyjs=True)
