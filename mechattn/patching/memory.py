"""How much memory a row of a pass takes, so that as many rows go together as a budget allows."""

from __future__ import annotations

from mechattn.errors import OptionError
from mechattn.model.hooked import HookedModel
from mechattn.patching.graph import Graph
from mechattn.patching.pairs import Pair
from mechattn.patching.sites import Target
from mechattn.results.result import memory_bytes

_BYTES = 4  # of a number; half precision is counted as if it were whole
_OF_SUMS = 8  # gradients and scores are summed in float64


def pass_bytes(model: HookedModel, length: int, answer: int) -> int:
    """What a row of a forward pass takes beside its inputs: a layer at work, and logits before the
    answer.
    """
    cfg = model.cfg
    heads = int(cfg.n_heads)
    stream = 8 * int(cfg.d_model)
    attention = 6 * heads * int(cfg.d_head) + 3 * heads * length
    logits = 4 * answer * int(cfg.d_vocab)
    return _BYTES * (length * (stream + attention + _mlp(model)) + logits)


def prompt_bytes(model: HookedModel, target: Target, pair: Pair) -> int:
    """What a prompt takes while it is patched, beside its patched copies: three runs' outputs, as
    much to replace them, and a pass that reads them.
    """
    length = len(pair.base)
    width_of_head = length if target.part == "pattern" else int(model.cfg.d_head)
    width = max(int(model.cfg.d_model), int(model.cfg.n_heads) * width_of_head)
    kept = 6 * _BYTES * length * len(target.layers) * width
    return kept + pass_bytes(model, length, len(pair.answer))


def edges_row_bytes(model: HookedModel, graph: Graph, pair: Pair) -> int:
    """What a row of a pass with replaced edges takes: the steps of all writers, and the inputs of a
    layer's heads.
    """
    length = len(pair.base)
    inputs = 4 * int(model.cfg.n_heads)
    steps = _BYTES * length * int(model.cfg.d_model) * (len(graph.writers) + inputs)
    return steps + pass_bytes(model, length, len(pair.answer))


def paths_row_bytes(model: HookedModel, pair: Pair) -> int:
    """What a row of a path's passes takes: what all layers' receivers get, and a pass."""
    cfg = model.cfg
    length = len(pair.base)
    received = 3 * int(cfg.n_layers) * int(cfg.n_heads) * int(cfg.d_head)
    return _BYTES * length * received + pass_bytes(model, length, len(pair.answer))


def gradients_row_bytes(model: HookedModel, graph: Graph, pair: Pair) -> int:
    """What a row of a pass takes that keeps all layers for the gradients of what readers read."""
    cfg = model.cfg
    length = len(pair.base)
    width = int(cfg.d_model)
    heads = int(cfg.n_heads)
    kept_of_layer = 4 * width + _mlp(model) + 6 * heads * int(cfg.d_head) + 4 * heads * length
    of_gradients = 2 * width * len(graph.readers) + int(cfg.n_layers) * kept_of_layer
    return _BYTES * length * of_gradients + pass_bytes(model, length, len(pair.answer))


def edges_fixed_bytes(model: HookedModel, graph: Graph, pair: Pair) -> int:
    """What a pair's edges take whatever the rows: two runs' outputs, two steps, sums of
    gradients."""
    written = 3 * _BYTES * len(graph.writers)
    steps = 2 * _OF_SUMS * len(graph.writers)
    gradients = _OF_SUMS * len(graph.readers)
    return pair.length * int(model.cfg.d_model) * (written + steps + gradients)


def rows_within(budget: int, row: int) -> int:
    """As many rows as fit in a budget, at least one."""
    return max(1, budget // row)


def check_edges_fit(model: HookedModel, graph: Graph, pairs: list[Pair], memory: str) -> int:
    """The budget in bytes, refused if one row of the longest pair's passes does not fit."""
    budget = memory_bytes(memory)
    longest = max(pairs, key=lambda pair: pair.length)
    gradients = gradients_row_bytes(model, graph, longest)
    row = max(gradients, edges_row_bytes(model, graph, longest))
    needed = edges_fixed_bytes(model, graph, longest) + row
    if needed > budget:
        raise OptionError(
            f"the {int(graph.exists.sum()):,} edges of {model.cfg.model_name} need about "
            f"{needed / 2**30:.2g} GiB for a prompt of {longest.length:,} tokens, and "
            f'memory="{memory}": give more, or shorter prompts'
        )
    return budget


def _mlp(model: HookedModel) -> int:
    """The numbers that an MLP keeps for a token."""
    return 4 * int(getattr(model.cfg, "d_mlp", 0) or 4 * int(model.cfg.d_model))
