"""What is put in place of a head's output: that of the other run, and for the controls another
prompt's, or a random step of equal norm."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechattn.functional.activations import keyed_uniform, token_keys
from mechattn.model.hooked import HookedModel
from mechattn.model.hooks import attention_window
from mechattn.patching.pairs import Pair
from mechattn.patching.patched_runs import RecordedRun, Where

Output = Float[Tensor, "original d_head"]  # of a head, at the base run's original tokens
Rows = Float[Tensor, "original key"]  # of a head's pattern at these tokens


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
    seed: int, prompt_id: str, base: RecordedRun, values: Mapping[Where, Output]
) -> dict[Where, Output]:
    """Each head's own output and a random step, as long as that to its value.

    Args:
        seed: The seed; numbers are drawn by prompt, token, layer and head.
        prompt_id: The id of the prompt.
        base: The run that is patched.
        values: What replaces each head's output at the run's original tokens.
    """
    randomised = {}
    for (layer, head), value in values.items():
        base_output = base.activations[layer][base.places.to(value.device), head]
        # The normal distribution's inverse; of 0 it would be infinite.
        above_zero = _uniform(seed, prompt_id, layer, head, value).clamp(min=2**-25)
        direction = torch.special.ndtri(above_zero).to(base_output)
        step = as_long(direction, value - base_output)
        randomised[layer, head] = base_output + step
    return randomised


def shuffled_patterns(
    model: HookedModel, seed: int, prompt_id: str, base: RecordedRun, values: Mapping[Where, Rows]
) -> dict[Where, Rows]:
    """Each head's new probabilities, permuted among the keys that the query sees: these are at
    least as many as have a probability above 0.

    Args:
        model: The hooked model.
        seed: As for :func:`random_steps`, like the rest.
        prompt_id: The id of the prompt.
        base: The run that is patched.
        values: What replaces each head's pattern at the run's original tokens.
    """
    shuffled = {}
    for (layer, head), value in values.items():
        key_count = value.shape[-1]
        key_pos = torch.arange(key_count, device=value.device)
        query_pos = base.places.to(value.device)
        distance = query_pos[:, None] - key_pos
        window = attention_window(model, layer) or key_count
        unseen = (distance < 0) | (distance >= window)

        # Keys that are not seen come last in the order, and so get the zeros.
        uniform = _uniform(seed, prompt_id, layer, head, value)
        order = uniform.masked_fill(unseen, 2.0).argsort(-1)
        probabilities = value.sort(-1, descending=True).values
        shuffled[layer, head] = torch.zeros_like(value).scatter(-1, order, probabilities)
    return shuffled


def as_long(direction: Tensor, step: Tensor) -> Tensor:
    """A direction at the length of a step: ``‖step‖ · direction / ‖direction‖``."""
    length = step.norm(dim=-1, keepdim=True)
    length_of_direction = direction.norm(dim=-1, keepdim=True)
    return length * direction / length_of_direction


def aligned_output(base: RecordedRun, source: RecordedRun, where: Where) -> Output:
    """A head's output in another run at the base run's original tokens; from the end, after a
    shared beginning.

    Args:
        base: The run that is patched.
        source: The other run: of the same prompt, or of one that is at least as long.
        where: The layer and the head.
    """
    layer, head = where
    device = base.activations[layer].device
    return source.activations[layer][_aligned_pos(base, source).to(device), head]


def aligned_pattern(base: RecordedRun, source: RecordedRun, where: Where) -> Rows:
    """A head's probabilities among original tokens in another run, at the base run's positions; 0
    elsewhere. As for :func:`aligned_output`."""
    layer, head = where
    device = base.activations[layer].device
    base_pos = base.places.to(device)
    source_pos = _aligned_pos(base, source).to(device)

    # Columns are positions of a run, so those of the source go to the base run's.
    rows = torch.zeros_like(base.activations[layer][base_pos, head])
    rows[:, base_pos] = source.activations[layer][source_pos, head][:, source_pos]
    return rows


def _aligned_pos(base: RecordedRun, source: RecordedRun) -> Int[Tensor, " original"]:
    """The position in the other run for each original token of the base run."""
    base_tokens = base.sequence.tokens[base.places]
    source_tokens = source.sequence.tokens[source.places]

    # If both are of one prompt, the whole of it is the shared beginning.
    length = len(base_tokens)
    agrees = base_tokens == source_tokens[:length]
    in_shared_beginning = agrees.long().cumprod(0).bool()
    from_the_start = torch.arange(length)
    from_the_end = from_the_start + len(source_tokens) - length
    return source.places[torch.where(in_shared_beginning, from_the_start, from_the_end)]


def _uniform(seed: int, prompt_id: str, layer: int, head: int, value: Tensor) -> Tensor:
    """Numbers between 0 and 1 in the shape of a head's value, drawn by prompt, token, layer and
    head."""
    length, width = value.shape
    purpose = f"a random direction of head {head}"
    keys = token_keys(seed, [prompt_id], torch.arange(length)[None], layer, purpose)
    return keyed_uniform(keys[0], width).to(value.device)
