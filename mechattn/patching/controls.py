"""What replaces a head's output: its output in the other run, and for the controls its output in
another prompt's run or a random step of equal norm."""

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

HeadPattern = Float[Tensor, "shared key"]  # a head's pattern at the tokens that both runs have


def partners_of(pairs: Sequence[Pair], seed: int) -> dict[str, Pair]:
    """Draw another prompt's pair for each pair.

    Partners are drawn among the pairs that have at least as many shared tokens. A partner with the
    same answer is drawn only if all of these have it, as its activations may bring the answer
    itself.

    Args:
        pairs: All pairs.
        seed: The seed of the draws. A draw depends on the id of the prompt, and not on its index.

    Returns:
        Partners by the id of the pair that they are drawn for. A pair that is longer than all
        others has no partner.
    """
    answers = {pair.id: pair.answer.tolist() for pair in pairs}
    by_id = sorted(pairs, key=lambda pair: pair.id)

    partners = {}
    for pair in pairs:
        candidates = [other for other in by_id if len(other.origins) >= len(pair.origins)]
        candidates.remove(pair)
        contrasts = [other for other in candidates if answers[other.id] != answers[pair.id]]
        if candidates:
            generator = random.Random(f"other prompt {seed} {pair.id}")
            partners[pair.id] = generator.choice(contrasts or candidates)
    return partners


def after_random_steps(
    seed: int, prompt_id: str, base: RecordedRun, values: Mapping[LayerHead, HeadOutput]
) -> dict[LayerHead, HeadOutput]:
    """Each head's output in the base run, plus a random step.

    ``z + ‖value − z‖ · r / ‖r‖``, with r normally distributed. At each token the step has the norm
    of the step to the value that would replace the output.

    Args:
        seed: The seed. The numbers depend on the prompt, the token, the layer and the head.
        prompt_id: The id of the prompt.
        base: The run that is patched.
        values: What replaces each head's output, at the tokens that both runs have.
    """
    random_outputs = {}
    for where, value in values.items():
        base_output = base.output_of(where, base.positions)
        # The inverse of the normal distribution is infinite at 0. Other numbers are at least 2⁻²⁴.
        positive_uniform = _uniform(seed, prompt_id, where, value).clamp(min=2**-25)
        direction = torch.special.ndtri(positive_uniform).to(base_output)
        step = _with_norm_of(direction, value - base_output)
        random_outputs[where] = base_output + step
    return random_outputs


def shuffled_patterns(
    model: HookedModel,
    seed: int,
    prompt_id: str,
    base: RecordedRun,
    values: Mapping[LayerHead, HeadPattern],
) -> dict[LayerHead, HeadPattern]:
    """Each head's new pattern, with the probabilities of each query permuted among its visible
    keys.

    A query has at least as many visible keys as probabilities above 0, so none of them is lost.

    Args:
        model: The hooked model.
        seed: The seed. The numbers depend on the prompt, the token, the layer and the head.
        prompt_id: The id of the prompt.
        base: The run that is patched.
        values: What replaces each head's pattern, at the tokens that both runs have.
    """
    random_patterns = {}
    for where, value in values.items():
        layer, _ = where
        queries = base.positions.to(value.device)
        window = attention_window(model, layer)
        visible = visible_keys(queries, value.shape[-1], window)

        # All random numbers are below 1. So keys that are not visible come last in the order, and
        # get the zeros.
        uniform = _uniform(seed, prompt_id, where, value)
        order = uniform.masked_fill(~visible, 2.0).argsort(-1)
        probabilities, _ = value.sort(-1, descending=True)
        random_patterns[where] = torch.zeros_like(value).scatter(-1, order, probabilities)
    return random_patterns


def random_step(generator: torch.Generator, step: Tensor) -> Tensor:
    """A step in a normally distributed direction, with the norm of ``step`` along the last axis.

    The numbers depend on the order of all draws from the generator.
    """
    direction = torch.randn(step.shape, generator=generator, dtype=torch.float64)
    return _with_norm_of(direction.to(step), step)


def aligned_output(base: RecordedRun, source: RecordedRun, where: LayerHead) -> HeadOutput:
    """A head's output in another run, for each shared token of the base run.

    In the run of another prompt, the tokens with which both prompts begin are aligned with each
    other, and all later tokens are aligned from the end.

    Args:
        base: The run that is patched.
        source: A run of the same prompt, or of one with at least as many shared tokens.
        where: The layer and the head.
    """
    return source.output_of(where, _aligned_positions(base, source))


def aligned_pattern(base: RecordedRun, source: RecordedRun, where: LayerHead) -> HeadPattern:
    """A head's pattern in another run, moved to the positions of the base run.

    Tokens are aligned as in :func:`aligned_output`. All other keys get 0, so the probabilities of a
    query may sum to less than 1.

    Args:
        base: The run that is patched.
        source: The other run, as for :func:`aligned_output`.
        where: The layer and the head.
    """
    pattern = torch.zeros_like(base.output_of(where, base.positions))
    source_pattern = aligned_output(base, source, where)

    # Both axes of a pattern are positions, so keys are aligned as queries are.
    base_keys = base.positions.to(pattern.device)
    source_keys = _aligned_positions(base, source).to(pattern.device)
    pattern[:, base_keys] = source_pattern[:, source_keys]
    return pattern


def _uniform(seed: int, prompt_id: str, where: LayerHead, value: Tensor) -> Tensor:
    """Random numbers in [0, 1) in the shape of a head's value."""
    layer, head = where
    token_count, width = value.shape
    # Permutations of patterns are drawn with the same text: another one would change their numbers.
    purpose = f"a random direction of head {head}"
    keys = token_keys(seed, [prompt_id], torch.arange(token_count)[None], layer, purpose)
    return keyed_uniform(keys[0], width).to(value.device)


def _with_norm_of(direction: Tensor, step: Tensor) -> Tensor:
    """A direction with the norm of a step: ``‖step‖ · direction / ‖direction‖``."""
    norm = step.norm(dim=-1, keepdim=True)
    norm_of_direction = direction.norm(dim=-1, keepdim=True)
    return norm * direction / norm_of_direction


def _aligned_positions(base: RecordedRun, source: RecordedRun) -> SharedTokens:
    """For each shared token of the base run, the position in the source run aligned with it."""
    base_tokens = base.sequence.tokens[base.positions]
    source_tokens = source.sequence.tokens[source.positions]

    # Runs of one prompt have equally many shared tokens, so both alignments are the same.
    token_count = len(base_tokens)
    agrees = base_tokens == source_tokens[:token_count]
    in_shared_beginning = agrees.long().cumprod(0).bool()
    from_the_start = torch.arange(token_count)
    from_the_end = from_the_start + len(source_tokens) - token_count
    return source.positions[torch.where(in_shared_beginning, from_the_start, from_the_end)]
