# %% [markdown]
# # From a notebook to a cluster
#
# What works in a notebook runs as a file, on another machine, in parts. Nothing of the analysis changes. On
# `toy:llama`, a toy of 1.0 M parameters.
#
# ## In a notebook

# %%
from pathlib import Path

import xarray as xr

import mechattn as ma
from mechattn.from_config import run_from_config

prompts = ma.load_prompts("word-problems", limit=24)
conditions = {"slash": ma.MeaninglessTokens("/", count=55)}
in_notebook = ma.run("toy:llama", prompts, conditions, seed=0)
print(ma.render.verdict_words(in_notebook))

# %% [markdown]
# ## As a file
#
# The same run, written down. A config is checked before any model is loaded; a misspelt key is refused with the keys
# that there are.

# %%
config = """
model = "toy:llama"  # or "Qwen/Qwen2.5-Math-7B"
seed = 0

[prompts]
source = "word-problems"
limit = 24

[conditions.slash]
text = "/"
count = 55

[[analyses]]
kind = "ReceivedAttention"

[output]
result = "slash.zarr"
"""
Path("slash.toml").write_text(config)

# %% [markdown]
# On the command line it is `mechattn run slash.toml`; this is what that command calls.

# %%
written = run_from_config(Path("slash.toml"))
print(*[path.name for path in written])

# %% [markdown]
# A result is a folder in Zarr format, written whole or not at all. It opens with this library, and without it.

# %%
from_file = ma.load_result("slash.zarr")
received = from_file["received_attention"].received_by_segment
same = received.equals(in_notebook["received_attention"].received_by_segment)
print(f"the same numbers, to the bit: {same}")
tree = xr.open_datatree("slash.zarr", engine="zarr", consolidated=False)
print(f"without this library: {sorted(tree.children)}")
for key in ("model", "seed", "engine", "prompts"):
    print(f"{key}: {from_file.provenance[key]}")

# %% [markdown]
# ## What it says
#
# One config, one seed, the same bytes: with the same number of threads a run can be repeated exactly, so a number in
# a paper can be checked by whoever has the config. Another batching or thread count differs by rounding, below 2e-6
# in a probability.
#
# Before a long run, three things: fix the heads or use `select="half"`, name the controls in the config, and set
# `seed`.
