"""What is put in place of a head's output: that of the other run, and for the controls another
prompt's, or a random step of equal norm."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mechattn.functional.activations import keyed_uniform, token_keys
from mechattn.functional.attention import visible_keys
from mechattn.model.hooked import HookedModel
from mechattn.model.hooks import attention_window
from mechattn.patching.pairs import Pair
from mechattn.patching.patched_runs import HeadOutput, LayerHead, RecordedRun, SharedTokens

PatternRows = Float[Tensor, "shared key"]  # of a head's pattern, at tokens that both runs have


def partners_of(pairs: Sequence[Pair], seed: int) -> dict[str, Pair]:
    """Another prompt's pair for each, drawn among those at least as long; none where there is
    no such pair.

    Those with the same answer are left out where there are others: what they bring may be the
    answer itself.

    Args:
        pairs: All pairs.
        seed: The seed of the draws; a prompt's draw depends on its own id, not on its index in the
            list.

    Returns:
        Partners by the id of the pair that they are drawn for.
    """
    answers = {pair.id: pair.answer.tolist() for pair in pairs}
    by_id = sorted(pairs, key=lambda pair: pair.id)

    partners = {}
    for pair in pairs:
        as_long = [other for other in by_id if len(other.origins) >= len(pair.origins)]
        others = [other for other in as_long if other.id != pair.id]
        with_another_answer = [other for other in others if answers[other.id] != answers[pair.id]]
        if others:
            generator = random.Random(f"other prompt {seed} {pair.id}")
            partners[pair.id] = generator.choice(with_another_answer or others)
    return partners


def random_steps(
    seed: int, prompt_id: str, base: RecordedRun, values: Mapping[LayerHead, HeadOutput]
) -> dict[LayerHead, HeadOutput]:
    """Each head's own output plus a random step, as long as the step to what would replace it.

    ``z + ‖value − z‖ · r / ‖r‖``, with r normally distributed.

    Args:
        seed: The seed; numbers are drawn by prompt, token, layer and head.
        prompt_id: The id of the prompt.
        base: The run that is patched.
        values: What replaces each head's output, at the tokens that both runs have.
    """
    randomised = {}
    for (layer, head), value in values.items():
        base_output = base.activations[layer][base.positions.to(value.device), head]
        # The inverse of the normal distribution is infinite at 0; numbers are multiples of 2⁻²⁴.
        above_zero = _uniform(seed, prompt_id, layer, head, value).clamp(min=2**-25)
        direction = torch.special.ndtri(above_zero).to(base_output)
        step = _with_length_of(direction, value - base_output)
        randomised[layer, head] = base_output + step
    return randomised


def shuffled_patterns(
    model: HookedModel,
    seed: int,
    prompt_id: str,
    base: RecordedRun,
    values: Mapping[LayerHead, PatternRows],
) -> dict[LayerHead, PatternRows]:
    """Each head's new probabilities, permuted among the keys that the query sees; at least as many
    keys are seen as have a probability above 0.

    Args:
        model: The hooked model.
        seed: The seed; numbers are drawn by prompt, token, layer and head.
        prompt_id: The id of the prompt.
        base: The run that is patched.
        values: What replaces each head's pattern, at the tokens that both runs have.
    """
    shuffled = {}
    for (layer, head), value in values.items():
        queries = base.positions.to(value.device)
        window = attention_window(model, layer)
        visible = visible_keys(queries, value.shape[-1], window)

        # Keys that are not seen come last in the order, and so get the zeros.
        uniform = _uniform(seed, prompt_id, layer, head, value)
        order = uniform.masked_fill(~visible, 2.0).argsort(-1)
        probabilities, _ = value.sort(-1, descending=True)
        shuffled[layer, head] = torch.zeros_like(value).scatter(-1, order, probabilities)
    return shuffled


def random_step(generator: torch.Generator, step: Tensor) -> Tensor:
    """A step in a normally distributed direction, as long as the given one."""
    direction = torch.randn(step.shape, generator=generator, dtype=torch.float64)
    return _with_length_of(direction.to(step), step)


def _with_length_of(direction: Tensor, step: Tensor) -> Tensor:
    """A direction at the length of a step: ``‖step‖ · direction / ‖direction‖``."""
    length = step.norm(dim=-1, keepdim=True)
    length_of_direction = direction.norm(dim=-1, keepdim=True)
    return length * direction / length_of_direction


def aligned_output(base: RecordedRun, source: RecordedRun, where: LayerHead) -> HeadOutput:
    """A head's output in another run, for each token of the base run that both runs have.

    Where the runs are of two prompts, tokens with which both begin are aligned with each other, and
    the rest from the end.

    Args:
        base: The run that is patched.
        source: The other run: of the same prompt, or of one that is at least as long.
        where: The layer and the head.
    """
    layer, head = where
    activation = source.activations[layer]
    return activation[_aligned_positions(base, source).to(activation.device), head]


def aligned_pattern(base: RecordedRun, source: RecordedRun, where: LayerHead) -> PatternRows:
    """A head's probabilities in another run, among the tokens that :func:`aligned_output` aligns,
    at the base run's positions; 0 at all other keys.

    Args:
        base: The run that is patched.
        source: The other run, as for :func:`aligned_output`.
        where: The layer and the head.
    """
    layer, head = where
    device = base.activations[layer].device
    base_positions = base.positions.to(device)
    source_positions = _aligned_positions(base, source).to(device)

    # Columns are positions of a run, so those of the source go to the base run's.
    rows = torch.zeros_like(base.activations[layer][base_positions, head])
    rows[:, base_positions] = source.activations[layer][source_positions, head][:, source_positions]
    return rows


def _aligned_positions(base: RecordedRun, source: RecordedRun) -> SharedTokens:
    """The position in the other run for each original token of the base run."""
    base_tokens = base.sequence.tokens[base.positions]
    source_tokens = source.sequence.tokens[source.positions]

    # If both are of one prompt, the whole of it is the shared beginning.
    length = len(base_tokens)
    agrees = base_tokens == source_tokens[:length]
    in_shared_beginning = agrees.long().cumprod(0).bool()
    from_the_start = torch.arange(length)
    from_the_end = from_the_start + len(source_tokens) - length
    return source.positions[torch.where(in_shared_beginning, from_the_start, from_the_end)]


def _uniform(seed: int, prompt_id: str, layer: int, head: int, value: Tensor) -> Tensor:
    """Numbers between 0 and 1 in the shape of a head's value, drawn by prompt, token, layer and
    head."""
    length, width = value.shape
    purpose = f"a random direction of head {head}"
    keys = token_keys(seed, [prompt_id], torch.arange(length)[None], layer, purpose)
    return keyed_uniform(keys[0], width).to(value.device)
