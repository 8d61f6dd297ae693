"""Reads and replaces the activations of a mixture of experts.

Each expert is a gated MLP. Its output is multiplied by the weight w that the router gives it for
this token: ``Σ w · down(act(gate) · up)``. So a token's activations are ``w · act(gate)`` of its
experts, concatenated in the order of their indices, then of the shared expert if there is one (its
w is 1, or the output of its own gate): ``experts per token × d_expert + d_shared`` channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from mechattn.errors import ModelError
from mechattn.model.hooked import unwrapped
from mechattn.model.hooks import Needed, blocks_of
from mechattn.model.several_devices import weights_here

SHARED_NAMES = ("shared_expert", "shared_experts")

# The largest rounding error of an output, as a fraction of it.
ROUNDING = 1e-3
ROUNDING_IN_HALF_PRECISION = 5e-2

Channels = Float[Tensor, "token channel"]  # of the experts that a token is routed to

# Takes the layer, the gates and the activations; what it returns, if anything, replaces these.
SeeChannels = Callable[[int, Channels, Channels], Channels | None]


@dataclass(frozen=True)
class Routing:
    """Which experts the tokens of a pass are routed to."""

    experts: Int[Tensor, "*token slot"]  # the indices of each token's experts, in increasing order
    count: int  # of the experts in the layer, without shared ones
    width: int  # the channels of an expert

    def by_expert(self, x: Float[Tensor, "*token channel"]) -> Float[Tensor, "*token all_channels"]:
        """Activations over the channels of all experts, 0 where a token is not routed; shared ones
        last."""
        slots = self.experts.shape[-1]
        routed_channels = slots * self.width
        routed = rearrange(x[..., :routed_channels], "... (slot d) -> ... slot d", slot=slots)

        by_expert = x.new_zeros((*x.shape[:-1], self.count, self.width))
        by_expert.scatter_(-2, self.experts[..., None].expand(routed.shape), routed)
        return torch.cat([by_expert.flatten(-2), x[..., routed_channels:]], -1)


@dataclass(frozen=True)
class ExpertInputs:
    """The inputs of the experts in a forward pass: tokens, their experts in increasing order, the
    router's weights."""

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
        dimension = 1 if self.experts.is_transposed else 2
        return int(self.experts.down_proj.shape[dimension])

    def act(self, gate: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """The nonlinearity; GPT-OSS has its own, for a gate that is bounded above."""
        if hasattr(self.experts, "act_fn"):
            return self.experts.act_fn(gate)
        gate = gate.clamp(max=self.experts.limit)
        return gate * torch.sigmoid(gate * self.experts.alpha)

    def factor(self, up: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """The factor that multiplies the activation; GPT-OSS adds 1 to it and bounds it."""
        if hasattr(self.experts, "act_fn"):
            return up
        limit = self.experts.limit
        return up.clamp(-limit, limit) + 1

    def gates(self, inputs: ExpertInputs) -> Channels:
        """The gates of each token's experts, and of the shared one."""
        gates = self._projected(inputs, self._gate_rows)
        return self._with_shared(gates, inputs, "gate_proj")

    def factors(self, inputs: ExpertInputs) -> Channels:
        """What the activations of each token's experts, and of the shared one, are multiplied
        by."""
        factors = self.factor(self._projected(inputs, self._up_rows))
        return self._with_shared(factors, inputs, "up_proj")

    @property
    def _gate_rows(self) -> slice:
        """The rows of ``gate_up_proj`` that compute the gates."""
        return slice(self.width) if self.experts.is_concatenated else slice(0, None, 2)

    @property
    def _up_rows(self) -> slice:
        return slice(self.width, None) if self.experts.is_concatenated else slice(1, None, 2)

    def _projected(self, inputs: ExpertInputs, rows: slice) -> Float[Tensor, "token slot d_expert"]:
        """Some rows of each expert's first projection, of the tokens that are routed to it."""
        projected = inputs.x.new_empty((*inputs.experts.shape, self.width))
        biases = getattr(self.experts, "gate_up_proj_bias", None)
        for expert in inputs.experts.unique().tolist():
            token, slot = (inputs.experts == expert).nonzero(as_tuple=True)
            weight = self._outputs_first(self.experts.gate_up_proj[expert])
            bias = None if biases is None else biases[expert][rows]
            projected[token, slot] = nn.functional.linear(inputs.x[token], weight[rows], bias)
        return projected

    def _with_shared(
        self, routed: Float[Tensor, "token slot d_expert"], inputs: ExpertInputs, projection: str
    ) -> Channels:
        if self.shared is None:
            return routed.flatten(1)
        of_shared = unwrapped(getattr(self.shared, projection))(inputs.x)
        return torch.cat([routed.flatten(1), of_shared], -1)

    def weights(self, inputs: ExpertInputs) -> Channels:
        """The weight of each channel: the router's; for the shared expert its own gate, or 1."""
        routed = inputs.weights.repeat_interleave(self.width, -1)
        if self.shared is None:
            return routed

        if self.shared_gate is None:
            gate = routed.new_ones(len(inputs.x), 1)
        else:
            gate = unwrapped(self.shared_gate)(inputs.x).sigmoid()
        shared_width = unwrapped(self.shared.gate_proj).out_features
        return torch.cat([routed, gate.to(routed.dtype).expand(-1, shared_width)], -1)

    def output(self, hidden: Channels, inputs: ExpertInputs) -> Float[Tensor, "token d_model"]:
        """The summed output of the experts from the product of activations and factors, without
        biases."""
        slots = inputs.experts.shape[1]
        routed_channels = slots * self.width
        routed = rearrange(
            hidden[:, :routed_channels], "token (slot d) -> token slot d", slot=slots
        )

        d_model = self._outputs_first(self.experts.down_proj[0]).shape[0]
        total = hidden.new_zeros(len(hidden), d_model)
        for expert in inputs.experts.unique().tolist():
            token, slot = (inputs.experts == expert).nonzero(as_tuple=True)
            weight = self._outputs_first(self.experts.down_proj[expert])
            total = total.index_add(0, token, nn.functional.linear(routed[token, slot], weight))

        if self.shared is None:
            return total
        shared_weight = unwrapped(self.shared.down_proj).weight
        return total + nn.functional.linear(hidden[:, routed_channels:], shared_weight)

    def output_biases(self, inputs: ExpertInputs) -> Float[Tensor, "token d_model"] | float:
        """The contribution of the output projections' biases."""
        bias = getattr(self.experts, "down_proj_bias", None)
        if bias is None:
            return 0.0
        return (bias[inputs.experts] * inputs.weights[..., None]).sum(1)

    def _outputs_first(self, weight: Tensor) -> Tensor:
        """A weight of an expert as ``nn.Linear`` stores it: [outputs, inputs]."""
        return weight.T if self.experts.is_transposed else weight


def mixture_in(block: Any, layer: int) -> Mixture | None:
    """The mixture of experts of a block; None if it has none.

    Raises:
        ModelError: Its form is unknown, so that its activations cannot be measured.
    """
    for module in block.modules():
        parts = getattr(module, "_modules", {})
        is_bridge = getattr(module, "original_component", None) is not None
        if parts.get("experts") is None or is_bridge:
            continue

        experts = unwrapped(parts["experts"])
        shared_parts = [parts[name] for name in SHARED_NAMES if parts.get(name) is not None]
        shared = unwrapped(shared_parts[0]) if shared_parts else None
        if not _is_known_form(experts, shared):
            raise ModelError(
                f"layer {layer} is a mixture of experts ({type(experts).__name__}) in a form that"
                " mechattn does not know, so its activations cannot be measured"
            )
        return Mixture(module, experts, shared, parts.get("shared_expert_gate"))
    return None


def _is_known_form(experts: Any, shared: Any) -> bool:
    """Whether the weights of all experts are in one parameter, and each is a gated MLP with nothing
    else in it."""
    has_weights = all(
        isinstance(getattr(experts, name, None), Tensor) for name in ("gate_up_proj", "down_proj")
    )
    says_its_layout = all(hasattr(experts, name) for name in ("is_transposed", "is_concatenated"))
    has_nonlinearity = hasattr(experts, "act_fn") or (
        hasattr(experts, "alpha") and hasattr(experts, "limit")
    )
    shared_is_gated = shared is None or all(
        hasattr(shared, f"{name}_proj") for name in ("gate", "up", "down")
    )
    has_more = getattr(experts, "has_post_expert_norm", False)
    is_distributed = getattr(experts, "_is_expert_parallel", False)
    is_gated = has_weights and says_its_layout and has_nonlinearity and shared_is_gated
    return is_gated and not has_more and not is_distributed


@dataclass
class _WatchedMixture:
    """A mixture that passes its activations to functions, and adds the effect of their changes to
    its output."""

    mixture: Mixture
    layer: int
    needed: Needed
    functions: list[SeeChannels] = field(default_factory=list)
    inputs: ExpertInputs | None = None
    agrees: bool = False

    def note_inputs(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the experts' inputs, with each token's experts in the order of their indices."""
        x, experts, weights = [*args, *kwargs.values()][:3]
        experts, order = experts.sort(-1)
        self.inputs = ExpertInputs(x, experts, weights.gather(-1, order))

    def pass_on(self, module: Any, args: Any, output: Any) -> Any:
        """Pass the activations to each function; a change that one returns goes to the next, and
        into the output."""
        if self.inputs is None:
            return None
        self.needed.called = True
        inputs = self.inputs
        total = output[0] if isinstance(output, tuple) else output
        with weights_here(self.mixture.experts), weights_here(self.mixture.shared):
            changed = self._changed_output(total, inputs)

        if changed is None:
            return None
        return (changed, *output[1:]) if isinstance(output, tuple) else changed

    def _changed_output(self, total: Tensor, inputs: ExpertInputs) -> Tensor | None:
        """The output with the changes that the functions made; None if they made none."""
        gates = self.mixture.gates(inputs)
        before = self.mixture.act(gates) * self.mixture.weights(inputs)  # w · act(gate)
        if not self.agrees:
            self._check(before, total, inputs)

        after = before
        for function in list(self.functions):
            replacement = function(self.layer, gates, after)
            if replacement is not None:
                after = replacement
        self.inputs = None

        if after is before:
            return None
        hidden = (after - before) * self.mixture.factors(inputs)
        change = self.mixture.output(hidden.to(inputs.x.dtype), inputs)
        return total + change.reshape(total.shape).to(total.dtype)

    def _check(self, activations: Channels, total: Tensor, inputs: ExpertInputs) -> None:
        """Refuse a mixture whose output does not follow from these activations, tried on the first
        token."""
        first = ExpertInputs(inputs.x[:1], inputs.experts[:1], inputs.weights[:1])
        hidden = activations[:1] * self.mixture.factors(first)
        computed = self.mixture.output(hidden.to(first.x.dtype), first)
        computed = computed + self.mixture.output_biases(first)

        expected = total.reshape(-1, total.shape[-1])[:1]
        is_full_precision = expected.dtype in (torch.float32, torch.float64)
        rounding = ROUNDING if is_full_precision else ROUNDING_IN_HALF_PRECISION
        error = float((computed - expected).norm())
        if not error <= rounding * float(expected.norm()):  # also if it is NaN
            raise ModelError(
                f"layer {self.layer}: Σ w · down(act(gate) · up) of the experts is not the"
                " mixture's output, so its activations are unknown"
            )
        self.agrees = True


_watched: dict[int, _WatchedMixture] = {}  # by the id of the experts


@contextmanager
def watching(model: Any, mixture: Mixture, layer: int, see: SeeChannels) -> Iterator[None]:
    """Call a function with the gates and the activations of a mixture; if nested, outer functions
    are called first."""
    key = id(mixture.experts)
    with ExitStack() as stack:
        if key not in _watched:
            needed = Needed(
                f"layer {layer} has run without calling its experts (another kernel computes them),"
                " so their activations can be neither seen nor changed"
            )
            watched = _WatchedMixture(mixture, layer, needed)
            _watched[key] = watched
            stack.callback(_watched.pop, key)

            before_experts = mixture.experts.register_forward_pre_hook(
                watched.note_inputs, with_kwargs=True
            )
            after_mixture = mixture.whole.register_forward_hook(watched.pass_on)
            after_block = blocks_of(model)[layer].register_forward_hook(needed.check)
            for handle in (before_experts, after_mixture, after_block):
                stack.callback(handle.remove)

        functions = _watched[key].functions
        functions.append(see)
        stack.callback(functions.remove, see)
        yield


def routing_now(mixture: Mixture) -> Routing | None:
    """The routing of the tokens whose activations are being passed on right now; None otherwise."""
    watched = _watched.get(id(mixture.experts))
    if watched is None or watched.inputs is None:
        return None
    return Routing(watched.inputs.experts, int(mixture.experts.num_experts), mixture.width)
