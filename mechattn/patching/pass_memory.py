"""The memory that a row of a forward pass takes, and the number of rows that fit."""

from __future__ import annotations

from collections.abc import Sequence

from mechattn.errors import OptionError
from mechattn.model.hooked import HookedModel
from mechattn.patching.graph import Graph
from mechattn.patching.pairs import Pair
from mechattn.patching.sites import PatchTarget

_BYTES = 4  # of a number in float32; half precision is counted as float32
_OF_SUMS = 8  # of a number in float64, in which gradients and scores are summed


def rows_within(budget: int, row: int) -> int:
    """The number of rows that fit in a budget, at least one.

    Args:
        budget: The memory in bytes.
        row: The bytes that a row takes.
    """
    return max(1, budget // row)


def row_bytes(model: HookedModel, pair: Pair, further_values: int = 0) -> int:
    """The bytes that a row of a forward pass takes in the layer at work and for the logits.

    ``4 · (tokens · (8 d_model + heads · (6 d_head + 3 tokens) + 4 d_mlp + further_values)
    + 4 answer · d_vocab)``

    Args:
        model: The hooked model.
        pair: The pair whose base run is patched.
        further_values: The number of further values that are kept for each token.
    """
    cfg = model.cfg
    length = len(pair.base)

    attention = cfg.n_heads * (6 * cfg.d_head + 3 * length)
    token_values = 8 * cfg.d_model + attention + _mlp_values(model) + further_values
    logits = 4 * len(pair.answer) * cfg.d_vocab

    return _BYTES * int(length * token_values + logits)


def prompt_bytes(model: HookedModel, target: PatchTarget, pair: Pair) -> int:
    """The bytes that a prompt takes while it is patched, besides its patched copies.

    They are those of seven times the outputs of its layers: three runs' outputs, three sets of
    replacements, and the residual streams at which passes start, or the gradients.

    Args:
        model: The hooked model.
        target: What is patched.
        pair: The prompt's pair.
    """
    cfg = model.cfg
    # A row of a pattern has a number for each token.
    width_of_head = pair.length if target.part == "pattern" else cfg.d_head
    width = max(cfg.d_model, cfg.n_heads * width_of_head)
    return _BYTES * int(7 * pair.length * len(target.layers) * width)


def edges_row_bytes(model: HookedModel, graph: Graph, pair: Pair) -> int:
    """The bytes that a row of a pass with replaced edges takes.

    They include the steps of all writers and the inputs of a layer's heads.
    """
    cfg = model.cfg
    steps_and_inputs = len(graph.writers) + 4 * cfg.n_heads
    return row_bytes(model, pair, cfg.d_model * steps_and_inputs)


def gradients_row_bytes(model: HookedModel, graph: Graph, pair: Pair) -> int:
    """The bytes that a row takes in a pass with gradients, which keeps all layers."""
    cfg = model.cfg
    attention = cfg.n_heads * (6 * cfg.d_head + 4 * len(pair.base))
    layer_values = 4 * cfg.d_model + _mlp_values(model) + attention
    reader_values = 2 * cfg.d_model * len(graph.readers)
    return row_bytes(model, pair, reader_values + cfg.n_layers * layer_values)


def edges_fixed_bytes(model: HookedModel, graph: Graph, pair: Pair) -> int:
    """The bytes that a pair's edges take, whatever the number of rows."""
    # In float32, the outputs of both runs and the exchanged ones; in float64, the step, the random
    # step and the two temporaries from which that is computed.
    writer_bytes = 3 * _BYTES + 4 * _OF_SUMS
    token_bytes = len(graph.writers) * writer_bytes + len(graph.readers) * _OF_SUMS
    return int(pair.length * model.cfg.d_model * token_bytes)


def check_edges_fit(model: HookedModel, graph: Graph, pairs: Sequence[Pair], budget: int) -> None:
    """Refuse a graph if a single row of the longest pair's passes does not fit.

    Raises:
        OptionError: It does not fit.
    """
    longest = max(pairs, key=lambda pair: pair.length)

    row = max(gradients_row_bytes(model, graph, longest), edges_row_bytes(model, graph, longest))
    needed = edges_fixed_bytes(model, graph, longest) + row
    if needed > budget:
        raise OptionError(
            f"the {int(graph.exists.sum()):,} edges of {model.cfg.model_name} need about "
            f"{needed / 2**30:.2g} GiB for a prompt of {longest.length:,} tokens, more than"
            " memory=…: allow more memory, or give shorter prompts"
        )


def _mlp_values(model: HookedModel) -> int:
    """The number of values that an MLP keeps for a token.

    Without a d_mlp in the configuration, the usual four times d_model is assumed.
    """
    width = getattr(model.cfg, "d_mlp", 0) or 4 * model.cfg.d_model
    return 4 * width
