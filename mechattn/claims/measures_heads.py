"""Measures of what heads look at and write without any inserted tokens, one value a prompt."""

from __future__ import annotations

from math import ceil

import numpy as np

from mechattn.axes import BASELINE
from mechattn.claims.measure import by_head, later, log_ratio, null, places, rank_correlation, taken
from mechattn.claims.rules import NotApplicable
from mechattn.results.result import Result

_FOCUS, _SINKS = "attention_focus", "attention_sinks"
_EARLY = 1 / 6  # of the layers: 0 to 3 of 24
_LOOKS = 0.1  # of a head's attention on the first token, for it to look there at all
_TOKENS = 3  # of a head that look at the first token, and that do not, at least
_LOCAL = 2  # layers


def early_less_late(result: Result, quantity: str) -> np.ndarray:
    """A quantity of heads in the first sixth of the layers less that in the others."""
    by_layer = by_head(result, _FOCUS, quantity, BASELINE).mean(-1)
    cut = _cut(by_layer.shape[1])
    return by_layer[:, :cut].mean(1) - by_layer[:, cut:].mean(1)


def first_and_update(result: Result) -> np.ndarray:
    """Spearman's ρ over a head's tokens of attention to the first one with ‖Δ‖ / ‖h‖; mean over later heads that look.

    A head looks at the first token if a tenth of its attention goes there; random weights have none that do, and all
    of their later heads count.
    """
    mass, size = (_tokens(result, *of) for of in ((_FOCUS, "first_mass_at"), ("head_updates", "magnitude_at")))
    looks = _looking(result)
    question = places(result, BASELINE, "question")
    rows = [
        rank_correlation(*(values[prompt][looks][:, asks] for values in (mass, size))).mean()
        for prompt, asks in enumerate(question)
    ]
    return np.array(rows)


def update_at_first(result: Result) -> np.ndarray:
    """Log-ratio of a head's ‖Δ‖ / ‖h‖ at tokens whose strongest target is the first one to that at its other tokens."""
    target, size = (_tokens(result, *of) for of in ((_FOCUS, "target_at"), ("head_updates", "magnitude_at")))
    looks = _looking(result)
    found = []
    for prompt, asks in enumerate(places(result, BASELINE, "question")):
        at_first, updates = target[prompt][looks][:, asks] == 0, size[prompt][looks][:, asks]
        there, elsewhere = at_first.sum(1), (~at_first).sum(1)
        both = (there >= _TOKENS) & (elsewhere >= _TOKENS)
        if not both.any():
            raise NotApplicable(f"in prompt {prompt} no later head looks at the first token with some of its tokens")
        means = ((updates * some).sum(1)[both] / some.sum(1)[both] for some in (at_first, ~at_first))
        found.append(log_ratio(*means).mean())
    return np.array(found)


def heads_related(result: Result, quantity: str = "self_mass") -> np.ndarray:
    """Spearman's ρ over the index of heads between neighbouring layers, mean over pairs of layers."""
    values = by_head(result, _FOCUS, quantity, BASELINE)
    return rank_correlation(values[:, :-1], later(values)).mean(1)


def turned(result: Result, of: str = "head_updates") -> np.ndarray:
    """|cosine| of a head's update with the hidden state, mean over layers and heads."""
    quantity = "top_target_orientation" if of == "top_target_updates" else "orientation"
    return np.asarray(abs(by_head(result, of, quantity, BASELINE)).mean((1, 2)))


def sink_rate(result: Result, from_layer: int = 0) -> np.ndarray:
    """Share of heads, from a layer on, that give the first token more than 0.3 of their attention (2410.10781)."""
    return _from(by_head(result, _SINKS, "first_sink", BASELINE), from_layer).mean((1, 2))


def first_beyond_uniform(result: Result, from_layer: int = 0) -> np.ndarray:
    """Log-ratio of what heads from a layer on give the first token, on average, to what blind heads do."""
    ours = _from(by_head(result, _SINKS, "first_alpha", BASELINE).mean(-1), from_layer).mean(1)
    return log_ratio(ours, _from(null(result, _SINKS, "first_alpha", BASELINE), from_layer).mean(1))


def distance_early(result: Result) -> np.ndarray:
    """Log-ratio of how far back the heads of layers 0 and 1 look to how far blind heads do."""
    ours = by_head(result, _FOCUS, "distance", BASELINE).mean(-1)[:, :_LOCAL]
    return log_ratio(ours, null(result, _FOCUS, "distance", BASELINE)[:, :_LOCAL]).mean(1)


def sink_value(result: Result) -> np.ndarray:
    """‖v‖ of the first token over the mean of all, mean over the heads whose sink it is."""
    return by_head(result, _SINKS, "value_drain", BASELINE)[:, _sinks(result)].mean(1)


def sink_rank(result: Result) -> np.ndarray:
    """Log-ratio of the effective rank of the outputs of heads with a sink to that of the others."""
    rank, sinks = by_head(result, _SINKS, "output_rank", BASELINE), _sinks(result)
    if sinks.all():
        raise NotApplicable("every head has a sink at the first token, so there are none to compare with")
    return log_ratio(rank[:, sinks].mean(1), rank[:, ~sinks].mean(1))


def strongest(result: Result, quantity: str, layers: str = "all") -> np.ndarray:
    """A quantity of one head beyond a blind head's: chosen on every other prompt, measured on the rest.

    ``layers`` is "all", "first" (layer 0 alone) or "later".
    """
    values = by_head(result, _FOCUS, quantity, BASELINE) - null(result, _FOCUS, quantity, BASELINE)[..., None]
    values = {"all": lambda: values, "first": lambda: values[:, :1], "later": lambda: later(values)}[layers]()
    layer, head = _chosen(values)
    return np.asarray(values[1::2, layer, head])


def strongest_apart(result: Result, quantity: str) -> np.ndarray:
    """That of the strongest head of the later layers less that of the strongest of layer 0."""
    return strongest(result, quantity, "later") - strongest(result, quantity, "first")


def copies(result: Result) -> np.ndarray:
    """What the strongest induction head adds to the logit of the next token, in logits, chosen on other prompts."""
    layer, head = _chosen(by_head(result, _FOCUS, "induction_mass", BASELINE))
    return by_head(result, "direct_logits", "next_token_logit", BASELINE)[1::2, layer, head]


def _chosen(values: np.ndarray) -> tuple[int, int]:
    """The head with the largest mean over every other prompt."""
    if len(values) < 2:
        raise NotApplicable("one prompt is too few to choose a head on others than it is measured on")
    layer, head = np.unravel_index(values[::2].mean(0).argmax(), values.shape[1:])
    return int(layer), int(head)


def _sinks(result: Result) -> np.ndarray:
    """Which heads have a sink at the first token, in most prompts [layer, head]."""
    found = by_head(result, _SINKS, "first_sink", BASELINE).mean(0) > 0.5
    if not found.any():
        raise NotApplicable("no head gives the first token more than 0.3 of its attention")
    return np.asarray(found)


def _looking(result: Result) -> np.ndarray:
    """The heads beyond the first sixth of the layers that look at the first token; all of them where none does."""
    mass = by_head(result, _FOCUS, "first_mass", BASELINE).mean(0)
    late = np.arange(len(mass))[:, None] >= _cut(len(mass))
    looks = late & (mass >= _LOOKS)
    return looks if looks.any() else np.broadcast_to(late, mass.shape)


def _tokens(result: Result, dataset: str, quantity: str) -> np.ndarray:
    """A quantity of each token [prompt, layer, head, pos]."""
    found = taken(result, dataset, f"{quantity}_per_prompt", BASELINE)
    return found.transpose("prompt", "layer", "head", "key").values.astype(np.float64)


def _from(values: np.ndarray, layer: int) -> np.ndarray:
    if layer >= values.shape[1]:
        raise NotApplicable(f"the model has {values.shape[1]} layers, and this is about those from {layer} on")
    return values[:, layer:]


def _cut(layers: int) -> int:
    """How many layers are early."""
    if layers < 2:
        raise NotApplicable("the model has one layer")
    return ceil(_EARLY * layers)
