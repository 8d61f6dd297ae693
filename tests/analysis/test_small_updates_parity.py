"""Updates that are small beside the residual stream are what the blocks give, not a difference of streams."""

import numpy as np
import torch

import mechattn as ma
from tests.analysis.plain import SHORT, seen_in
from tests.tiny_families import bridge_of, tiny_model

SLASH = ma.MeaninglessTokens("/", 20)


def test_small_updates_of_a_large_stream_are_what_blocks_give():
    """In bfloat16, where the difference of the streams is mostly rounding."""
    plain, same = (tiny_model("Llama") for _ in range(2))
    for native in (plain, same):
        with torch.no_grad():
            native.model.embed_tokens.weight *= 10000
        native.bfloat16()
    model = bridge_of(same, verify=False)
    ids = SLASH.apply(SHORT, model).tokens.tolist()
    layer = plain.model.layers[0]
    into = {"before": layer, "middle": layer.post_attention_layernorm}
    seen = seen_in(plain, ids, into, {"attention": layer.self_attn})[0]
    expected = np.linalg.norm(seen["attention"], axis=-1)
    difference = np.linalg.norm(seen["middle"] - seen["before"], axis=-1)
    assert np.median(abs(difference / expected - 1)) > 0.05, "negative control"

    analysis = ma.analyses.BlockUpdates(per_query=True)
    result = ma.run(model, SHORT, {"slash": SLASH}, analysis, keep="prompts")
    cell = dict(condition="slash", layer=0, block="attention")
    of_block = result["block_updates"].sel(cell).isel(prompt=0)
    magnitude = of_block.block_magnitude_at_per_prompt.values[: len(ids)]
    stream = np.linalg.norm(seen["before"], axis=-1)
    np.testing.assert_allclose(magnitude, expected / stream, rtol=0.02)
