"""Checks before the first forward pass: refuses conditions, analyses and sequences that a model
cannot take."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from typing import Any, cast

from mechattn.analysis import analysis as protocols
from mechattn.analysis.analysis import Analysis, Quantity
from mechattn.analysis.received_attention import ReceivedAttention
from mechattn.axes import BASELINE
from mechattn.errors import ConditionError, OptionError, PromptError, PromptTooLong, warn
from mechattn.interventions.intervention import ChecksSequences
from mechattn.model import hooks
from mechattn.model.hooked import HookedModel
from mechattn.model.positions import boundary_of, takes_negative_ids, takes_position_ids
from mechattn.prompts.conditions import Baseline, Condition, check_name
from mechattn.prompts.counterparts import with_changes
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import TokenSequence
from mechattn.prompts.tokenization import TokenizedModel

# What every analysis has, and the protocols of which it follows one, by what it receives.
DECLARED = ("name", "options", "quantities", "problem", "start", "values")
PROTOCOLS: Mapping[str, Any] = {
    "rows": protocols.RowAnalysis,
    "pairs": protocols.PairAnalysis,
    "mlps": protocols.ActivationAnalysis,
    "hooks": protocols.CaptureAnalysis,
    "final": protocols.FinalAnalysis,
}


def with_baseline(conditions: Mapping[str, Condition] | None) -> dict[str, Condition]:
    """The conditions by name, the baseline first."""
    if conditions is not None and not isinstance(conditions, Mapping):
        raise OptionError(
            'the conditions have no names; give a dictionary such as {"slash":'
            ' MeaninglessTokens("/")}'
        )
    named = dict(conditions or {})
    for name, condition in named.items():
        _check_condition(name, condition)
    return {BASELINE: named.pop(BASELINE, Baseline()), **named}


def _check_condition(name: str, condition: Any) -> None:
    check_name(name)
    if isinstance(condition, type):
        raise OptionError(
            f"the condition {name!r} is the class {condition.__name__}; give an instance,"
            f" {condition.__name__}(…)"
        )

    if not callable(getattr(condition, "apply", None)):
        kind = type(condition).__name__
        hint = "an instance such as ma.MeaninglessTokens(…)"
        if hasattr(condition, "check"):  # an intervention
            hint = f"ma.Baseline(intervention={kind}(…))"
        raise OptionError(f"the condition {name!r} is of type {kind}; give {hint}")

    try:
        signature(condition.apply).bind("prompt", "model", "seed")
    except TypeError as error:
        raise ConditionError(
            f"the condition {name!r}: {error}; define apply(self, prompt, model, seed=0)"
        ) from None


def with_names(analyses: Sequence[Analysis] | Analysis | None) -> list[Analysis]:
    """The analyses; there must be at least one, and each name must be unique."""
    if analyses is None:
        analyses = [ReceivedAttention()]
    elif not isinstance(analyses, (list, tuple)):
        analyses = [cast(Analysis, analyses)]  # strings and classes are refused below
    for analysis in analyses:
        _check_analysis(analysis)

    names = [analysis.name for analysis in analyses]
    if not names or len(set(names)) < len(names):
        raise OptionError(f"analyses={names}: give at least one, and each name once")

    owners: dict[str, str] = {}
    for analysis in analyses:
        for quantity in {name.removesuffix("_by_segment") for name in analysis.quantities}:
            owner = owners.setdefault(quantity, analysis.name)
            if owner != analysis.name:
                raise OptionError(
                    f"{owner} and {analysis.name} both measure a quantity named {quantity!r}, so"
                    " its name would not say which one is meant: rename it in one of them"
                )
    return list(analyses)


def _check_analysis(analysis: Any) -> None:
    """Refuse an analysis that does not follow the protocol."""
    if isinstance(analysis, (type, str, int, float, Mapping)) or analysis is None:
        written = analysis.__name__ if isinstance(analysis, type) else repr(analysis)
        raise OptionError(
            f"analyses holds {written}, which is not an analysis; give an instance such as"
            " ma.ReceivedAttention()"
        )

    name = type(analysis).__name__
    lacking = [attribute for attribute in DECLARED if not hasattr(analysis, attribute)]
    if lacking:
        raise OptionError(
            f"the analysis {name} has no {', '.join(lacking)}: an analysis has"
            f" {', '.join(DECLARED)}"
        )
    if not any(isinstance(analysis, protocol) for protocol in PROTOCOLS.values()):
        raise OptionError(
            f"the analysis {name} receives no data: define add(sums, rows), or one of add_pairs, "
            "add_activations, add_captures, add_final"
        )
    if not re.fullmatch(r"[A-Za-z_]\w*", str(analysis.name)):
        raise OptionError(
            f"the analysis {name} has the name {analysis.name!r}: use letters, digits and _"
        )

    for quantity_name, quantity in analysis.quantities.items():
        if not isinstance(quantity, Quantity) or isinstance(quantity.dims, str):
            raise OptionError(
                f"the analysis {name}: quantities[{quantity_name!r}] is {quantity!r}; give "
                'Quantity(("head",), "probability", "what it is")'
            )


def check_captures(model: HookedModel, analyses: Sequence[Analysis], layers: Sequence[int]) -> None:
    """Refuse an analysis that captures a hook which a layer doesn't have."""
    for analysis in analyses:
        if not isinstance(analysis, protocols.CaptureAnalysis):
            continue
        for name in analysis.captures:
            for layer in layers:
                if f"blocks.{layer}.{name}" not in model.hook_dict:
                    raise OptionError(
                        f"{analysis.name} captures {name!r}, which layer {layer} of"
                        f" {model.cfg.model_name} doesn't have{_near_hook(model, layer, name)};"
                        " model.hook_dict lists all hooks"
                    )


def _near_hook(model: HookedModel, layer: int, name: str) -> str:
    """A hook of the layer with a similar name, as a question in brackets; "" if there is none."""
    prefix = f"blocks.{layer}."
    names = [hook.removeprefix(prefix) for hook in model.hook_dict if hook.startswith(prefix)]
    near = get_close_matches(name, names, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _check_sequences(
    prompt: Prompt,
    sequences: Mapping[str, TokenSequence],
    analyses: Sequence[Analysis],
    model: HookedModel,
) -> None:
    """Refuse sequences that don't fit the model or that an analysis cannot measure."""
    check_side(prompt, sequences, model)
    check_is_unchanged(sequences[BASELINE])
    for name, sequence in sequences.items():
        _check_partners(prompt, name, sequence, sequences[BASELINE])
        _check_size(prompt, name, sequence, model)
        for analysis in analyses:
            problem = analysis.problem(sequence)
            if problem:
                raise PromptError(f"{prompt.where} {problem}")


def check_is_unchanged(baseline: TokenSequence) -> None:
    """Refuse a condition named "baseline" that changes the prompt."""
    does = ""
    if baseline.inserted.any():
        does = "inserts tokens"
    elif baseline.edge_mask or baseline.interventions:
        does = "intervenes"
    if does:
        raise OptionError(
            f'the condition "baseline" {does}; the baseline is the unchanged prompt, so use another'
            " name"
        )


def _check_partners(
    prompt: Prompt, name: str, sequence: TokenSequence, baseline: TokenSequence
) -> None:
    """Refuse a sequence with fewer original tokens than the baseline."""
    lacking = len(baseline) - int((~sequence.inserted).sum())
    if lacking:
        raise PromptError(
            f"{prompt.where} has {lacking} tokens without a partner under {name!r}, so they cannot"
            " be compared; give versions of as many tokens, or patch: ma.patch and ma.edges leave"
            " such tokens out"
        )


def _check_size(prompt: Prompt, name: str, sequence: TokenSequence, model: HookedModel) -> None:
    """Refuse a sequence that is too long or too short, or has ids that the model doesn't know."""
    limit = model.cfg.n_ctx
    if len(sequence) > limit:
        inserted = int(sequence.inserted.sum())
        raise PromptTooLong(
            f'{prompt.where} has {len(sequence):,} tokens with the condition "{name}" ({inserted}'
            f" inserted); {model.cfg.model_name} takes {limit:,}. Shorten it, or insert fewer"
            " tokens"
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


def check_read(prompt: Prompt, sequences: Mapping[str, TokenSequence]) -> None:
    """Refuse tokens inserted after all others: no original token reads them, so nothing could
    change; warn of one."""
    for name, sequence in sequences.items():
        if not sequence.inserted.any():
            continue
        first_inserted = int(sequence.inserted.int().argmax())
        readers = int((~sequence.inserted[first_inserted:]).sum())
        if readers == 1:
            warn(
                f"only the last token (the template's newline, perhaps) reads what {name!r}"
                " inserts; nothing else can change; give prompts with an answer, or another place,"
                ' such as "before_question"'
            )
        if readers == 0:
            raise ConditionError(
                f"{prompt.where} ends with what {name!r} inserts, which no other token reads; give"
                " prompts with an answer (load_prompts(…, with_answer=True), or"
                " evaluation.answered(prompts) with the model's own), or another place, such as"
                ' "before_question"'
            )


def made_sequences(
    named: Mapping[str, Condition], prompts: Sequence[Prompt], model: TokenizedModel, seed: int
) -> list[dict[str, TokenSequence]]:
    """The sequence of each prompt under each condition; only a counterpart may change original
    tokens."""
    of_prompts = []
    for prompt in prompts:
        sequences = {
            name: condition.apply(prompt, model, seed) for name, condition in named.items()
        }
        for name, sequence in sequences.items():
            if not isinstance(sequence, TokenSequence):
                raise ConditionError(
                    f"the condition {name!r} gives a {type(sequence).__name__} for prompt"
                    f" {prompt.id}: apply must return a TokenSequence, such as insert(tokenize(prompt,"
                    " model), ids, at)"
                )
        of_prompts.append(sequences)

    for name, condition in named.items():
        if prompts and name != BASELINE:
            _check_repeats(name, condition, prompts[0], of_prompts[0][name], model, seed)
    for prompt, sequences in zip(prompts, of_prompts, strict=True):
        for name, sequence in sequences.items():
            if name != BASELINE and not sequence.counterpart:
                _check_insertion(prompt, name, sequence, sequences[BASELINE])
    return [with_changes(sequences, BASELINE) for sequences in of_prompts]


def _check_repeats(
    name: str,
    condition: Condition,
    prompt: Prompt,
    sequence: TokenSequence,
    model: TokenizedModel,
    seed: int,
) -> None:
    """Refuse a condition that gives something else for the same prompt and seed."""
    if sequence.counterpart:
        return
    again = condition.apply(prompt, model, seed)
    if not again.tokens.equal(sequence.tokens):
        raise ConditionError(
            f"the condition {name!r} inserts other tokens into prompt {prompt.id} each time, so no"
            " run can be repeated: draw them from apply's seed, such as random.Random(seed)"
        )


def _check_insertion(
    prompt: Prompt, name: str, sequence: TokenSequence, baseline: TokenSequence
) -> None:
    """Refuse a sequence that is more than the baseline with tokens inserted."""
    is_original = ~sequence.inserted
    original_tokens = sequence.tokens[is_original]
    if not original_tokens.equal(baseline.tokens):
        raise ConditionError(
            f"the condition {name!r} changes the original tokens of prompt {prompt.id}"
            f" ({len(baseline)} in the baseline, {len(original_tokens)} here): a condition may only"
            " insert tokens, except a Counterpart"
        )
    if not sequence.of_segment("inserted")[sequence.inserted].all():
        raise ConditionError(
            f"the condition {name!r} puts tokens that it inserts into a segment of prompt"
            f' {prompt.id}: their segment must be "inserted", as insert(tokenize(prompt, model),'
            " ids, at) makes it"
        )
    for attribute in ("origin", "segment"):
        of_original = getattr(sequence, attribute)[is_original]
        if not of_original.equal(getattr(baseline, attribute)):
            raise ConditionError(
                f"the condition {name!r} changes the {attribute} of original tokens of prompt"
                f" {prompt.id}: they keep that of the baseline, as insert(tokenize(prompt, model),"
                " ids, at) keeps it"
            )


def checked_sequences(
    named: Mapping[str, Condition],
    prompts: Sequence[Prompt],
    model: HookedModel,
    seed: int,
    analyses: Sequence[Analysis] = (),
) -> list[dict[str, TokenSequence]]:
    """The sequence of each prompt under each condition, which the model can read and the analyses
    can measure."""
    of_prompts = made_sequences(named, prompts, model, seed)
    for prompt, sequences in zip(prompts, of_prompts, strict=True):
        _check_sequences(prompt, sequences, analyses, model)
    check_interventions(model, [prompt.id for prompt in prompts], of_prompts)
    check_variants(model, of_prompts)
    return of_prompts


def check_variants(model: HookedModel, of_prompts: list[dict[str, TokenSequence]]) -> None:
    """Refuse hidden tokens or kept positions in a model that supports neither."""
    hiding = set()
    lowest_ids: dict[str, int] = {}  # of conditions that keep positions
    for sequences in of_prompts:
        for name, sequence in sequences.items():
            if sequence.edge_mask:
                hiding.add(name)
            if sequence.keeps_positions:
                lowest = int(sequence.position_ids.min())
                lowest_ids[name] = min(lowest, lowest_ids.get(name, lowest))

    layers = hooks.attention_layers(model)
    if hiding and len(layers) < model.cfg.n_layers:
        raise OptionError(
            f"{model.cfg.model_name} has attention in {len(layers)} of {model.cfg.n_layers} layers;"
            " the other layers would pass on tokens that attention cannot see: omit"
            f" {', '.join(map(repr, sorted(hiding)))}"
        )
    if not lowest_ids:
        return
    if not takes_position_ids(model):
        raise OptionError(
            f"{model.cfg.model_name} takes no position ids (its attention computes positions"
            " itself, like ALiBi, or has none), so the original tokens cannot keep theirs: omit"
            f" {', '.join(map(repr, sorted(lowest_ids)))}"
        )

    name = min(lowest_ids, key=lambda condition: lowest_ids[condition])
    if lowest_ids[name] >= 0:
        return
    is_learned = hasattr(model, "pos_embed")
    if is_learned or not takes_negative_ids(model):
        reason = "a table of positions, where a negative one is an error or another row"
        if is_learned:
            reason = "learned positions"
        raise OptionError(
            f"{model.cfg.model_name} has {reason}, and {name!r} needs {-lowest_ids[name]} before"
            " the first: insert after at least as many tokens as are inserted (a longer system"
            " prompt, or a smaller count)"
        )


def check_interventions(
    model: HookedModel, ids: list[str], of_prompts: list[dict[str, TokenSequence]]
) -> None:
    """Refuse interventions that cannot act on this model or on their prompts."""
    interventions: dict[int, Any] = {}
    uses: dict[
        int, list[tuple[str, TokenSequence]]
    ] = {}  # of each intervention: prompt and sequence
    for prompt, sequences in zip(ids, of_prompts, strict=True):
        for sequence in sequences.values():
            for intervention in sequence.interventions:
                interventions[id(intervention)] = intervention
                uses.setdefault(id(intervention), []).append((prompt, sequence))
            if sequence.edge_mask and sequence.edge_mask.layers is not None:
                hooks.chosen_layers(model, sequence.edge_mask.layers)

    for key, intervention in interventions.items():
        intervention.check(model, [prompt for prompt, _ in uses[key]])
        if isinstance(intervention, ChecksSequences):
            for prompt, sequence in uses[key]:
                intervention.check_sequence(prompt, sequence)


def positions_of(sequence: TokenSequence) -> int:
    """The number of positions in a sequence: fewer than its tokens if the original ones keep their
    positions."""
    return int(sequence.position_ids.max()) + 1


def sides_of(model: HookedModel, of_prompts: Sequence[Mapping[str, TokenSequence]]) -> list[str]:
    """The side of the model's boundary on which each prompt lies, "short" or "long"; empty for a
    model without one."""
    boundary = boundary_of(model)
    if boundary is None:
        return []
    return [
        boundary.side(max(positions_of(sequence) for sequence in sequences.values()))
        for sequences in of_prompts
    ]


def check_side(
    prompt: Prompt, sequences: Mapping[str, TokenSequence], model: HookedModel, new_tokens: int = 0
) -> None:
    """Refuse a prompt that is not read and answered with the same RoPE frequencies under every
    condition."""
    boundary = boundary_of(model)
    if boundary is None:
        return
    name = str(model.cfg.model_name)
    counts = {condition: positions_of(sequence) for condition, sequence in sequences.items()}
    longest = max(counts, key=lambda condition: counts[condition])
    shortest = min(counts, key=lambda condition: counts[condition])

    if boundary.kind == "dynamic":
        if counts[longest] + new_tokens > boundary.at:
            more = f" and {new_tokens} new tokens are allowed" if new_tokens else ""
            raise PromptTooLong(
                f"{prompt.where} has {counts[longest]:,} positions with the condition"
                f' "{longest}"{more}: beyond {boundary.at:,} the frequencies of {name} are those of'
                " the longest text that it has read so far (dynamic NTK), so results for a prompt"
                " this long would depend on what was read before. Shorten it, or insert fewer"
                " tokens"
            )
        return

    for condition, count in counts.items():
        if boundary.side(count) != boundary.side(count + new_tokens):
            left = boundary.at - count
            hint = "Omit the prompt"
            if left > 0:
                hint = f"Give new_tokens={left} at most, or another prompt"
            raise PromptError(
                f'{prompt.where} has {count:,} positions with the condition "{condition}", and'
                f" {new_tokens} new tokens are allowed: beyond {boundary.at:,} positions {name}"
                " computes with other factors (LongRoPE), which would change in the middle of an"
                f" answer. {hint}"
            )
    if boundary.side(counts[shortest]) != boundary.side(counts[longest]):
        raise PromptError(
            f'{prompt.where} has {counts[shortest]:,} positions with the condition "{shortest}" and'
            f' {counts[longest]:,} with "{longest}": beyond {boundary.at:,} {name} computes with'
            " other factors (LongRoPE), so this would compare two models and not the effect of the"
            " inserted tokens. Omit the prompt, insert fewer tokens, or let the original ones keep"
            " their positions (.unshifted())"
        )
