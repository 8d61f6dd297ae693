"""Checks before the first forward pass: refuses conditions, analyses and sequences that a model cannot take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
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
from mechattn.model.load import load_model
from mechattn.model.positions import boundary_of, takes_negative_ids, takes_position_ids
from mechattn.prompts.conditions import Baseline, Condition, check_name
from mechattn.prompts.counterparts import with_changes
from mechattn.prompts.prompt import Prompt
from mechattn.prompts.token_sequences import Sequence
from mechattn.prompts.tokenization import TokenizedModel

_DECLARED = ("name", "options", "quantities", "problem", "start", "values")
PARTS: Mapping[str, Any] = {
    "rows": protocols.RowAnalysis,
    "pairs": protocols.PairAnalysis,
    "mlps": protocols.ActivationAnalysis,
    "hooks": protocols.CaptureAnalysis,
    "final": protocols.FinalAnalysis,
}  # of what an analysis may receive, by the protocol that declares it


def with_baseline(conditions: Mapping[str, Condition] | None) -> dict[str, Condition]:
    """The conditions by name, the baseline first."""
    if conditions is not None and not isinstance(conditions, Mapping):
        raise OptionError(
            'the conditions have no names; give a dictionary such as {"slash": MeaninglessTokens("/")}'
        )
    given = dict(conditions or {})
    for name, condition in given.items():
        check_name(name)
        if isinstance(condition, type):
            raise OptionError(
                f"the condition {name!r} is the class {condition.__name__}; give an instance, {condition.__name__}(…)"
            )
        if not callable(getattr(condition, "apply", None)):
            kind, hint = type(condition).__name__, "an instance such as ma.MeaninglessTokens(…)"
            if hasattr(condition, "check"):
                hint = f"ma.Baseline(intervention={kind}(…))"
            raise OptionError(f"the condition {name!r} is of type {kind}; give {hint}")
        try:
            signature(condition.apply).bind("prompt", "model", "seed")
        except TypeError as error:
            said = f"the condition {name!r}: {error}; define apply(self, prompt, model, seed=0)"
            raise ConditionError(said) from None
    return {BASELINE: given.pop(BASELINE, Baseline()), **given}


def with_names(analyses: Seq[Analysis] | Analysis | None) -> list[Analysis]:
    """The analyses; there must be at least one, and each name must be unique."""
    if analyses is not None and not isinstance(analyses, (list, tuple)):
        analyses = [cast(Analysis, analyses)]  # strings and classes are refused below
    made: list[Analysis] = [ReceivedAttention()] if analyses is None else list(analyses)
    for given in made:
        _check_analysis(given)
    names = [analysis.name for analysis in made]
    if not made or len(set(names)) < len(names):
        raise OptionError(f"analyses={names}: give at least one, and each name once")
    of: dict[str, str] = {}
    for analysis in made:
        for quantity in {name.removesuffix("_by_segment") for name in analysis.quantities}:
            if of.setdefault(quantity, analysis.name) != analysis.name:
                raise OptionError(
                    f"{of[quantity]} and {analysis.name} both measure a quantity named {quantity!r}, so its name would "
                    "not say which one is meant: rename it in one of them"
                )
    return made


def _check_analysis(given: Any) -> None:
    """Refuse an analysis that does not follow the protocol."""
    if isinstance(given, (type, str, int, float, Mapping)) or given is None:
        what = given.__name__ if isinstance(given, type) else repr(given)
        raise OptionError(
            f"analyses holds {what}, which is not an analysis; give an instance such as ma.ReceivedAttention()"
        )
    name = type(given).__name__
    if lacking := [part for part in _DECLARED if not hasattr(given, part)]:
        raise OptionError(
            f"the analysis {name} has no {', '.join(lacking)}: an analysis has {', '.join(_DECLARED)}"
        )
    if not any(isinstance(given, protocol) for protocol in PARTS.values()):
        raise OptionError(
            f"the analysis {name} receives no data: define add(sums, rows), or one of add_pairs, "
            f"add_activations, add_captures, add_final"
        )
    if not re.fullmatch(r"[A-Za-z_]\w*", str(given.name)):
        raise OptionError(
            f"the analysis {name} has the name {given.name!r}: use letters, digits and _"
        )
    for quantity, about in given.quantities.items():
        if not isinstance(about, Quantity) or isinstance(about.dims, str):
            raise OptionError(
                f"the analysis {name}: quantities[{quantity!r}] is {about!r}; give "
                'Quantity(("head",), "probability", "what it is")'
            )


def check_captures(model: HookedModel, analyses: Seq[Analysis], layers: Seq[int]) -> None:
    """Refuse an analysis that captures a hook which a layer doesn't have."""
    known = (
        model.hook_dict
        if any(isinstance(analysis, protocols.CaptureAnalysis) for analysis in analyses)
        else {}
    )
    for analysis in analyses:
        for name in analysis.captures if isinstance(analysis, protocols.CaptureAnalysis) else ():
            missing = [layer for layer in layers if f"blocks.{layer}.{name}" not in known]
            if missing:
                prefix = f"blocks.{missing[0]}."
                near = get_close_matches(
                    name, [k.removeprefix(prefix) for k in known if k.startswith(prefix)], 1
                )
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise OptionError(
                    f"{analysis.name} captures {name!r}, which layer {missing[0]} of {model.cfg.model_name} doesn't "
                    f"have{hint}; model.hook_dict lists all hooks"
                )


def _check_sequences(
    prompt: Prompt, made: dict[str, Sequence], analyses: Seq[Analysis], model: HookedModel
) -> None:
    """Refuse sequences that don't fit the model or that an analysis cannot measure."""
    check_side(prompt, made, model)
    limit, size = model.cfg.n_ctx, model.cfg.d_vocab
    for name, sequence in made.items():
        where, inserted = prompt.where, int(sequence.inserted.sum())
        if name == BASELINE and (inserted or sequence.edge_mask or sequence.interventions):
            does = "inserts tokens" if inserted else "intervenes"
            raise OptionError(
                f'the condition "baseline" {does}; the baseline is the unchanged prompt, so use another name'
            )
        if lacking := len(made[BASELINE]) - len(sequence) + inserted:
            raise PromptError(
                f"{where} has {lacking} tokens without a partner under {name!r}, so they cannot be compared; give "
                "versions of as many tokens, or patch: ma.patch and ma.edges leave such tokens out"
            )
        if len(sequence) > limit:
            raise PromptTooLong(
                f'{where} has {len(sequence):,} tokens with the condition "{name}" ({inserted} inserted); '
                f"{model.cfg.model_name} takes {limit:,}. Shorten it, or insert fewer tokens"
            )
        if len(sequence) < 2:
            raise PromptError(
                f"{where} is a single token: no query comes after it, so attention cannot be measured"
            )
        if not 0 <= int(sequence.tokens.min()) <= int(sequence.tokens.max()) < size:
            raise PromptError(
                f"{where} contains a token id outside the vocabulary (0 to {size - 1})"
            )
        for analysis in analyses:
            if problem := analysis.problem(sequence):
                raise PromptError(f"{where} {problem}")


def check_read(prompt: Prompt, made: Mapping[str, Sequence]) -> None:
    """Refuse tokens inserted after all others: no original token reads them, so nothing could change; warn of one."""
    for name, sequence in made.items():
        if not sequence.inserted.any():
            continue
        readers = int((~sequence.inserted[int(sequence.inserted.int().argmax()) :]).sum())
        if readers == 1:
            warn(
                f"only the last token (the template's newline, perhaps) reads what {name!r} inserts; nothing else can "
                'change; give prompts with an answer, or another place, such as "before_question"'
            )
        if readers == 0:
            raise ConditionError(
                f"{prompt.where} ends with what {name!r} inserts, which no other token reads; give prompts with an "
                "answer (load_prompts(…, with_answer=True), or evaluation.answered(prompts) with the model's own), or "
                'another place, such as "before_question"'
            )


def made_sequences(
    named: Mapping[str, Condition], prompts: Seq[Prompt], model: TokenizedModel, seed: int
) -> list[dict[str, Sequence]]:
    """The sequence of each prompt under each condition; only a counterpart may change original tokens."""
    made = [
        {name: some.apply(prompt, model, seed) for name, some in named.items()}
        for prompt in prompts
    ]
    for prompt, sequences in zip(prompts, made, strict=True):
        for name, sequence in sequences.items():
            if not isinstance(sequence, Sequence):
                raise ConditionError(
                    f"the condition {name!r} gives a {type(sequence).__name__} for prompt {prompt.id}: apply must "
                    f"return a Sequence, such as insert(tokenize(prompt, model), ids, at)"
                )
            if name == BASELINE or sequence.counterpart:
                continue
            again = named[name].apply(prompt, model, seed) if prompt is prompts[0] else sequence
            if not again.tokens.equal(sequence.tokens):
                raise ConditionError(
                    f"the condition {name!r} inserts other tokens into prompt {prompt.id} each time, so no run can be "
                    "repeated: draw them from apply's seed, such as random.Random(seed)"
                )
            tokens, original = sequences[BASELINE].tokens, sequence.tokens[~sequence.inserted]
            if not original.equal(tokens):
                raise ConditionError(
                    f"the condition {name!r} changes the original tokens of prompt {prompt.id} ({len(tokens)} in the "
                    f"baseline, {len(original)} here): a condition may only insert tokens, except a Counterpart"
                )
            if not sequence.of_segment("inserted")[sequence.inserted].all():
                raise ConditionError(
                    f"the condition {name!r} puts tokens that it inserts into a segment of prompt {prompt.id}: their "
                    'segment must be "inserted", as insert(tokenize(prompt, model), ids, at) makes it'
                )
            for part in ("origin", "segment"):
                if not getattr(sequence, part)[~sequence.inserted].equal(
                    getattr(sequences[BASELINE], part)
                ):
                    raise ConditionError(
                        f"the condition {name!r} changes the {part} of original tokens of prompt {prompt.id}: they "
                        "keep that of the baseline, as insert(tokenize(prompt, model), ids, at) keeps it"
                    )
    return [with_changes(sequences, BASELINE) for sequences in made]


def checked_sequences(
    named: Mapping[str, Condition],
    prompts: Seq[Prompt],
    model: HookedModel,
    seed: int,
    analyses: Seq[Analysis] = (),
) -> list[dict[str, Sequence]]:
    """The sequence of each prompt under each condition, which the model can read and the analyses can measure."""
    made = made_sequences(named, prompts, model, seed)
    for prompt, sequences in zip(prompts, made, strict=True):
        _check_sequences(prompt, sequences, analyses, model)
    check_interventions(model, [prompt.id for prompt in prompts], made)
    check_variants(load_model(model), made)  # verified again if another model was made since
    return made


def check_variants(model: HookedModel, sequences: list[dict[str, Sequence]]) -> None:
    """Refuse hidden tokens or kept positions in a model that supports neither."""
    hides = sorted(
        {name for made in sequences for name, sequence in made.items() if sequence.edge_mask}
    )
    layers = hooks.attention_layers(model)
    if hides and len(layers) < model.cfg.n_layers:
        raise OptionError(
            f"{model.cfg.model_name} has attention in {len(layers)} of {model.cfg.n_layers} layers; the other layers "
            f"would pass on tokens that attention cannot see: omit {', '.join(map(repr, hides))}"
        )
    kept = sorted(
        {name for made in sequences for name, sequence in made.items() if sequence.keeps_positions}
    )
    if kept and not takes_position_ids(model):
        raise OptionError(
            f"{model.cfg.model_name} takes no position ids (its attention computes positions itself, like ALiBi, or "
            f"has none), so the original tokens cannot keep theirs: omit {', '.join(map(repr, kept))}"
        )
    negative = {
        n: -int(s.position_ids.min())
        for made in sequences
        for n, s in made.items()
        if s.keeps_positions
    }
    if not kept or max(negative.values()) <= 0:
        return
    learned = hasattr(model, "pos_embed")
    if learned or not takes_negative_ids(model):
        name = max(negative, key=lambda condition: negative[condition])
        table = "a table of positions, where a negative one is an error or another row"
        has = "learned positions" if learned else table
        raise OptionError(
            f"{model.cfg.model_name} has {has}, and {name!r} needs {negative[name]} before the first: "
            "insert after at least as many tokens as are inserted (a longer system prompt, or a smaller count)"
        )


def check_interventions(
    model: HookedModel, ids: list[str], sequences: list[dict[str, Sequence]]
) -> None:
    """Refuse interventions that cannot act on this model or on their prompts."""
    found: dict[int, tuple[Any, list[tuple[str, Sequence]]]] = {}
    for prompt, made in zip(ids, sequences, strict=True):
        for sequence in made.values():
            for intervention in sequence.interventions:
                found.setdefault(id(intervention), (intervention, []))[1].append((prompt, sequence))
            if sequence.edge_mask and sequence.edge_mask.layers is not None:
                hooks.chosen_layers(model, sequence.edge_mask.layers)
    for intervention, asked in found.values():
        intervention.check(model, [prompt for prompt, _ in asked])
        if isinstance(intervention, ChecksSequences):
            for prompt, sequence in asked:
                intervention.check_sequence(prompt, sequence)


def positions_of(sequence: Sequence) -> int:
    """The number of positions in a sequence: fewer than its tokens if the original ones keep their positions."""
    return int(sequence.position_ids.max()) + 1


def sides_of(model: HookedModel, sequences: Seq[Mapping[str, Sequence]]) -> list[str]:
    """The side of the model's boundary on which each prompt lies, "short" or "long"; empty for a model without one."""
    boundary = boundary_of(model)
    return (
        []
        if boundary is None
        else [boundary.side(max(map(positions_of, made.values()))) for made in sequences]
    )


def counted_sides(sides: Seq[str]) -> str:
    """The number of prompts with each set of factors, in words."""
    counts = {side: sides.count(side) for side in sorted(set(sides), reverse=True)}
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{side} for {count} prompts" for side, count in counts.items())


def check_side(
    prompt: Prompt, made: Mapping[str, Sequence], model: HookedModel, new_tokens: int = 0
) -> None:
    """Refuse a prompt that is not read and answered with the same RoPE frequencies under every condition."""
    boundary = boundary_of(model)
    if boundary is None:
        return
    where, name = prompt.where, str(model.cfg.model_name)
    counts = {condition: positions_of(sequence) for condition, sequence in made.items()}
    longest = max(counts, key=lambda condition: counts[condition])
    if boundary.kind == "dynamic" and counts[longest] + new_tokens > boundary.at:
        more = f" and {new_tokens} new tokens are allowed" if new_tokens else ""
        raise PromptTooLong(
            f'{where} has {counts[longest]:,} positions with the condition "{longest}"{more}: beyond {boundary.at:,} '
            f"the frequencies of {name} are those of the longest text that it has read so far (dynamic NTK), so "
            "results for a prompt this long would depend on what was read before. Shorten it, or insert fewer tokens"
        )
    if boundary.kind == "dynamic":
        return
    for condition, count in counts.items():
        left = boundary.at - count
        hint = (
            f"Give new_tokens={left} at most, or another prompt" if left > 0 else "Omit the prompt"
        )
        if boundary.side(count) != boundary.side(count + new_tokens):
            raise PromptError(
                f'{where} has {count:,} positions with the condition "{condition}", and {new_tokens} new tokens are '
                f"allowed: beyond {boundary.at:,} positions {name} computes with other factors (LongRoPE), which would "
                f"change in the middle of an answer. {hint}"
            )
    short = min(counts, key=lambda condition: counts[condition])
    if boundary.side(counts[short]) != boundary.side(counts[longest]):
        raise PromptError(
            f'{where} has {counts[short]:,} positions with the condition "{short}" and {counts[longest]:,} with '
            f'"{longest}": beyond {boundary.at:,} {name} computes with other factors (LongRoPE), so this would compare '
            "two models and not the effect of the inserted tokens. Omit the prompt, insert fewer tokens, or let "
            "the original ones keep their positions (.unshifted())"
        )
