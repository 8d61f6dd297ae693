"""Mixtures of experts: a token's activations in the layer, and their contributions to its output.

Each expert is a gated MLP. Its output is multiplied by the weight w that the router gives it for this token:
``Σ w · down(act(gate) · up)``. So a token's activations are ``w · act(gate)`` of its experts, concatenated in the order
of their indices, then of the shared expert if there is one (its w is 1, or the output of its own gate): ``experts per
token × d_expert + d_shared`` channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from mechattn.errors import ModelError

_SHARED = ("shared_expert", "shared_experts")
_STORED = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class Routing:
    """Which experts the tokens of a pass are routed to.

    Args:
        experts: The indices of each token's experts, in increasing order.
        count: The number of experts in the layer, without shared ones.
        width: The channels of an expert.
    """

    experts: Int[Tensor, "*token slot"]
    count: int
    width: int

    def by_expert(self, x: Float[Tensor, "*token channel"]) -> Float[Tensor, "*token all_channels"]:
        """Activations over the channels of all experts, 0 where a token is not routed; shared ones last."""
        slots = self.experts.shape[-1]
        routed = rearrange(x[..., : slots * self.width], "... (slot d) -> ... slot d", slot=slots)
        made = x.new_zeros((*x.shape[:-1], self.count, self.width))
        made.scatter_(-2, self.experts[..., None].expand(routed.shape), routed)
        return torch.cat([made.flatten(-2), x[..., slots * self.width :]], -1)


@dataclass(frozen=True)
class Given:
    """The inputs of the experts in a forward pass.

    Args:
        x: The tokens.
        experts: The indices of each token's experts, in increasing order.
        weights: The router's weight of each of them.
    """

    x: Float[Tensor, "token d_model"]
    experts: Int[Tensor, "token slot"]
    weights: Float[Tensor, "token slot"]


@dataclass(frozen=True)
class Mixture:
    """The parts of a mixture, unwrapped from their bridges.

    Args:
        whole: The module that holds all of them.
        experts: The routed experts, with the weights of all in one parameter.
        shared: The expert of all tokens, if there is one.
        shared_gate: The gate that multiplies its output after a sigmoid, if there is one.
    """

    whole: Any
    experts: Any
    shared: Any = None
    shared_gate: Any = None

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
        if hasattr(self.experts, "act_fn"):
            return up
        return up.clamp(-self.experts.limit, self.experts.limit) + 1

    def into(self, x: Float[Tensor, "token d_model"], at: Given, second: bool) -> Float[Tensor, "token channel"]:
        """The gates (or, with ``second``, their factors) of each token's experts, and of the shared one."""
        made = x.new_empty((*at.experts.shape, self.width))
        for expert in at.experts.unique().tolist():
            token, slot = (at.experts == expert).nonzero(as_tuple=True)
            weight, bias = self.experts.gate_up_proj[expert], getattr(self.experts, "gate_up_proj_bias", None)
            weight = weight.T if self.experts.is_transposed else weight
            rows = slice(int(second), None, 2)
            if self.experts.is_concatenated:
                rows = slice(self.width, None) if second else slice(self.width)
            made[token, slot] = nn.functional.linear(
                x[token], weight[rows], None if bias is None else bias[expert][rows]
            )
        parts = [self.times(made) if second else made]
        if self.shared is not None:
            parts.append(_bare(self.shared.up_proj if second else self.shared.gate_proj)(x))
        return torch.cat([part.flatten(1) for part in parts], -1)

    def weights(self, x: Float[Tensor, "token d_model"], at: Given) -> Float[Tensor, "token channel"]:
        """The weight of each channel: the router's; for the shared expert its own gate, or 1."""
        made = at.weights.repeat_interleave(self.width, -1)
        if self.shared is None:
            return made
        gate = made.new_ones(len(x), 1) if self.shared_gate is None else _bare(self.shared_gate)(x).sigmoid()
        return torch.cat([made, gate.to(made.dtype).expand(-1, _bare(self.shared.gate_proj).out_features)], -1)

    def out(self, hidden: Float[Tensor, "token channel"], at: Given) -> Float[Tensor, "token d_model"]:
        """The summed output of the experts from the product of activations and factors, without biases."""
        slots = at.experts.shape[1]
        routed = rearrange(hidden[:, : slots * self.width], "token (slot d) -> token slot d", slot=slots)
        made = hidden.new_zeros(len(hidden), self.experts.down_proj.shape[2 if self.experts.is_transposed else 1])
        for expert in at.experts.unique().tolist():
            token, slot = (at.experts == expert).nonzero(as_tuple=True)
            weight = self.experts.down_proj[expert]
            weight = weight.T if self.experts.is_transposed else weight
            made = made.index_add(0, token, nn.functional.linear(routed[token, slot], weight))
        if self.shared is not None:
            made = made + nn.functional.linear(hidden[:, slots * self.width :], _bare(self.shared.down_proj).weight)
        return made

    def biases(self, at: Given) -> Float[Tensor, "token d_model"] | float:
        """The contribution of the output projections' biases."""
        bias = getattr(self.experts, "down_proj_bias", None)
        return 0.0 if bias is None else (bias[at.experts] * at.weights[..., None]).sum(1)


def mixture_in(block: Any, layer: int) -> Mixture | None:
    """The mixture of experts of a layer; None if it has none."""
    for module in block.modules():
        experts = getattr(module, "_modules", {}).get("experts")
        if experts is None or getattr(module, "original_component", None) is not None:
            continue
        return _known(module, _bare(experts), layer)
    return None


def _known(whole: Any, experts: Any, layer: int) -> Mixture:
    parts = whole._modules
    shared = next((_bare(parts[name]) for name in _SHARED if parts.get(name) is not None), None)
    gate = parts.get("shared_expert_gate")
    three = all(isinstance(getattr(experts, name, None), Tensor) for name in _STORED)
    formed = all(hasattr(experts, name) for name in ("is_transposed", "is_concatenated"))
    other = getattr(experts, "has_post_expert_norm", False) or getattr(experts, "_is_expert_parallel", False)
    acts = hasattr(experts, "act_fn") or (hasattr(experts, "alpha") and hasattr(experts, "limit"))
    alike = shared is None or all(hasattr(shared, f"{name}_proj") for name in ("gate", "up", "down"))
    if not (three and formed and acts and alike) or other:
        raise ModelError(
            f"layer {layer} is a mixture of experts ({type(experts).__name__}) in a form that mechattn does not know, "
            f"so its activations cannot be measured"
        )
    return Mixture(whole, experts, shared, gate)


def _bare(module: Any) -> Any:
    """The transformers module, unwrapped from its bridge."""
    return getattr(module, "original_component", None) or module
