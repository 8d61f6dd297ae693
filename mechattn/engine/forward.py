"""The two ways in which attention reaches the analyses: in row blocks as it is computed, or as hooks show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor

from mechattn.errors import ModelError, OptionError
from mechattn.functional.rows import Cut, Rows, Shown
from mechattn.model import hooks
from mechattn.model.known import Known, known
from mechattn.model.streaming import See, streaming
from mechattn.model.verify import check_streaming
from mechattn.prompts.sequences import Batch

Engine = Literal["auto", "streaming", "hooks"]
Forward = Callable[[Any, Batch, Mapping[int, int | None], See, int], None]


def chosen_forward(model: Any, engine: Engine) -> tuple[Forward, str]:
    """The way for this model, and why; streaming is compared with the hooks once a model before it is trusted.

    Raises:
        OptionError: There is no such engine.
        ModelError: "streaming" was asked for, and it would give other numbers than the model.
    """
    if engine not in ("auto", "streaming", "hooks"):
        raise OptionError(f'engine={engine!r}: choose "auto", "streaming" or "hooks"')
    if engine == "hooks":
        return forward_through_hooks, "asked for"
    about = known(model) or Known()
    if about.streaming is None:
        about.streaming = check_streaming(model)
    check = about.streaming
    if check.outcome == "passed":
        return forward_in_blocks, "its numbers are those of the hooks"
    if engine == "streaming":
        raise ModelError(f'{model.cfg.model_name} cannot be streamed: {check}; choose engine="hooks" or "auto"')
    return forward_through_hooks, f"not streamed: {check.detail}"


def forward_in_blocks(model: Any, batch: Batch, windows: Mapping[int, int | None], see: See, last: int) -> None:
    """Blocks of query rows, as attention is computed. No token sees the padding to its right, so it needs no mask."""
    with streaming(model, windows, see, cuts=_cuts(model, batch, last)):
        hooks.forward_to(model, batch.tokens, last, [], batch.position_ids)


def forward_through_hooks(model: Any, batch: Batch, windows: Mapping[int, int | None], see: See, last: int) -> None:
    """Each layer's whole pattern as one block, checked to be one."""
    every = slice(0, batch.tokens.shape[1])

    def whole(layer: int, pattern: Tensor, v: Tensor | None) -> None:
        window = windows[layer] if layer in windows else hooks.attention_window(model, layer)
        hooks.check_pattern(model, layer, pattern, batch.real, window, cuts.get(layer))
        if layer in windows:
            pattern = pattern.float()
            see(layer, Rows(pattern, every, every, None if v is None else Shown(pattern, v)))

    cuts = _cuts(model, batch, last)  # looked at too, as some models take no notice of what is done to their scores
    looked = sorted({*windows, *cuts})
    hooks.forward_with_patterns(model, batch.tokens, batch.real, looked, whole, cuts, batch.position_ids, last)


def _cuts(model: Any, batch: Batch, last: int) -> dict[int, Cut]:
    """The edges that are cut in each layer that is computed."""
    if batch.cut is None:
        return {}
    cuts = {layer: batch.at(layer).cut for layer in hooks.attention_layers(model) if layer <= last}
    return {layer: cut for layer, cut in cuts.items() if cut is not None}


def position_width(model: Any) -> int:
    """About how many numbers live at the same time at each position of a sequence."""
    cfg = model.cfg
    return 8 * int(cfg.d_model) + 3 * int(cfg.d_mlp or 4 * cfg.d_model)
