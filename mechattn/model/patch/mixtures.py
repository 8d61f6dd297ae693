"""Reads and changes the activations of a mixture of experts, which have no hook."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.model.experts import Given, Mixture, Routing
from mechattn.model.hooks import blocks_of

_FINE, _COARSE = 1e-3, 5e-2  # the largest rounding error of an output, in float32 and in half precision

See = Callable[[int, Float[Tensor, "token channel"], Float[Tensor, "token channel"]], Tensor | None]


@dataclass
class _Watched:
    """A mixture that passes its activations to functions, and adds the effect of their changes to its output."""

    mixture: Mixture
    layer: int
    sees: list[See] = field(default_factory=list)
    given: Given | None = None
    called: bool = False
    agrees: bool = False

    def take(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the experts' inputs, with each token's experts in the order of their indices."""
        x, experts, weights = [*args, *kwargs.values()][:3]
        experts, order = experts.sort(-1)
        self.given = Given(x, experts, weights.gather(-1, order))

    def show(self, module: Any, given: Any, out: Any) -> Any:
        """Pass the activations to each function; a change that one returns goes to the next, and into the output."""
        if self.given is None:
            return None
        at, self.called = self.given, True
        whole = out[0] if isinstance(out, tuple) else out
        gate = self.mixture.into(at.x, at, second=False)
        before = self.activations(gate, at)
        if not self.agrees:
            self.compare(before, whole, at)
        now = before
        for see in list(self.sees):
            made = see(self.layer, gate, now)
            now = now if made is None else made
        self.given = None
        if now is before:
            return None
        change = (now - before) * self.mixture.into(at.x, at, second=True)
        whole = whole + self.mixture.out(change.to(at.x.dtype), at).reshape(whole.shape).to(whole.dtype)
        return (whole, *out[1:]) if isinstance(out, tuple) else whole

    def activations(self, gate: Float[Tensor, "token channel"], at: Given) -> Float[Tensor, "token channel"]:
        """``w · act(gate)``."""
        return self.mixture.act(gate) * self.mixture.weights(at.x, at)

    def compare(self, activations: Float[Tensor, "token channel"], whole: Tensor, at: Given) -> None:
        """Refuse a mixture whose output does not follow from these activations, tried on the first token."""
        first = Given(at.x[:1], at.experts[:1], at.weights[:1])
        hidden = activations[:1] * self.mixture.into(first.x, first, second=True)
        got = self.mixture.out(hidden.to(first.x.dtype), first) + self.mixture.biases(first)
        expected = whole.reshape(-1, whole.shape[-1])[:1]
        rounding = _FINE if expected.dtype in (torch.float32, torch.float64) else _COARSE
        if not float((got - expected).norm()) <= rounding * float(expected.norm()):
            raise ModelError(
                f"layer {self.layer}: Σ w · down(act(gate) · up) of the experts is not the mixture's output, so its "
                "activations are unknown"
            )
        self.agrees = True

    def check(self, block: Any, given: Any, out: Any) -> None:
        """After the layer has run, raise an error if the experts were not called."""
        if not self.called:
            raise ModelError(
                f"layer {self.layer} has run without calling its experts (another kernel computes them), so their "
                "activations can be neither seen nor changed"
            )
        self.called = False


_watched: dict[int, _Watched] = {}  # by the id of the experts


@contextmanager
def watching(model: Any, mixture: Mixture, layer: int, see: See) -> Iterator[None]:
    """Call a function with the gates and the activations of a mixture; if nested, outer functions are called first."""
    key = id(mixture.experts)
    outer = _watched.get(key)
    watched = outer or _Watched(mixture, layer)
    watched.sees.append(see)
    if outer is not None:
        try:
            yield
        finally:
            watched.sees.remove(see)
        return
    _watched[key] = watched
    handles = [
        mixture.experts.register_forward_pre_hook(watched.take, with_kwargs=True),
        mixture.whole.register_forward_hook(watched.show),
        blocks_of(model)[layer].register_forward_hook(watched.check),
    ]
    try:
        yield
    finally:
        del _watched[key]
        for handle in handles:
            handle.remove()


def routing_now(mixture: Mixture) -> Routing | None:
    """The routing of the tokens whose activations are being passed on right now; None otherwise."""
    watched = _watched.get(id(mixture.experts))
    if watched is None or watched.given is None:
        return None
    return Routing(watched.given.experts, int(mixture.experts.num_experts), mixture.width)
