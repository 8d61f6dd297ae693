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
from mechattn.patching.patched_runs import Part, RecordedRun, Where

Output = Float[Tensor, "original d_head"]  # of a head, at the base run's original tokens
Probabilities = Float[Tensor, "original key"]  # of a head's pattern at these tokens


def partners_of(pairs: Sequence[Pair], seed: int) -> dict[str, Pair]:
    """Another prompt's pair for each, drawn among those at least as long; none where there is
    no such pair.

    Those with the same answer are left out where there are others: what they bring may be the
    answer itself.

    Args:
        pairs: All pairs.
        seed: The seed of the draws; a prompt's draw depends on its own id, not on its place.

    Returns:
        Partners by the id of the pair that they are drawn for.
    """
    by_id = {pair.id: pair for pair in pairs}
    lengths = {pair.id: len(pair.origins) for pair in pairs}
    answers = {pair.id: pair.answer.tolist() for pair in pairs}
    ids = sorted(lengths)

    partners = {}
    for pair in pairs:
        length = lengths[pair.id]
        answer = answers[pair.id]
        at_least_as_long = [name for name in ids if name != pair.id and lengths[name] >= length]
        if not at_least_as_long:
            continue

        with_another_answer = [name for name in at_least_as_long if answers[name] != answer]
        candidates = with_another_answer or at_least_as_long
        generator = random.Random(f"other prompt {seed} {pair.id}")
        drawn = generator.choice(candidates)
        partners[pair.id] = by_id[drawn]
    return partners


def random_steps(
    model: HookedModel,
    part: Part,
    seed: int,
    prompt_id: str,
    base: RecordedRun,
    values: Mapping[Where, Output],
) -> dict[Where, Output]:
    """Each head's own output and a random step, as long as that to its value; of patterns, the
    value's probabilities in random order.

    Args:
        model: The hooked model.
        part: What is patched.
        seed: The seed; numbers are drawn by prompt, token, layer and head.
        prompt_id: The id of the prompt.
        base: The run that is patched.
        values: What replaces each head's output at the run's original tokens.
    """
    randomised = {}
    for (layer, head), value in values.items():
        places = base.places.to(value.device)
        own = base.activations[layer][places, head]
        length, width = own.shape

        purpose = f"a random direction of head {head}"
        token_numbers = torch.arange(length)[None]
        keys = token_keys(seed, [prompt_id], token_numbers, layer, purpose)
        uniform = keyed_uniform(keys[0], width).to(own.device)

        if part == "pattern":
            window = attention_window(model, layer)
            randomised[layer, head] = _shuffled(value, uniform, places, window)
            continue

        # The normal distribution's inverse; of 0 it would be infinite.
        above_zero = uniform.clamp(min=2**-25)
        direction = torch.special.ndtri(above_zero).to(own)
        step = as_long(direction, value - own)
        randomised[layer, head] = own + step
    return randomised


def as_long(direction: Tensor, step: Tensor) -> Tensor:
    """A direction at the length of a step: ``‖step‖ · direction / ‖direction‖``."""
    length = step.norm(dim=-1, keepdim=True)
    length_of_direction = direction.norm(dim=-1, keepdim=True)
    return length * direction / length_of_direction


def _shuffled(
    value: Probabilities,
    uniform: Probabilities,
    places: Tensor,
    window: int | None,
) -> Probabilities:
    """Each token's probabilities, permuted among the keys that it sees: these are at least as many
    as have a probability above 0."""
    width = value.shape[-1]
    key_places = torch.arange(width, device=value.device)
    distance = places[:, None] - key_places
    unseen = (distance < 0) | (distance >= (window or width))

    # Keys that are not seen come last in the order, and so get the zeros.
    order = uniform.masked_fill(unseen, 2.0).argsort(-1)
    probabilities = value.sort(-1, descending=True).values
    shuffled = torch.zeros_like(value)
    return shuffled.scatter(-1, order, probabilities)


def aligned(base: RecordedRun, source: RecordedRun, where: Where, part: Part = "z") -> Output:
    """A head's output in another run at the base run's original tokens; from the end, after a
    shared beginning.

    Args:
        base: The run that is patched.
        source: The other run: of the same prompt, or of one that is at least as long.
        where: The head.
        part: What is patched; of patterns, the probabilities among original tokens, 0 elsewhere.
    """
    layer, head = where
    device = base.activations[layer].device
    own_places = base.places.to(device)
    own_tokens = base.sequence.tokens[base.places]
    source_tokens = source.sequence.tokens[source.places]

    # All of them, if it is the same prompt.
    own_length = len(own_tokens)
    agrees = own_tokens == source_tokens[:own_length]
    in_shared_beginning = agrees.long().cumprod(0).bool()

    from_the_start = torch.arange(own_length)
    from_the_end = from_the_start + len(source_tokens) - own_length
    source_index = torch.where(in_shared_beginning, from_the_start, from_the_end)
    source_places = source.places[source_index].to(device)
    value = source.activations[layer][source_places, head]
    if part != "pattern":
        return value

    # Columns are positions of a run, so those of the source go to the base run's.
    pattern = torch.zeros_like(base.activations[layer][own_places, head])
    pattern[:, own_places] = value[:, source_places]
    return pattern
