"""How much memory a row of a forward pass takes, and how many rows fit."""

from __future__ import annotations

from collections.abc import Sequence

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

    return _BYTES * int(length * numbers_of_token + logits)


def _of_mlp(model: HookedModel) -> int:
    """The numbers that an MLP keeps for a token; four times d_model wide if the model doesn't
    say."""
    width = getattr(model.cfg, "d_mlp", 0) or 4 * model.cfg.d_model
    return 4 * width


def prompt_bytes(model: HookedModel, target: PatchTarget, pair: Pair) -> int:
    """What a prompt takes while it is patched, beside its patched copies: three runs' outputs, as
    much to replace them, and the streams at which passes start or the gradients.

    Args:
        model: The hooked model.
        target: What is patched; a row of a pattern is as wide as the prompt is long.
        pair: The prompt's pair.

    Returns:
        Bytes.
    """
    cfg = model.cfg
    width_of_head = pair.length if target.part == "pattern" else cfg.d_head
    width = max(cfg.d_model, cfg.n_heads * width_of_head)
    return _BYTES * int(7 * pair.length * len(target.layers) * width)


def edges_row_bytes(model: HookedModel, graph: Graph, pair: Pair) -> int:
    """What a row of a pass with replaced edges takes: the steps of all writers, and the inputs of a
    layer's heads.
    """
    cfg = model.cfg
    steps_and_inputs = len(graph.writers) + 4 * cfg.n_heads
    return row_bytes(model, pair, cfg.d_model * steps_and_inputs)


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


def check_edges_fit(model: HookedModel, graph: Graph, pairs: Sequence[Pair], budget: int) -> None:
    """Refuse a graph if one row of the longest pair's passes does not fit."""
    longest = max(pairs, key=lambda pair: pair.length)

    row = max(gradients_row_bytes(model, graph, longest), edges_row_bytes(model, graph, longest))
    needed = edges_fixed_bytes(model, graph, longest) + row
    if needed > budget:
        raise OptionError(
            f"the {int(graph.exists.sum()):,} edges of {model.cfg.model_name} need about "
            f"{needed / 2**30:.2g} GiB for a prompt of {longest.length:,} tokens, more than"
            " memory=…: give more, or shorter prompts"
        )
