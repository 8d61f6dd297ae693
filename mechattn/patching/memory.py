"""How much memory a row of a pass takes, so that as many rows go together as a budget allows."""

from __future__ import annotations

from mechattn.errors import OptionError
from mechattn.model.hooked import HookedModel
from mechattn.patching.graph import Graph
from mechattn.patching.pairs import Pair
from mechattn.patching.sites import PatchTarget

_BYTES = 4  # of a number; half precision is counted as if it were whole
_OF_SUMS = 8  # gradients and scores are summed in float64


def rows_within(budget: int, row: int) -> int:
    """As many rows as fit in a budget, at least one."""
    return max(1, budget // row)


def row_bytes(model: HookedModel, pair: Pair, beside: int = 0) -> int:
    """What a row of a forward pass takes: a layer at work, and logits before the answer.

    ``4 · (tokens · (8 d_model + heads · (6 d_head + 3 tokens) + MLP + beside) + logits)``

    Args:
        model: The hooked model.
        pair: The pair whose base run is patched.
        beside: Further numbers that are kept for each token.

    Returns:
        Bytes.
    """
    cfg = model.cfg
    length = len(pair.base)

    attention = cfg.n_heads * (6 * cfg.d_head + 3 * length)
    numbers_of_token = 8 * cfg.d_model + attention + _of_mlp(model) + beside
    logits = 4 * len(pair.answer) * cfg.d_vocab

    numbers = length * numbers_of_token + logits
    return _BYTES * int(numbers)


def _of_mlp(model: HookedModel) -> int:
    """The numbers that an MLP keeps for a token; four times d_model wide if the model doesn't say."""
    width = getattr(model.cfg, "d_mlp", 0) or 4 * model.cfg.d_model
    return 4 * width


def prompt_bytes(model: HookedModel, target: PatchTarget, pair: Pair) -> int:
    """What a prompt takes while it is patched, beside its patched copies: three runs' outputs, as much to
    replace them, and the streams at which passes start or the gradients.

    Args:
        model: The hooked model.
        target: What is patched; a row of a pattern is as wide as the prompt is long.
        pair: The prompt's pair.

    Returns:
        Bytes.
    """
    cfg = model.cfg
    length = pair.length
    layer_count = len(target.layers)

    width_of_head = length if target.part == "pattern" else cfg.d_head
    width = max(cfg.d_model, cfg.n_heads * width_of_head)
    return _BYTES * int(7 * length * layer_count * width)


def paths_row_bytes(model: HookedModel, pair: Pair) -> int:
    """What a row of a path's passes takes: what all layers' receivers get, and a pass."""
    cfg = model.cfg
    of_receivers = 3 * cfg.n_layers * cfg.n_heads * cfg.d_head
    return row_bytes(model, pair, of_receivers)


def edges_row_bytes(model: HookedModel, graph: Graph, pair: Pair) -> int:
    """What a row of a pass with replaced edges takes: the steps of all writers, and the inputs of a
    layer's heads.
    """
    cfg = model.cfg
    steps = len(graph.writers)
    inputs = 4 * cfg.n_heads
    return row_bytes(model, pair, cfg.d_model * (steps + inputs))


def gradients_row_bytes(model: HookedModel, graph: Graph, pair: Pair) -> int:
    """What a row of a pass takes that keeps all layers for the gradients of what readers read."""
    cfg = model.cfg
    attention = cfg.n_heads * (6 * cfg.d_head + 4 * len(pair.base))
    of_layer = 4 * cfg.d_model + _of_mlp(model) + attention
    of_readers = 2 * cfg.d_model * len(graph.readers)
    return row_bytes(model, pair, of_readers + cfg.n_layers * of_layer)


def edges_fixed_bytes(model: HookedModel, graph: Graph, pair: Pair) -> int:
    """What a pair's edges take whatever the rows: outputs of two runs and exchanged ones, two steps
    while one is scaled to the other, sums of gradients."""
    of_writer = 3 * _BYTES + 4 * _OF_SUMS
    of_token = len(graph.writers) * of_writer + len(graph.readers) * _OF_SUMS
    return int(pair.length * model.cfg.d_model * of_token)


def check_edges_fit(model: HookedModel, graph: Graph, pairs: list[Pair], budget: int) -> None:
    """Refuse a graph if one row of the longest pair's passes does not fit."""
    longest = max(pairs, key=lambda pair: pair.length)

    row_with_gradients = gradients_row_bytes(model, graph, longest)
    row_with_replaced_edges = edges_row_bytes(model, graph, longest)
    row = max(row_with_gradients, row_with_replaced_edges)

    needed = edges_fixed_bytes(model, graph, longest) + row
    if needed > budget:
        raise OptionError(
            f"the {int(graph.exists.sum()):,} edges of {model.cfg.model_name} need about "
            f"{needed / 2**30:.2g} GiB for a prompt of {longest.length:,} tokens, more than memory=…:"
            " give more, or shorter prompts"
        )
