"""From the residual stream to the logits: a norm whose scale is held fixed, W_U, a factor and a
cap."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.errors import ModelError
from mechattn.functional.attention import in_working_dtype
from mechattn.model.architectures import particulars_of
from mechattn.model.hooked import (
    HookedModel,
    config_of,
    device_of,
    limit_of,
    rounding_of,
    unwrapped,
    weights_here,
)
from mechattn.model.hooks import few_tokens, logits_and_values

_TRIED_VECTORS = 4
_TRIED_TOKENS = 8
# The largest relative errors from rounding, of a norm and of logits.
_NORM_ROUNDING = {"in_float32": 1e-3, "in_half_precision": 3e-2}
_LOGIT_ROUNDING = {"in_float32": 0.02, "in_half_precision": 0.15}


@dataclass(frozen=True, eq=False)
class FrozenNorm:
    """A norm ``γ · (x − mean) / σ(x) + b`` whose σ is held fixed.

    A part Δ of x then contributes ``γ · (Δ − its mean) / σ(x)`` to the output.
    """

    gamma: Float[Tensor, " d_model"]
    centres: bool  # whether it subtracts the mean (LayerNorm, not RMSNorm)
    eps: float  # added to the variance under the root
    scales: bool = True  # False in a model without norms: an identity with σ = 1

    def of_part(self, part: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """``γ · (Δ − its mean)`` of a part Δ of the input: its part of the output, times σ."""
        if self.centres:
            part = part - part.mean(-1, keepdim=True)
        return self.gamma * part

    def toward(self, direction: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The direction before the norm that corresponds to a direction after it.

        ``⟨of_part(Δ), direction⟩ = ⟨Δ, toward(direction)⟩`` for each part Δ of the input.
        """
        input_direction = direction * self.gamma
        if self.centres:
            input_direction = input_direction - input_direction.mean(-1, keepdim=True)
        return input_direction

    def scale(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch"]:
        """σ of the norm's input, as at TransformerLens's ``hook_scale``.

        It is ``√(variance + ε)`` or, in an RMSNorm, ``√(mean square + ε)``.
        """
        x = in_working_dtype(x)
        if not self.scales:
            return torch.ones_like(x[..., 0])
        if self.centres:
            x = x - x.mean(-1, keepdim=True)
        return (x.square().mean(-1) + self.eps).sqrt()


@torch.no_grad()
def frozen_norm(model: HookedModel, norm: Any, name: str) -> FrozenNorm:
    """A norm of a model as a ``FrozenNorm``.

    γ is read from ``norm(x) − norm(0) = γ · (x − mean) / σ(x)`` for a vector x of ±1. The result is
    checked on random vectors.

    Args:
        model: A hooked model.
        norm: One of its norms, or the identity in place of one.
        name: The name of the norm in an error.

    Returns:
        The frozen norm. One that returns the random vectors unchanged is an identity with σ = 1.

    Raises:
        ModelError: It is not a norm of this form.
    """
    device = device_of(norm)
    dtype = next(model.parameters()).dtype

    def normed(vectors: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        rows = vectors.to(dtype)[None]  # some norms take only batches
        return in_working_dtype(norm(rows)[0])

    ones = torch.ones(model.cfg.d_model, device=device)

    # Random vectors of very different sizes.
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-1, 2, _TRIED_VECTORS)[:, None]
    vectors = torch.randn(_TRIED_VECTORS, len(ones), generator=generator) * sizes
    x = in_working_dtype(vectors.to(device, dtype))
    output = normed(x)
    if torch.equal(output, x):
        return FrozenNorm(in_working_dtype(ones), centres=False, eps=0.0, scales=False)

    # The outputs for alternating signs, for zeros (the bias) and for ones.
    signs = ones.clone()
    signs[1::2] = -1
    zeros = torch.zeros_like(ones)
    normed_signs, bias, normed_ones = normed(torch.stack([signs, zeros, ones]))
    unbiased_signs = normed_signs - bias

    # A norm that subtracts the mean turns ones into zeros, up to rounding.
    centres = bool((normed_ones - bias).abs().max() < 1e-2 * unbiased_signs.abs().max())
    centred_signs = signs
    if centres:
        centred_signs = signs - signs.mean()  # the mean is not 0 if the width is odd
    eps = _eps_of(norm, model)
    variance = float(centred_signs.square().mean())
    gamma = unbiased_signs / centred_signs * (variance + eps) ** 0.5

    frozen = FrozenNorm(gamma, centres, eps)
    expected_output = frozen.of_part(x) / frozen.scale(x)[:, None] + bias
    error = float((output - expected_output).norm())
    if not error < rounding_of(model, **_NORM_ROUNDING) * float(output.norm()):  # also refuses NaN
        raise ModelError(
            f"{model.cfg.model_name}: {name} is not a norm of the form γ · x / σ, so the"
            " contribution of a part of its input is undefined"
        )

    return frozen


@dataclass(frozen=True, eq=False)
class Unembedding:
    """``logit = factor · ⟨norm(x), W_U⟩ + b_U``.

    A model that caps its logits then takes ``cap · tanh(logit / cap)``.
    """

    w_u: Float[Tensor, "d_model d_vocab"]
    mean: Float[Tensor, " d_model"]  # of W_U over the vocabulary; it does not affect the softmax
    norm: FrozenNorm  # the final norm
    factor: float = 1.0
    cap: float | None = None

    def direction(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """The direction of the residual stream, before the final norm, of each token's logit above
        the mean logit.

        It is ``factor · γ · (W_U[:, token] − mean)``, minus its own mean if the norm centres.
        """
        index = tokens.to(self.w_u.device)
        above_mean = in_working_dtype(self.w_u.T[index]) - self.mean
        toward_token = self.norm.toward(self.factor * above_mean)
        return toward_token.to(tokens.device)

    def uncapped(self, logits: Float[Tensor, "*batch d_vocab"]) -> Float[Tensor, "*batch d_vocab"]:
        """The logits before the cap: ``cap · artanh(logit / cap)``; unchanged without a cap."""
        if self.cap is None:
            return logits
        largest_share = 1 - torch.finfo(logits.dtype).eps  # artanh(1) is infinite
        share_of_cap = (logits / self.cap).clamp(-largest_share, largest_share)
        return self.cap * share_of_cap.atanh()


def unembedding(model: HookedModel) -> Unembedding:
    """A model's W_U, final norm, factor and cap, checked against its logits on a few tokens.

    Raises:
        ModelError: W_U or the final norm cannot be read, or the logits do not follow from them.
    """
    norm = getattr(model, "ln_final", None)
    with weights_here(getattr(model, "unembed", None)):
        try:
            w_u = getattr(model, "W_U", None)
        # TransformerLens asserts that the weight is a tensor (UnembeddingBridge.W_U); some
        # quantisers keep another object there.
        except AssertionError as error:
            raise ModelError(f"{model.cfg.model_name}: W_U cannot be read ({error})") from error

    if norm is None or w_u is None:
        raise ModelError(
            f"{model.cfg.model_name} has no ln_final or no W_U, so contributions to its logits are"
            " unknown"
        )

    w_u = w_u.detach()
    final_norm = frozen_norm(model, norm, "its final norm")
    to_logits = Unembedding(
        w_u,
        mean=in_working_dtype(w_u).mean(1),
        norm=replace(final_norm, gamma=final_norm.gamma.to(w_u.device)),
        factor=float(particulars_of(model).logit_factor(config_of(model))),
        cap=_logit_cap(model),
    )
    _check_logits(model, to_logits)
    return to_logits


def _eps_of(norm: Any, model: HookedModel) -> float:
    """ε of a norm, by the names that it has in different models; by default the model's."""
    for name in ("eps", "variance_epsilon"):
        eps = getattr(unwrapped(norm), name, None)
        if eps is not None:
            return float(eps)
    return float(getattr(model.cfg, "eps", 1e-5))


def _logit_cap(model: HookedModel) -> float | None:
    """The cap of the logits; None for most models, which have none."""
    config = config_of(model)
    if config is None:  # a HookedTransformer
        cap = getattr(model.cfg, "output_logits_soft_cap", None)
    else:
        cap = getattr(config, "final_logit_softcapping", None)
    if not cap or cap < 0:  # 0 and -1 stand for no cap
        return None
    return float(cap)


def _check_logits(model: HookedModel, to_logits: Unembedding) -> None:
    """Refuse a model whose logits on a few tokens do not follow from the final residual stream.

    Raises:
        ModelError: They do not, or the last verification found that updates do not add up.
    """
    name = model.cfg.model_name
    limit = limit_of(model, "residual")
    if limit is not None:
        raise ModelError(f"{name}: {limit}; so updates do not reach its logits unchanged")

    last_hook = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    tokens = few_tokens(model, _TRIED_TOKENS)
    all_logits, values = logits_and_values(model, tokens, [last_hook])
    capped_logits = in_working_dtype(all_logits[0]).to(tokens.device)
    logits = to_logits.uncapped(capped_logits)
    centred_logits = logits - logits.mean(-1, keepdim=True)
    expected_logits = centred_logits[:, tokens[0]]

    stream = in_working_dtype(values[last_hook]).to(tokens.device)
    directions = to_logits.direction(tokens)[0]
    sigma = to_logits.norm.scale(stream)[0]
    computed_logits = (directions @ stream[0].T / sigma).T

    # b_U adds the same number to a token's logit at every position, so it is left out.
    difference = computed_logits - expected_logits
    error = (difference - difference.mean(0)).norm()
    size = (expected_logits - expected_logits.mean(0)).norm()
    rounding = rounding_of(model, **_LOGIT_ROUNDING)
    if not float(error) <= rounding * float(size):  # also refuses NaN
        raise ModelError(
            f"the logits of {name} are not W_U · norm(residual stream), even with a factor or cap"
            " from its configuration, so a head's contribution to them is unknown"
        )
