"""Models with random weights: the null to which trained models are compared."""

from __future__ import annotations

from typing import Any, Literal

import torch

from mechattn.errors import ModelError, check_choice, check_counts
from mechattn.model.booting import hooked_object
from mechattn.model.hooked import alone, device_of, model_creation_lock
from mechattn.model.load import keep_verified, known_facts, load_model
from mechattn.model.native_twin import config_for_rebuilding
from mechattn.model.own_code import as_trusted, is_of_own_code

Kind = Literal["initialised", "shuffled"]


@alone
def random_weights(model: Any, kind: Kind = "initialised", seed: int = 0, **options: Any) -> Any:
    """Return a model with the same architecture and tokenizer but random weights.

    It is verified, and refused if it fails. The given model is not changed, so two models are in
    memory at the same time.

    Args:
        model: Anything that ``load_model`` accepts.
        kind: "initialised": the architecture's own initialisation, as at the start of training;
            "shuffled": the entries of each parameter are permuted, so every matrix keeps the
            distribution of its numbers.
        seed: The seed of the draw.
        **options: Passed to ``load_model`` for the given model.

    Returns:
        A ``TransformerBridge``; its name and the provenance of its results state that the weights
        are random.

    Raises:
        OptionError: There is no such kind, or the seed is not a whole number.
        ModelError: The weights cannot be redrawn, because the model is quantised or has no
            transformers model behind it; or either model cannot be loaded and verified.

    Source:
        Random networks as the null of interpretability: arXiv:2512.18792.
    """
    check_draw(kind, seed)
    hooked = load_model(model, **options)
    facts = known_facts(hooked)
    if facts.native is None:
        raise ModelError(
            f"the weights of {hooked.cfg.model_name} cannot be redrawn: {facts.why_not_native}."
            " Give an unquantised model by its name, its directory, or as a transformers model"
        )

    with model_creation_lock, as_trusted(is_of_own_code(facts.native)):
        random_native = _random_native(facts.native, kind, seed)
        random_model = hooked_object(random_native, hooked.tokenizer)

    keep_verified(random_model)
    random_model.cfg.model_name = f"{hooked.cfg.model_name}, random weights ({kind}, seed {seed})"
    random_model.cfg.default_prepend_bos = hooked.cfg.default_prepend_bos
    random_facts = known_facts(random_model)
    random_facts.weights = "random"
    random_facts.random_weights = {"kind": kind, "seed": seed}
    return random_model


def check_draw(kind: str, seed: int) -> None:
    """Refuse an invalid kind or seed, before a model is loaded.

    Raises:
        OptionError: There is no such kind, or the seed is not a whole number from 0 to 2**63 - 1.
    """
    check_choice(Kind, kind=kind)
    check_counts(0, 2**63 - 1, seed=seed)


def _random_native(native: Any, kind: Kind, seed: int) -> Any:
    """A new transformers model of the same class and configuration, with random weights."""
    config = config_for_rebuilding(native)
    with torch.random.fork_rng():  # the random state of the process and of every GPU is restored
        torch.manual_seed(seed)
        model = type(native)(config)

    model.generation_config = getattr(native, "generation_config", None)
    model = model.to(device=device_of(native), dtype=next(native.parameters()).dtype)
    if kind == "initialised":
        return model

    generator = torch.Generator().manual_seed(seed)
    model.load_state_dict(native.state_dict())
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):  # a tied parameter occurs once
            permutation = torch.randperm(parameter.numel(), generator=generator)
            shuffled_values = parameter.flatten()[permutation.to(parameter.device)]
            parameter.copy_(shuffled_values.view_as(parameter))

    return model
