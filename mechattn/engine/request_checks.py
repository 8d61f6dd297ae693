"""Checks of analyses, of conditions, and of the sequences that a model is to read.

They come before the first forward pass of a run. Only the check of kept positions runs the model
itself, on a few tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from mechattn.analysis.analysis import PROTOCOLS, Analysis
from mechattn.analysis.received_attention import ReceivedAttention
from mechattn.axes import BASELINE
from mechattn.errors import ConditionError, OptionError, PromptError, PromptTooLong, warn
from mechattn.interventions.intervention import ChecksSequences
from mechattn.model import hooks
from mechattn.model.hooked import HookedModel
from mechattn.model.positions import boundary_of, takes_negative_ids, takes_position_ids
from mechattn.prompts.conditions import Baseline, Condition, check_name
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import TokenSequence, with_changes
from mechattn.prompts.tokenization import TokenizedModel

# The arguments of ``run`` and ``record_…``.
AnyPrompts = Prompt | str | Tensor | Sequence[Prompt | str]
Conditions = Mapping[str, Condition]
ChosenLayers = Iterable[int] | int | None
Analyses = Sequence[Analysis] | Analysis | None

ByCondition = Mapping[str, TokenSequence]  # the sequences of one prompt
# The attributes that every analysis must have.
_REQUIRED_ATTRIBUTES = ("name", "options", "quantities", "problem", "start", "values")


def checked_analyses(analyses: Analyses) -> list[Analysis]:
    """The analyses as a list; received attention if ``analyses`` is None.

    Raises:
        OptionError: Something is not an analysis, the list is empty, or two analyses share a name
            or the name of a quantity.
    """
    if analyses is None:
        return [ReceivedAttention()]
    if not isinstance(analyses, (list, tuple)):
        analyses = [cast(Analysis, analyses)]
    for analysis in analyses:
        _check_protocol(analysis)

    names = [analysis.name for analysis in analyses]
    if not names or len(set(names)) < len(names):
        raise OptionError(f"analyses={names}: give at least one, and each name once")

    # ``compare`` and figures look for a quantity by its name alone, with or without the suffix.
    owner_of_quantity: dict[str, str] = {}
    for analysis in analyses:
        for name in analysis.quantities:
            quantity = name.removesuffix("_by_segment")
            owner = owner_of_quantity.setdefault(quantity, analysis.name)
            if owner != analysis.name:
                raise OptionError(
                    f"{owner} and {analysis.name} both measure a quantity named {quantity!r}:"
                    " rename it in one of them"
                )
    return list(analyses)


def with_baseline(conditions: Conditions | None) -> dict[str, Condition]:
    """The conditions by name, with the baseline first.

    Raises:
        OptionError: The conditions are not a mapping, a name cannot be used, or something is not a
            condition, such as a class or an intervention alone.
    """
    if conditions is not None and not isinstance(conditions, Mapping):
        raise OptionError(
            'the conditions have no names; give a dictionary such as {"slash":'
            ' MeaninglessTokens("/")}'
        )

    conditions_by_name = dict(conditions or {})
    for name, condition in conditions_by_name.items():
        check_name(name)
        if isinstance(condition, type) or not hasattr(condition, "apply"):
            example = "an instance of a condition, such as ma.MeaninglessTokens(…)"
            if hasattr(condition, "check"):  # an intervention or its class
                intervention = condition if isinstance(condition, type) else type(condition)
                example = f"ma.Baseline(intervention={intervention.__name__}(…))"
            raise OptionError(f"the condition {name!r} is {condition!r}; give {example}")

    baseline = conditions_by_name.pop(BASELINE, Baseline())
    return {BASELINE: baseline, **conditions_by_name}


def condition_sequences(
    conditions: Conditions, prompts: Sequence[Prompt], model: TokenizedModel, seed: int
) -> list[dict[str, TokenSequence]]:
    """The sequence of each prompt under each condition.

    Only a counterpart may change original tokens.

    Args:
        conditions: The conditions by name, the baseline first.
        prompts: The prompts.
        model: The model whose tokenizer is used.
        seed: The seed of the conditions' draws.

    Returns:
        For each prompt its sequence under each condition.

    Raises:
        ConditionError: A condition that a user wrote does not return a sequence, returns different
            tokens each time, or does more than insert tokens.
    """
    sequences_of_prompts: list[dict[str, TokenSequence]] = []
    for prompt in prompts:
        sequences = {}
        for name, condition in conditions.items():
            sequence = condition.apply(prompt, model, seed)
            if not isinstance(sequence, TokenSequence):
                raise ConditionError(
                    f"the condition {name!r} gives a {type(sequence).__name__} for prompt"
                    f" {prompt.id}: apply must return a TokenSequence, such as"
                    " insert(tokenize(prompt, model), ids, at)"
                )
            sequences[name] = sequence
            if name == BASELINE or sequence.counterpart:
                continue

            # The first prompt is enough to find a condition that draws without the seed.
            if not sequences_of_prompts:
                repetition = condition.apply(prompt, model, seed)
                if not repetition.tokens.equal(sequence.tokens):
                    raise ConditionError(
                        f"the condition {name!r} inserts different tokens into prompt {prompt.id}"
                        " each time, so no run can be repeated: draw them from apply's seed"
                    )
            _check_insertion(prompt, name, sequence, sequences[BASELINE])

        # Mark the tokens that a counterpart changes.
        sequences_of_prompts.append(with_changes(sequences))
    return sequences_of_prompts


def checked_sequences(
    conditions: Conditions,
    prompts: Sequence[Prompt],
    model: HookedModel,
    seed: int,
    analyses: Sequence[Analysis] = (),
) -> list[dict[str, TokenSequence]]:
    """The sequence of each prompt under each condition, after all checks.

    If a condition keeps positions, the model is run on a few tokens. No other check runs it.

    Args:
        conditions: The conditions by name, with the baseline.
        prompts: The prompts.
        model: The model that will read the sequences.
        seed: The seed of the conditions' draws.
        analyses: The analyses that will measure them.

    Returns:
        For each prompt its sequence under each condition.

    Raises:
        MechattnError: The model cannot read a sequence, an analysis cannot measure it, or a
            condition or an intervention cannot be used.
    """
    prompt_sequences = condition_sequences(conditions, prompts, model, seed)
    for prompt, sequences in zip(prompts, prompt_sequences, strict=True):
        _check_sequences(prompt, sequences, analyses, model)

    check_interventions(model, [prompt.id for prompt in prompts], prompt_sequences)
    check_variants(model, prompt_sequences)
    return prompt_sequences


def check_is_unchanged(baseline: TokenSequence) -> None:
    """Refuse a baseline that has inserted tokens, cut edges or interventions."""
    if baseline.inserted.any() or baseline.cut_edges or baseline.interventions:
        raise OptionError(
            'the condition "baseline" inserts tokens or intervenes; the baseline is the unchanged'
            " prompt, so use another name"
        )


def check_size(prompt: Prompt, name: str, sequence: TokenSequence, model: HookedModel) -> None:
    """Refuse a sequence that is too long or too short, or has ids outside the vocabulary."""
    limit = model.cfg.n_ctx
    if len(sequence) > limit:
        inserted_count = int(sequence.inserted.sum())
        raise PromptTooLong(
            f'{prompt.where} has {len(sequence):,} tokens with the condition "{name}"'
            f" ({inserted_count} inserted); {model.cfg.model_name} takes {limit:,}. Shorten it, or"
            " insert fewer tokens"
        )

    if len(sequence) < 2:
        raise PromptError(
            f"{prompt.where} is a single token: no query comes after it, so attention cannot be"
            " measured"
        )

    last_id = model.cfg.d_vocab - 1
    if int(sequence.tokens.min()) < 0 or int(sequence.tokens.max()) > last_id:
        raise PromptError(
            f"{prompt.where} contains a token id outside the vocabulary (0 to {last_id})"
        )


def check_insertions_are_read(prompt: Prompt, sequences: ByCondition) -> None:
    """Refuse inserted tokens that no original token can read, since nothing could change.

    If a single original token can read them, there is a warning.

    Args:
        prompt: The prompt, for the message.
        sequences: Its sequence under each condition.

    Raises:
        ConditionError: No original token comes after the first inserted one.
    """
    for name, sequence in sequences.items():
        if not sequence.inserted.any():
            continue

        first_inserted = int(sequence.inserted.int().argmax())
        reader_count = int((~sequence.inserted[first_inserted:]).sum())
        if reader_count == 1:
            warn(
                f"only the last token (the template's newline, perhaps) reads what {name!r}"
                " inserts; nothing else can change; give prompts with an answer, or another place,"
                ' such as "before_question"'
            )

        if reader_count == 0:
            raise ConditionError(
                f"{prompt.where} ends with what {name!r} inserts, which no other token reads; give"
                " prompts with an answer (load_prompts(…, with_answer=True), or"
                " evaluation.answered(prompts) with the model's own), or another place, such as"
                ' "before_question"'
            )


def check_interventions(
    model: HookedModel, prompt_ids: Sequence[str], prompt_sequences: Sequence[ByCondition]
) -> None:
    """Refuse interventions that cannot act on this model or on their prompts.

    Edges that are cut in a layer that the model does not have are refused too.
    """
    # Keyed by identity: each intervention is checked once, with all sequences that it acts on.
    interventions_by_id: dict[int, Any] = {}
    uses_by_id = defaultdict[int, list[tuple[str, TokenSequence]]](list)
    for prompt_id, sequences in zip(prompt_ids, prompt_sequences, strict=True):
        for sequence in sequences.values():
            for intervention in sequence.interventions:
                interventions_by_id[id(intervention)] = intervention
                uses_by_id[id(intervention)].append((prompt_id, sequence))

            if sequence.cut_edges and sequence.cut_edges.layers is not None:
                hooks.chosen_layers(model, sequence.cut_edges.layers)

    for intervention_id, uses in uses_by_id.items():
        intervention = interventions_by_id[intervention_id]
        intervention.check(model, [prompt_id for prompt_id, _ in uses])

        if isinstance(intervention, ChecksSequences):
            for prompt_id, sequence in uses:
                intervention.check_sequence(prompt_id, sequence)


def check_variants(model: HookedModel, prompt_sequences: Sequence[ByCondition]) -> None:
    """Refuse cut edges or kept positions in a model that does not support them."""
    cutting_conditions = set()  # names of conditions that cut edges
    lowest_ids: dict[str, int] = {}  # the lowest position id of each condition that keeps positions

    for sequences in prompt_sequences:
        for name, sequence in sequences.items():
            if sequence.cut_edges:
                cutting_conditions.add(name)
            if sequence.keeps_positions:
                lowest_id = int(sequence.position_ids.min())
                lowest_ids[name] = min(lowest_id, lowest_ids.get(name, lowest_id))

    layers = hooks.attention_layers(model)
    if cutting_conditions and len(layers) < model.cfg.n_layers:
        raise OptionError(
            f"{model.cfg.model_name} has attention in {len(layers)} of {model.cfg.n_layers} layers;"
            " the other layers would pass on tokens that attention cannot see: omit"
            f" {', '.join(map(repr, sorted(cutting_conditions)))}"
        )

    if lowest_ids:
        # A model that takes the lowest position id takes all others.
        lowest_name = min(sorted(lowest_ids), key=lowest_ids.__getitem__)
        _check_kept_positions(model, lowest_ids[lowest_name], lowest_name)


def check_side(
    prompt: Prompt, sequences: ByCondition, model: HookedModel, new_tokens: int = 0
) -> None:
    """Refuse a prompt that is not read and answered with the same RoPE frequencies under every
    condition.

    Args:
        prompt: The prompt, for the message.
        sequences: Its sequence under each condition.
        model: The model; most have the same frequencies for all lengths.
        new_tokens: How many tokens may be generated after each sequence.

    Raises:
        PromptTooLong: A sequence goes beyond the boundary of a model with dynamic frequencies.
        PromptError: The sequences, or a sequence and its answer, are on both sides of the boundary.
    """
    boundary = boundary_of(model)
    if boundary is None:
        return

    position_counts = _position_counts(sequences)
    longest_name = max(position_counts, key=position_counts.__getitem__)
    shortest_name = min(position_counts, key=position_counts.__getitem__)
    most_positions = position_counts[longest_name]
    fewest_positions = position_counts[shortest_name]
    is_beyond = most_positions + new_tokens > boundary.at
    clause = f'{prompt.where} has {most_positions:,} positions with the condition "{longest_name}"'
    if new_tokens:
        clause = f"{clause} and {new_tokens} new tokens are allowed"

    # Beyond this boundary the numbers depend on the texts that the model read before.
    if boundary.kind == "dynamic":
        if is_beyond:
            raise PromptTooLong(
                f"{clause}: beyond {boundary.at:,} positions {model.cfg.model_name} computes with"
                " the frequencies of the longest text that it has read so far (dynamic NTK), so"
                " results would depend on what was read before. Shorten it, or insert fewer tokens"
            )
        return

    if boundary.side(fewest_positions) != boundary.side(most_positions):
        raise PromptError(
            f"{prompt.where} has {fewest_positions:,} positions with the condition"
            f' "{shortest_name}" and {most_positions:,} with "{longest_name}": beyond'
            f" {boundary.at:,} positions {model.cfg.model_name} computes with other factors"
            " (LongRoPE), so this would compare two models and not the effect of the inserted"
            " tokens. Omit the prompt, insert fewer tokens, or let the original ones keep their"
            " positions (.unshifted())"
        )
    if is_beyond and most_positions <= boundary.at:
        advice = "Omit the prompt"
        if most_positions < boundary.at:
            advice = f"{advice}, or give new_tokens={boundary.at - most_positions} at most"
        raise PromptError(
            f"{clause}: beyond {boundary.at:,} positions {model.cfg.model_name} computes with"
            f" other factors (LongRoPE), which would change in the middle of an answer. {advice}"
        )


def sides_of(model: HookedModel, prompt_sequences: Sequence[ByCondition]) -> list[str | None]:
    """The side of the model's boundary on which each prompt lies, "short" or "long"; None for each
    if the model's RoPE does not depend on the length."""
    boundary = boundary_of(model)
    if boundary is None:
        return [None] * len(prompt_sequences)

    sides: list[str | None] = []
    for sequences in prompt_sequences:
        # All sequences of a prompt are on the same side, see check_side.
        most_positions = max(_position_counts(sequences).values())
        sides.append(boundary.side(most_positions))
    return sides


def _check_protocol(analysis: Any) -> None:
    """Refuse an analysis that does not follow the protocol."""
    missing_attributes = [
        attribute for attribute in _REQUIRED_ATTRIBUTES if not hasattr(analysis, attribute)
    ]
    problem = ""
    if isinstance(analysis, type):
        problem = "it is a class, not an instance"
    elif missing_attributes:
        problem = f"it lacks {', '.join(missing_attributes)}"
    if problem:
        raise OptionError(
            f"analyses holds {analysis!r}, which is not an analysis ({problem}); give one such as"
            " ma.ReceivedAttention()"
        )

    if not any(isinstance(analysis, protocol) for protocol in PROTOCOLS.values()):
        raise OptionError(
            f"the analysis {analysis.name} receives no data: define add(sums, rows), or one of"
            " add_pairs, add_activations, add_captures, add_final"
        )

    # The name of an analysis becomes the name of a dataset and of a folder.
    if not str(analysis.name).isidentifier():
        raise OptionError(f"an analysis is named {analysis.name!r}: use letters, digits and _")


def _check_insertion(
    prompt: Prompt, name: str, sequence: TokenSequence, baseline: TokenSequence
) -> None:
    """Refuse a sequence that is more than the baseline with tokens inserted."""
    if not sequence.of_segment("inserted")[sequence.inserted].all():
        raise ConditionError(
            f"the condition {name!r} puts tokens that it inserts into a segment of prompt"
            f' {prompt.id}: their segment must be "inserted"'
        )

    for attribute in ("tokens", "origin", "segment"):
        original_values = getattr(sequence, attribute)[~sequence.inserted]
        if not original_values.equal(getattr(baseline, attribute)):
            raise ConditionError(
                f"the condition {name!r} changes the {attribute} of original tokens of prompt"
                f" {prompt.id}: a condition may only insert tokens, as insert(tokenize(prompt,"
                " model), ids, at) does"
            )


def _check_sequences(
    prompt: Prompt, sequences: ByCondition, analyses: Sequence[Analysis], model: HookedModel
) -> None:
    """Refuse sequences that the model cannot read, or that an analysis cannot measure."""
    baseline = sequences[BASELINE]
    check_side(prompt, sequences, model)
    check_is_unchanged(baseline)

    for name, sequence in sequences.items():
        # The number of the baseline's tokens that this sequence does not have.
        unpaired_count = len(baseline) - int((~sequence.inserted).sum())
        if unpaired_count:
            raise PromptError(
                f"{prompt.where} has {unpaired_count} tokens without a partner under {name!r}, so"
                " they cannot be compared; give versions with the same number of tokens, or patch:"
                " ma.patch and ma.edges leave such tokens out"
            )

        check_size(prompt, name, sequence, model)
        if sequence.cut_edges is not None and not sequence.cut_edges.queries.any():
            raise OptionError(
                f"{name!r} cuts edges of generated tokens only, and {prompt.where} has no answer:"
                " use evaluate, or load_prompts(…, with_answer=True)"
            )

        for analysis in analyses:
            problem = analysis.problem(sequence)
            if problem:
                raise PromptError(f"{prompt.where} {problem}")


def _check_kept_positions(model: HookedModel, lowest_id: int, name: str) -> None:
    """Refuse kept positions if the model takes no position ids, or does not take the lowest one.

    Args:
        model: The model.
        lowest_id: The lowest position id of all sequences.
        name: The condition that needs it.
    """
    if not takes_position_ids(model):
        raise OptionError(
            f"{model.cfg.model_name} takes no position ids (its attention computes positions"
            " itself, like ALiBi, or has none), so the original tokens cannot keep theirs: omit"
            f" {name!r}"
        )
    if lowest_id >= 0:
        return

    # Rotary positions may be negative if the model computes them and does not look them up.
    has_learned_positions = hasattr(model, "pos_embed")
    if not has_learned_positions and takes_negative_ids(model):
        return

    reason = "a table of positions, in which a negative one is an error or another row"
    if has_learned_positions:
        reason = "learned positions"
    raise OptionError(
        f"{model.cfg.model_name} has {reason}, and {name!r} needs {-lowest_id} positions"
        " before the first: insert no more tokens than come before them (a smaller count, or a"
        " longer system prompt)"
    )


def _position_counts(sequences: ByCondition) -> dict[str, int]:
    """The highest position of each sequence, plus 1.

    It is less than the number of tokens if the original ones keep their positions.
    """
    return {name: int(sequence.position_ids.max()) + 1 for name, sequence in sequences.items()}
