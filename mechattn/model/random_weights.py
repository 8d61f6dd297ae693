"""Redraws a model's weights at random: the architecture without its training."""

from __future__ import annotations

import copy
from typing import Any, Literal, get_args

import torch

from mechattn.errors import ModelError, OptionError
from mechattn.model.load import load_model
from mechattn.model.lock import alone, making
from mechattn.model.model_facts import ModelFacts, facts_of

Kind = Literal["initialised", "shuffled"]


@alone
def random_weights(model: Any, kind: Kind = "initialised", seed: int = 0, **options: Any) -> Any:
    """Return a model of the same architecture and tokenizer with random weights, loaded and verified like any other.

    The given model is not changed, so two models are in memory at the same time.

    Args:
        model: Anything that ``load_model`` accepts.
        kind: "initialised": the architecture's own initialisation, as at the start of training; "shuffled": the entries
            of each parameter are permuted, so every matrix keeps the distribution of its numbers.
        seed: The seed of the draw.
        **options: Passed to ``load_model``.

    Returns:
        A ``TransformerBridge``; its name and the provenance of its results state that the weights are random.

    Raises:
        OptionError: There is no such kind, or the seed is not a whole number.
        ModelError: The weights cannot be redrawn: the model is quantised, or has no transformers model behind it.

    Source:
        Random networks as the null of interpretability: arXiv:2512.18792.
    """
    check_draw(kind, seed)
    hooked = load_model(model, **options)
    facts = facts_of(hooked) or ModelFacts()
    if facts.native is None:
        raise ModelError(
            f"the weights of {hooked.cfg.model_name} cannot be redrawn: {facts.why_not_native}. Give an unquantised "
            f"model by its name, its directory, or as a transformers model"
        )
    with making:
        made = _drawn(facts.native, kind, seed)
    drawn = load_model(made, tokenizer=hooked.tokenizer)
    drawn.cfg.model_name = f"{hooked.cfg.model_name}, random weights ({kind}, seed {seed})"
    drawn.cfg.default_prepend_bos = hooked.cfg.default_prepend_bos
    known = facts_of(drawn)
    assert known is not None, "load_model remembers what it made"
    known.weights = f"random: {kind}, seed {seed}"
    return drawn


def check_draw(kind: str, seed: int) -> None:
    """Refuse an invalid kind or seed, before a model is loaded."""
    if kind not in get_args(Kind):
        raise OptionError(
            f'kind={kind!r}: choose "initialised" (as before training) or "shuffled" (the entries of each weight '
            "matrix permuted)"
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise OptionError(f"seed={seed!r}: give a whole number from 0 to 2^63 − 1, as torch takes no other")


def _drawn(native: Any, kind: Kind, seed: int) -> Any:
    """A new model of the same class and configuration; the given one is unchanged."""
    config = copy.deepcopy(native.config)
    config._attn_implementation_internal = None  # the class chooses its attention again
    with torch.random.fork_rng():  # the random state of the process and of every GPU is restored
        torch.manual_seed(seed)
        made = type(native)(config)
    parameter = next(native.parameters())
    made = made.to(device=parameter.device, dtype=parameter.dtype)
    return _shuffled(made, native, seed) if kind == "shuffled" else made


def _shuffled(made: Any, native: Any, seed: int) -> Any:
    """Copy every parameter of ``native`` to ``made``, with its entries permuted."""
    generator = torch.Generator().manual_seed(seed)
    made.load_state_dict(native.state_dict())
    with torch.no_grad():
        for _, values in sorted(made.named_parameters()):  # a tied parameter occurs once
            order = torch.randperm(values.numel(), generator=generator)
            values.copy_(values.flatten()[order.to(values.device)].view_as(values))
    return made
