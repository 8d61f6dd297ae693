"""Whether a hook holds a block's update is decided for each prompt by itself."""

import torch

from mechattn.analysis.block_updates import _update


def test_another_prompt_of_the_batch_decides_nothing():
    """The hook of the first prompt holds its updates, that of the second (as of BLOOM) the new stream."""
    generator = torch.Generator().manual_seed(0)
    before, update = torch.randn(2, 2, 5, 8, generator=generator)
    after = before + update
    out = torch.stack([update[0] + 1e-4, after[1]])
    real = torch.ones(2, 5, dtype=torch.bool)
    together = _update(before, out, after, real, 1e-7)
    for row in range(2):
        one = slice(row, row + 1)
        alone = _update(before[one], out[one], after[one], real[one], 1e-7)
        torch.testing.assert_close(together[one], alone, rtol=0, atol=0)
    assert torch.equal(together[0], out[0]), "not the difference"
    assert torch.equal(together[1], after[1] - before[1]), "not the hook"
