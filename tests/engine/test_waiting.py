"""How often a pass asks a tensor for its value, which on a GPU waits for all that is queued: not once a layer."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mechattn as ma
from mechattn.analysis import ANALYSES

ASKS = {torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.is_nonzero}
# The first reads numbers of each layer's tokens; the second is undefined under RoPE.
LEFT_OUT = (ma.analyses.MlpActivations, ma.analyses.ScoreDecomposition)


class Asked(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.times = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in ASKS:
            self.times[str(func)] += 1
        return func(*args, **(kwargs or {}))


def asked(model, prompts, analyses, layers):
    conditions = {"slash": ma.MeaninglessTokens("/", 20)}
    with Asked() as found:
        ma.run(model, prompts, conditions, analyses, layers=layers)
    return found.times


def test_waiting_does_not_grow_with_layers(toy):
    """All analyses in one pass."""
    prompts = ma.load_prompts("word-problems", limit=2)
    analyses = [make() for make in ANALYSES if make not in LEFT_OUT]
    for layers in ([3], [0, 1, 2, 3]):
        asked(toy, prompts, analyses, layers)  # what is asked once of these layers of a model
    assert asked(toy, prompts, analyses, [3]) == asked(toy, prompts, analyses, [0, 1, 2, 3])


def test_the_count_would_notice_a_layer_that_waits(toy, monkeypatch):
    values = ma.ReceivedAttention.values

    def waiting(self, sums, batch, window):
        assert batch.real.any()
        return values(self, sums, batch, window)

    monkeypatch.setattr(ma.ReceivedAttention, "values", waiting)
    prompts = ma.load_prompts("word-problems", limit=2)
    one, four = (
        asked(toy, prompts, [ma.ReceivedAttention()], layers) for layers in ([3], [0, 1, 2, 3])
    )
    assert sum(four.values()) >= sum(one.values()) + 3
