"""What is put in place of a head's output: that of the other run, and for the controls another
prompt's, or a random step of equal norm."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.functional.activations import keyed_uniform, token_keys
from mechattn.model.hooked import HookedModel
from mechattn.model.hooks import attention_window
from mechattn.patching.pairs import Pair
from mechattn.patching.patched_runs import Part, Run, Where


def partners_of(pairs: Sequence[Pair], seed: int) -> dict[str, Pair]:
    """Another prompt's pair for each, drawn among those at least as long; none for the longest.

    Those with the same answer are left out where there are others: what they bring may be the
    answer itself.
    """
    by_id = {pair.id: pair for pair in pairs}
    lengths = {pair.id: len(pair.origins) for pair in pairs}
    answers = {pair.id: pair.answer.tolist() for pair in pairs}
    partners = {}
    for pair in pairs:
        at_least_as_long = [
            name
            for name in sorted(lengths)
            if name != pair.id and lengths[name] >= lengths[pair.id]
        ]
        if not at_least_as_long:
            continue
        with_another_answer = [
            name for name in at_least_as_long if answers[name] != answers[pair.id]
        ]
        generator = random.Random(f"other prompt {seed} {pair.id}")
        drawn = generator.choice(with_another_answer or at_least_as_long)
        partners[pair.id] = by_id[drawn]
    return partners


def random_steps(
    model: HookedModel,
    part: Part,
    seed: int,
    prompt_id: str,
    base: Run,
    values: Mapping[Where, Float[Tensor, "original d_head"]],
) -> dict[Where, Float[Tensor, "original d_head"]]:
    """Each head's own output and a random step, as long as that to its value; of patterns, the
    value's probabilities in random order.
    """
    randomised = {}
    for (layer, head), value in values.items():
        places = base.places.to(value.device)
        own = base.z[layer][places, head]
        purpose = f"a random direction of head {head}"
        keys = token_keys(seed, [prompt_id], torch.arange(len(own))[None], layer, purpose)
        uniform = keyed_uniform(keys[0], own.shape[-1]).to(own.device)
        if part == "pattern":
            window = attention_window(model, layer)
            randomised[layer, head] = _shuffled(value, uniform, places, window)
        else:
            direction = torch.special.ndtri(uniform.clamp(min=2**-25)).to(own)
            randomised[layer, head] = own + as_long(direction, value - own)
    return randomised


def as_long(direction: Tensor, step: Tensor) -> Tensor:
    """A direction at the length of a step: ``‖step‖ · direction / ‖direction‖``."""
    length = step.norm(dim=-1, keepdim=True)
    return length * direction / direction.norm(dim=-1, keepdim=True)


def _shuffled(
    value: Float[Tensor, "original key"],
    uniform: Float[Tensor, "original key"],
    places: Tensor,
    window: int | None,
) -> Float[Tensor, "original key"]:
    """Each token's probabilities, permuted among the keys that it sees: these are at least as many
    as have a probability above 0."""
    width = value.shape[-1]
    distance = places[:, None] - torch.arange(width, device=value.device)
    unseen = (distance < 0) | (distance >= (window or width))
    order = uniform.masked_fill(unseen, 2.0).argsort(-1)
    probabilities = value.sort(-1, descending=True).values
    return torch.zeros_like(value).scatter(-1, order, probabilities)


def aligned(
    base: Run, source: Run, where: Where, part: Part = "z"
) -> Float[Tensor, "original d_head"]:
    """A head's output in another run at the base run's original tokens; from the end, after a
    shared beginning.
    """
    layer, head = where
    device = base.z[layer].device
    own_places = base.places.to(device)
    own_tokens = base.sequence.tokens[base.places]
    source_tokens = source.sequence.tokens[source.places]

    # All of them, if it is the same prompt.
    agrees = own_tokens == source_tokens[: len(own_tokens)]
    in_shared_beginning = agrees.long().cumprod(0).bool()
    index = torch.arange(len(own_tokens))
    from_the_end = index + len(source_tokens) - len(own_tokens)
    source_places = source.places[torch.where(in_shared_beginning, index, from_the_end)].to(device)
    value = source.z[layer][source_places, head]
    if part != "pattern":
        return value
    pattern = torch.zeros_like(base.z[layer][own_places, head])
    pattern[:, own_places] = value[:, source_places]
    return pattern
