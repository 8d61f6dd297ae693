"""ARM, which moves near-zero activations of early MLPs away from zero (arXiv:2510.01032)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Integral, Real
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from mechattn.errors import OptionError, check_choice, check_counts
from mechattn.functional import activations as fn
from mechattn.functional.attention import in_working_dtype
from mechattn.interventions.intervention import Acting, CurrentTarget, as_tuple, on, store_tuples
from mechattn.model.hooked import config_of
from mechattn.model.patch.nonlinearities import Activity, at_nonlinearity, plain_nonlinearity

Activations = Float[Tensor, "row pos d_mlp"]
_WIDTH_OF_QWEN_7B = 3584  # d_model of Qwen2.5-Math-7B; the 1.5B model has 1,536
# Activations that are moved together. The random numbers take 8 bytes each, 32 MiB in all.
_ENTRIES_AT_ONCE = 2**22


@dataclass(frozen=True)
class ARM:
    """Move near-zero activations of an MLP away from zero, or apply a control of the same size.

    ``act(gate) → act(gate) + strength · (arm(act(gate)) − act(gate))``

    ``functional.activations.redistribute`` defines ``arm``. A token's random numbers depend only on
    the seed, its prompt's id, its original position, the layer and the channel. With
    ``scope="token"`` batching therefore does not change the result. The share of near-zero
    activations falls by construction, so a lower share is not evidence of an effect: compare with
    ``control``. A mixture of experts is refused.

    Args:
        c: The factor of the threshold, 0 or more. With ``form="gemma"`` it is the share of
            activations to move. In the other forms it has no effect while the share of near-zero
            activations is clipped. The released code has 0.13 for Qwen2.5-Math-1.5B, 0.1 for
            Qwen2.5-Math-7B, 0.32 for Llama-3.1-8B and 0.25 for Gemma 3 4B.
        p1: The percentile that bounds positive entries: 0, or above 1 and up to 100. The released
            code has 99.5, 95, 90 and 85 for these models.
        layers: One or several layers, counted from 0. The paper uses the first.
        form: "paper", or the released code of a family: "released_llama", "released_qwen2" or
            "gemma".
        scope: "token" computes statistics and selection over the channels of each token. "tensor"
            computes them over the whole batch, including padding, as published.
        strength: The fraction of the change to apply; 0 changes nothing.
        control: The control to apply instead of ARM: "random_direction", "random_channels" or
            "shuffled_signs". Its change has the norm of ARM's change at each token.
        seed: The seed of the random numbers.

    Raises:
        OptionError: An argument has a value that is not allowed.
    """

    c: float = 0.13
    p1: float = 99.5
    layers: int | tuple[int, ...] = 0
    form: fn.Form = "paper"
    scope: fn.Scope = "token"
    strength: float = 1.0
    control: fn.Control | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice(fn.Form, form=self.form)
        check_choice(fn.Scope, scope=self.scope)
        if self.control is not None:
            check_choice(fn.Control, control=self.control)
        for name in ("c", "p1", "strength"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not isfinite(value):
                raise OptionError(f"{name}={value!r}: give a finite number")
        if self.c < 0:
            raise OptionError(f"c={self.c!r}: give a factor, 0 or more")
        if self.form == "gemma" and self.c > 1:
            raise OptionError(f"c={self.c!r}: give a share, 0 to 1")

        if not 0 <= self.p1 <= 100 or 0 < self.p1 <= 1:
            raise OptionError(
                f"p1={self.p1!r}: give a percentile (0, or above 1 and up to 100), such as 99.5,"
                " not a fraction"
            )

        store_tuples(self, "layers")
        layers = self.layer_numbers
        are_layers = [
            isinstance(layer, Integral) and not isinstance(layer, bool) and layer >= 0
            for layer in layers
        ]
        if not layers or not all(are_layers):
            raise OptionError(f"layers={self.layers!r}: give one or several layers, from 0")
        check_counts(0, seed=self.seed)

    @classmethod
    def for_model(cls, model: Any, **options: Any) -> ARM:
        """Return ARM as released for the family of a model.

        Llama models get the values of Llama-3.1-8B and Gemma models those of Gemma 3 4B, whatever
        their size. Qwen2 models get the values of Qwen2.5-Math-7B if they are at least as wide as
        that model, and those of Qwen2.5-Math-1.5B otherwise. Other families get ``form="paper"``
        with the defaults of ``ARM``.

        Args:
            model: A hooked model or a model of transformers.
            options: Further arguments of ``ARM``, which override the released values.

        Raises:
            OptionError: The model has no configuration of transformers; a ``HookedTransformer``,
                for example, has none.
        """
        config = config_of(model)
        if config is None:
            raise OptionError(
                f"a {type(model).__name__} has no configuration of transformers that names its"
                " family; give form, c and p1 to ARM itself"
            )

        family = str(getattr(config, "model_type", ""))
        released: dict[str, Any] = {}
        if family.startswith("llama"):
            released = {"form": "released_llama", "c": 0.32, "p1": 90.0}
        elif family.startswith("gemma"):
            released = {"form": "gemma", "c": 0.25, "p1": 85.0}
        elif family.startswith("qwen2"):
            released = {"form": "released_qwen2", "c": 0.13, "p1": 99.5}
            if config.hidden_size >= _WIDTH_OF_QWEN_7B:
                released |= {"c": 0.1, "p1": 95.0}
        return cls(**(released | options))

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """The layers as a tuple, even if there is only one."""
        return as_tuple(self.layers)

    def check(self, model: Any, prompts: Sequence[str]) -> None:
        """Refuse a layer that has no single MLP with a known nonlinearity."""
        for layer in self.layer_numbers:
            plain_nonlinearity(model, layer)

    def acting(self, model: Any, target: CurrentTarget) -> Acting:
        """Move the activations of the target's tokens inside a ``with`` block."""

        def move(layer: int, pre: Activity, post: Activity) -> Activity:
            tokens = target()
            if not len(tokens.rows):
                return post  # the whole batch is of other conditions
            rows = tokens.rows.to(post.device)
            positions = tokens.positions.to(post.device)
            activations = post.reshape(-1, positions.shape[1], post.shape[-1]).clone()

            rows_at_once = len(rows)  # statistics of the whole tensor need them all
            if self.scope == "token":
                rows_at_once = max(1, _ENTRIES_AT_ONCE // activations[0].numel())
            for start in range(0, len(rows), rows_at_once):
                block = slice(start, start + rows_at_once)
                block_rows = rows[block]
                activations[block_rows] = self._moved(
                    activations[block_rows], layer, tokens.prompts[block], positions[block]
                )
            return activations.reshape(post.shape)

        return at_nonlinearity(model, dict.fromkeys(self.layer_numbers, move))

    def _moved(
        self,
        x: Activations,
        layer: int,
        prompts: Sequence[str],
        positions: Int[Tensor, "row pos"],
    ) -> Activations:
        """Activations after ARM or its control, in the dtype of ``x``."""

        def uniform(purpose: str) -> Activations:
            """A random number for each channel of each token."""
            keys = fn.token_keys(self.seed, prompts, positions, layer, purpose)
            return fn.keyed_uniform(keys, x.shape[-1])

        moved = fn.redistribute(
            x,
            uniform("arm"),
            self.c,
            self.p1,
            form=self.form,
            scope=self.scope,
            strength=self.strength,
        )
        if self.control is None:
            return moved
        unmoved = in_working_dtype(x)
        change = in_working_dtype(moved) - unmoved
        control_change = fn.as_control(change, uniform(self.control), self.control)
        return (unmoved + control_change).to(x.dtype)

    def on(self, model: Any, prompts: Sequence[str] = ()) -> Acting:
        """Apply ARM outside a run, to everything that a model reads inside a ``with`` block."""
        return on(self, model, prompts)
