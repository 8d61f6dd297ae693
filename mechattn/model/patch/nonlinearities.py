"""Reads and replaces MLP activations after the nonlinearity, which have no hook; also those of mixtures of experts.

Each expert is a gated MLP. Its output is multiplied by the weight w that the router gives it for this token:
``Σ w · down(act(gate) · up)``. So a token's activations are ``w · act(gate)`` of its experts, concatenated in the order
of their indices, then of the shared expert if there is one (its w is 1, or the output of its own gate): ``experts per
token × d_expert + d_shared`` channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from mechattn.errors import ModelError
from mechattn.model.hooked import attribute_set, unwrapped
from mechattn.model.hooks import Needed, blocks_of
from mechattn.model.several_devices import weights_here

_NAMES = ("act_fn", "act", "activation_fn", "gelu_impl", "activation", "activation_func")
Activity = Float[Tensor, "*token d_mlp"]
Channels = Float[Tensor, "token channel"]  # of the experts that a token is routed to
# Receives the layer and the values before and after the nonlinearity; what it returns, if anything, replaces the latter
SeeActivations = Callable[[int, Activity, Activity], Activity | None]


@contextmanager
def at_nonlinearity(model: Any, layers: Mapping[int, SeeActivations]) -> Iterator[None]:
    """Call a function with ``pre`` and ``act(pre)`` (gated: ``act(gate)``) of a layer's MLP at each forward pass."""
    with ExitStack() as stack:
        for layer, see in layers.items():
            if (mixture := mixture_of(model, layer)) is not None:
                stack.enter_context(watching(model, mixture, layer, see))
                continue
            owner, name = nonlinearity_of(model, layer)
            needed = Needed(
                f"layer {layer} has run without its nonlinearity: its MLP computes it elsewhere (weights that were "
                "folded do so), so its activations can be neither seen nor changed"
            )
            stack.enter_context(
                attribute_set(owner, name, _Watched(getattr(owner, name), layer, see, needed))
            )
            stack.callback(blocks_of(model)[layer].register_forward_hook(needed.check).remove)
        yield


def mixture_of(model: Any, layer: int) -> Mixture | None:
    """The mixture of experts of a layer; None if it has an MLP instead."""
    block = _block(model, layer)
    for whole in block.modules():
        parts = getattr(whole, "_modules", {})
        if parts.get("experts") is None or getattr(whole, "original_component", None) is not None:
            continue
        experts = unwrapped(parts["experts"])
        named = [
            parts[name]
            for name in ("shared_expert", "shared_experts")
            if parts.get(name) is not None
        ]
        shared = unwrapped(named[0]) if named else None
        stored = all(
            isinstance(getattr(experts, name, None), Tensor)
            for name in ("gate_up_proj", "down_proj")
        )
        formed = all(hasattr(experts, name) for name in ("is_transposed", "is_concatenated"))
        acts = hasattr(experts, "act_fn") or (
            hasattr(experts, "alpha") and hasattr(experts, "limit")
        )
        alike = shared is None or all(
            hasattr(shared, f"{name}_proj") for name in ("gate", "up", "down")
        )
        other = getattr(experts, "has_post_expert_norm", False) or getattr(
            experts, "_is_expert_parallel", False
        )
        if not (stored and formed and acts and alike) or other:
            raise ModelError(
                f"layer {layer} is a mixture of experts ({type(experts).__name__}) in a form that mechattn does not "
                f"know, so its activations cannot be measured"
            )
        mixture = Mixture(whole, experts, shared, parts.get("shared_expert_gate"))
        if any(True for _ in _nonlinearities(block, beside=mixture)):
            raise ModelError(
                f"layer {layer} has an MLP next to its mixture of experts, which is not supported"
            )
        return mixture
    return None


def nonlinearity_of(model: Any, layer: int) -> tuple[Any, str]:
    """The module that owns the nonlinearity of a layer's MLP, and the name of the attribute."""
    found: dict[int, tuple[Any, str]] = {}
    for place in _nonlinearities(_block(model, layer)):
        found.setdefault(id(getattr(*place)), place)
    if not found:
        raise ModelError(
            f"layer {layer} has no MLP with a nonlinearity known to mechattn, so its activations cannot be measured"
        )
    owner, name = next(iter(found.values()))
    if len(found) > 1 or "expert" in type(owner).__name__.lower():
        raise ModelError(
            f"layer {layer} has several MLPs, or experts in a form that mechattn does not know, so its activations "
            f"cannot be measured"
        )
    return owner, name


def plain_nonlinearity(model: Any, layer: int) -> Callable[[Tensor], Tensor]:
    """The nonlinearity itself, even while it is being watched."""
    if (mixture := mixture_of(model, layer)) is not None:
        return mixture.act
    found = getattr(*nonlinearity_of(model, layer))
    while isinstance(found, _Watched):
        found = found.original
    return found


def _block(model: Any, layer: int) -> Any:
    blocks = blocks_of(model)
    if not 0 <= layer < len(blocks):
        raise ModelError(f"layer {layer} is out of range: there are layers 0 to {len(blocks) - 1}")
    return unwrapped(blocks[layer])


def _nonlinearities(block: Any, beside: Mixture | None = None) -> Iterator[tuple[Any, str]]:
    """The nonlinearities of MLPs in a block, as module and attribute."""
    inside = set() if beside is None else {id(module) for module in beside.whole.modules()}
    for path, module in block.named_modules():
        parts = path.lower().split(".")
        if (
            parts[-1] in _NAMES
            or any("attention" in part or "attn" in part for part in parts)
            or id(module) in inside
        ):
            continue
        # A bridge forwards the names of what it wraps; one that splits a fused gate and up projection has its own.
        for name in _NAMES if unwrapped(module) is module else ("_activation_fn",):
            if callable(getattr(module, name, None)):
                yield module, name


@dataclass(frozen=True)
class _Watched:
    """A nonlinearity that passes its input and output to a function."""

    original: Callable[..., Any]
    layer: int
    see: SeeActivations
    needed: Needed

    def __call__(self, pre: Activity, *args: Any, **kwargs: Any) -> Activity:
        self.needed.called = True
        post = self.original(pre, *args, **kwargs)
        made = self.see(self.layer, pre, post)
        return post if made is None else made


_FINE, _COARSE = (
    1e-3,
    5e-2,
)  # the largest rounding error of an output, in float32 and in half precision


@dataclass(frozen=True)
class Routing:
    """Which experts the tokens of a pass are routed to."""

    experts: Int[Tensor, "*token slot"]  # the indices of each token's experts, in increasing order
    count: int  # of the experts in the layer, without shared ones
    width: int  # the channels of an expert

    def by_expert(self, x: Float[Tensor, "*token channel"]) -> Float[Tensor, "*token all_channels"]:
        """Activations over the channels of all experts, 0 where a token is not routed; shared ones last."""
        slots = self.experts.shape[-1]
        routed = rearrange(x[..., : slots * self.width], "... (slot d) -> ... slot d", slot=slots)
        made = x.new_zeros((*x.shape[:-1], self.count, self.width))
        made.scatter_(-2, self.experts[..., None].expand(routed.shape), routed)
        return torch.cat([made.flatten(-2), x[..., slots * self.width :]], -1)


@dataclass(frozen=True)
class Given:
    """The inputs of the experts in a forward pass: tokens, their experts in increasing order, the router's weights."""

    x: Float[Tensor, "token d_model"]
    experts: Int[Tensor, "token slot"]
    weights: Float[Tensor, "token slot"]


@dataclass(frozen=True)
class Mixture:
    """The parts of a mixture, unwrapped from their bridges."""

    whole: Any  # the module that holds all of them
    experts: Any  # the routed experts, with the weights of all in one parameter
    shared: Any = None  # the expert of all tokens, if there is one
    shared_gate: Any = None  # the gate that multiplies its output after a sigmoid, if there is one

    @property
    def width(self) -> int:
        """The channels of an expert."""
        return int(self.experts.down_proj.shape[1 if self.experts.is_transposed else 2])

    def act(self, gate: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """The nonlinearity; GPT-OSS has its own, for a gate that is bounded above."""
        if hasattr(self.experts, "act_fn"):
            return self.experts.act_fn(gate)
        gate = gate.clamp(max=self.experts.limit)
        return gate * torch.sigmoid(gate * self.experts.alpha)

    def times(self, up: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """The factor that multiplies the activation."""
        return (
            up
            if hasattr(self.experts, "act_fn")
            else up.clamp(-self.experts.limit, self.experts.limit) + 1
        )

    def into(self, at: Given, second: bool) -> Channels:
        """The gates (or, with ``second``, their factors) of each token's experts, and of the shared one."""
        made = at.x.new_empty((*at.experts.shape, self.width))
        for expert in at.experts.unique().tolist():
            token, slot = (at.experts == expert).nonzero(as_tuple=True)
            weight, bias = (
                self.experts.gate_up_proj[expert],
                getattr(self.experts, "gate_up_proj_bias", None),
            )
            weight = weight.T if self.experts.is_transposed else weight
            rows = slice(int(second), None, 2)
            if self.experts.is_concatenated:
                rows = slice(self.width, None) if second else slice(self.width)
            bias = None if bias is None else bias[expert][rows]
            made[token, slot] = nn.functional.linear(at.x[token], weight[rows], bias)
        parts = [self.times(made) if second else made]
        if self.shared is not None:
            parts.append(unwrapped(self.shared.up_proj if second else self.shared.gate_proj)(at.x))
        return torch.cat([part.flatten(1) for part in parts], -1)

    def weights(self, at: Given) -> Channels:
        """The weight of each channel: the router's; for the shared expert its own gate, or 1."""
        made = at.weights.repeat_interleave(self.width, -1)
        if self.shared is None:
            return made
        gate = (
            made.new_ones(len(at.x), 1)
            if self.shared_gate is None
            else unwrapped(self.shared_gate)(at.x).sigmoid()
        )
        return torch.cat(
            [made, gate.to(made.dtype).expand(-1, unwrapped(self.shared.gate_proj).out_features)],
            -1,
        )

    def out(self, hidden: Channels, at: Given) -> Float[Tensor, "token d_model"]:
        """The summed output of the experts from the product of activations and factors, without biases."""
        slots = at.experts.shape[1]
        routed = rearrange(
            hidden[:, : slots * self.width], "token (slot d) -> token slot d", slot=slots
        )
        made = hidden.new_zeros(
            len(hidden), self.experts.down_proj.shape[2 if self.experts.is_transposed else 1]
        )
        for expert in at.experts.unique().tolist():
            token, slot = (at.experts == expert).nonzero(as_tuple=True)
            weight = self.experts.down_proj[expert]
            weight = weight.T if self.experts.is_transposed else weight
            made = made.index_add(0, token, nn.functional.linear(routed[token, slot], weight))
        if self.shared is not None:
            made = made + nn.functional.linear(
                hidden[:, slots * self.width :], unwrapped(self.shared.down_proj).weight
            )
        return made

    def biases(self, at: Given) -> Float[Tensor, "token d_model"] | float:
        """The contribution of the output projections' biases."""
        bias = getattr(self.experts, "down_proj_bias", None)
        return 0.0 if bias is None else (bias[at.experts] * at.weights[..., None]).sum(1)


@dataclass
class _WatchedMixture:
    """A mixture that passes its activations to functions, and adds the effect of their changes to its output."""

    mixture: Mixture
    layer: int
    needed: Needed
    sees: list[SeeActivations] = field(default_factory=list)
    given: Given | None = None
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
        at, self.needed.called = self.given, True
        with weights_here(self.mixture.experts), weights_here(self.mixture.shared):
            return self._shown(out, at)

    def _shown(self, out: Any, at: Given) -> Any:
        whole = out[0] if isinstance(out, tuple) else out
        gate = self.mixture.into(at, second=False)
        before = self.mixture.act(gate) * self.mixture.weights(at)  # w · act(gate)
        if not self.agrees:
            self.compare(before, whole, at)
        now = before
        for see in list(self.sees):
            made = see(self.layer, gate, now)
            now = now if made is None else made
        self.given = None
        if now is before:
            return None
        change = (now - before) * self.mixture.into(at, second=True)
        whole = whole + self.mixture.out(change.to(at.x.dtype), at).reshape(whole.shape).to(
            whole.dtype
        )
        return (whole, *out[1:]) if isinstance(out, tuple) else whole

    def compare(self, activations: Channels, whole: Tensor, at: Given) -> None:
        """Refuse a mixture whose output does not follow from these activations, tried on the first token."""
        first = Given(at.x[:1], at.experts[:1], at.weights[:1])
        hidden = activations[:1] * self.mixture.into(first, second=True)
        got = self.mixture.out(hidden.to(first.x.dtype), first) + self.mixture.biases(first)
        expected = whole.reshape(-1, whole.shape[-1])[:1]
        rounding = _FINE if expected.dtype in (torch.float32, torch.float64) else _COARSE
        if not float((got - expected).norm()) <= rounding * float(expected.norm()):
            raise ModelError(
                f"layer {self.layer}: Σ w · down(act(gate) · up) of the experts is not the mixture's output, so its "
                "activations are unknown"
            )
        self.agrees = True


_watched: dict[int, _WatchedMixture] = {}  # by the id of the experts


@contextmanager
def watching(model: Any, mixture: Mixture, layer: int, see: SeeActivations) -> Iterator[None]:
    """Call a function with the gates and the activations of a mixture; if nested, outer functions are called first."""
    key = id(mixture.experts)
    with ExitStack() as stack:
        if (watched := _watched.get(key)) is None:
            needed = Needed(
                f"layer {layer} has run without calling its experts (another kernel computes them), so their "
                "activations can be neither seen nor changed"
            )
            watched = _watched[key] = _WatchedMixture(mixture, layer, needed)
            stack.callback(_watched.pop, key)
            for handle in (
                mixture.experts.register_forward_pre_hook(watched.take, with_kwargs=True),
                mixture.whole.register_forward_hook(watched.show),
                blocks_of(model)[layer].register_forward_hook(needed.check),
            ):
                stack.callback(handle.remove)
        watched.sees.append(see)
        stack.callback(watched.sees.remove, see)
        yield


def routing_now(mixture: Mixture) -> Routing | None:
    """The routing of the tokens whose activations are being passed on right now; None otherwise."""
    watched = _watched.get(id(mixture.experts))
    if watched is None or watched.given is None:
        return None
    return Routing(watched.given.experts, int(mixture.experts.num_experts), mixture.width)
