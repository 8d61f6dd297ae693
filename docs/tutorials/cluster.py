# %% [markdown]
# # From a notebook to a cluster
#
# What works in a notebook also runs from a file, on another machine, or in parts, without changes to the analysis. On
# `toy:llama`, a toy of 1.0 M parameters.
#
# ## In a notebook

# %%
from pathlib import Path

import xarray as xr

import mechattn as ma
from mechattn.commands.run_config import run_from_config

prompts = ma.load_prompts("word-problems", limit=12)
conditions = {"slash": ma.MeaninglessTokens("/", count=55)}
in_notebook = ma.run("toy:llama", prompts, conditions, seed=0)
print(ma.render.verdict_words(in_notebook))

# %% [markdown]
# ## As a file
#
# The same run, written as a config. A config is checked before any model is loaded. A misspelt key is refused with the
# keys that exist.

# %%
config = """
model = "toy:llama"  # or "Qwen/Qwen2.5-Math-7B"
seed = 0
chunk = 3  # prompts that are computed, and kept, together

[prompts]
source = "word-problems"
limit = 12

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
# On the command line, type `mechattn run slash.toml`; this is what that command calls.

# %%
written = run_from_config(Path("slash.toml"))
print(*[path.name for path in written])

# %% [markdown]
# A result is a folder in Zarr format, written completely or not at all. It opens with this library and without it.

# %%
from_file = ma.load_result("slash.zarr")
received = from_file["received_attention"].received_by_segment
difference = abs(received - in_notebook["received_attention"].received_by_segment).max()
print(f"largest difference from the notebook's numbers: {float(difference):.0e}")
tree = xr.open_datatree("slash.zarr", engine="zarr", consolidated=False)
print(f"without this library: {sorted(tree.children)}")
for key in ("model", "seed", "engine", "prompts"):
    print(f"{key}: {from_file.provenance[key]}")

# %% [markdown]
# ## In parts
#
# The same file on two machines, each computing half of the prompts. Chunks of three prompts are stored as they finish,
# so a run that is killed resumes with the same command. On the command line:
#
# ```sh
# mechattn run slash.toml --shard 1/2   # on the first machine: slash-1-of-2.zarr
# mechattn run slash.toml --shard 2/2   # on the second: slash-2-of-2.zarr
# mechattn merge whole.zarr slash-1-of-2.zarr slash-2-of-2.zarr
# ```

# %%
parts = [run_from_config(Path("slash.toml"), shard=shard)[0] for shard in ("1/2", "2/2")]
whole = ma.merge_results([ma.load_result(part) for part in parts])
for part in parts:
    print(f"{part.name}: {ma.load_result(part)['received_attention'].sizes['prompt']} prompts")
merged = whole["received_attention"].received_by_segment
print(
    f"merged: {merged.sizes['prompt']} prompts, the same numbers to the bit: {merged.equals(received)}"
)
print(ma.render.verdict_words(whole))

# %% [markdown]
# Each prompt's own values are those of the whole run. Where a mean over prompts was stored instead of each prompt's
# values, the moments (n, mean, M2) are merged. Comparisons use each prompt's values, so they don't change.
#
# ## On a cluster
#
# The same again, with [Ray](https://www.ray.io) distributing the chunks (`pip install "mechattn[ray]"`). Without an
# address, a cluster is started on this machine. This page does not run it; the tests do (`tests/distributed`).
#
# ```sh
# mechattn run slash.toml --executor ray --address auto --workers 16
# ```
#
# From Python: `ma.run_job(ma.Job("toy:llama", prompts, conditions), "slash.zarr", executor="ray")`.

# %% [markdown]
# ## What it says
#
# One config and one seed give bit-identical numbers, in one piece or in parts, if chunks and threads are the same. So
# anyone who has the config can check a number in a paper. Other batches, as in the notebook above, differ by rounding,
# here below 1e-06 in a probability.
#
# Before a long run, do three things: fix the heads or use `select="half"`, name the controls in the config, and set
# `seed`.
