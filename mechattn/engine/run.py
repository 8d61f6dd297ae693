"""One pass over prompts × conditions, many analyses: everything is checked first, then the model runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from mechattn.analysis.analysis import Analysis, Calibrates
from mechattn.analysis.received_attention import ReceivedAttention
from mechattn.axes import BASELINE, SEGMENTS
from mechattn.engine.collect import Collector, Positions
from mechattn.engine.forward import Engine, chosen_forward, forward_through_hooks, position_width
from mechattn.engine.measure import measure_batch
from mechattn.engine.plan import Cost, batch_plan, memory_bytes
from mechattn.errors import OptionError, PromptError, PromptTooLong
from mechattn.model import hooks
from mechattn.model.known import Known, known
from mechattn.model.load import as_hooked, load_model
from mechattn.prompts.conditions import Baseline, Condition
from mechattn.prompts.prompt import Prompt, as_prompts
from mechattn.prompts.sequences import Batch, Sequence, pad_right
from mechattn.results import provenance
from mechattn.results.result import Result


def run(
    model: Any,
    prompts: Prompt | str | Tensor | Seq[Prompt | str],
    conditions: Mapping[str, Condition] | None = None,
    analyses: Seq[Analysis] | Analysis | None = None,
    *,
    layers: Iterable[int] | int | None = None,
    seed: int = 0,
    positions: Positions = "moments",
    memory: str = "2GiB",
    engine: Engine = "auto",
    progress: bool = True,
) -> Result:
    """Measure attention on every prompt under every condition, the baseline always among them.

    Args:
        model: A hooked model, or anything that ``load_model`` takes.
        prompts: What ``load_prompts`` gives, a text, a list of texts, or token ids [batch pos].
        conditions: Names and conditions; "baseline" is added.
        analyses: What to measure; received attention by default. All share one forward pass.
        layers: Layers to look at, from 0; all that have attention by default.
        seed: Decides every random draw, together with the prompt's id.
        positions: "moments" keeps mean, variance and n over prompts for each position; "prompts" each prompt's own too.
        memory: The budget for one layer of one batch; the batches follow from it and the lengths.
        engine: "streaming" computes attention in blocks of query rows and stores no [query, key] matrix; "hooks"
            reduces each layer's pattern as TransformerLens shows it; "auto" streams where that gives the model's
            own numbers.
        progress: Show a bar when the run takes longer than two seconds.

    Returns:
        A result with one dataset an analysis, and "sequences": the tokens that the model read.

    Raises:
        MechattnError: Something given cannot be used; found before the first forward pass, but for a model whose
            attention turns out to be none (NaN, a wrong mask), which is found at the first batch that shows it.
    """
    model = as_hooked(model)
    memory_bytes(memory)
    chosen = hooks.chosen_layers(model, layers)
    windows = {layer: hooks.attention_window(model, layer) for layer in chosen}
    prompts = as_prompts(prompts)
    named = with_baseline(conditions)
    analyses = _checked_analyses(analyses)
    if positions not in ("moments", "prompts"):
        raise OptionError(f'positions={positions!r}: choose "moments" or "prompts"')
    sequences = [{name: condition.apply(p, model, seed) for name, condition in named.items()} for p in prompts]
    for prompt, made in zip(prompts, sequences, strict=True):
        check_sequences(prompt, made, named, analyses, model)
    ids = [p.id for p in prompts]
    check_interventions(model, ids, sequences)
    model = load_model(model)  # verified again if another model was made since
    check_variants(model, sequences)
    analyses = [a.calibrated(model, chosen, prompts) if isinstance(a, Calibrates) else a for a in analyses]
    forward, why = chosen_forward(model, engine)
    cost = Cost(model.cfg.n_heads, position_width(model), square=forward is forward_through_hooks)
    plan = batch_plan([[len(s) for s in made.values()] for made in sequences], cost, memory)
    collectors = [Collector(a, ids, list(named), chosen, positions) for a in analyses]
    for batch in _progress([_batch(model, sequences, indices) for indices in plan], progress):
        measure_batch(model, batch, forward, windows, analyses, collectors, ids)
    datasets = {collector.analysis.name: collector.dataset() for collector in collectors}
    datasets["sequences"] = _sequences_dataset(model, prompts, list(named), sequences)
    about = _provenance(model, prompts, named, analyses, chosen)
    ran = {"engine": "hooks" if forward is forward_through_hooks else "streaming", "engine_reason": why}
    return Result(datasets, about | ran | {"seed": seed, "memory": memory, "positions": positions})


def with_baseline(conditions: Mapping[str, Condition] | None) -> dict[str, Condition]:
    if conditions is not None and not isinstance(conditions, Mapping):
        raise OptionError('conditions has no names; give a dictionary such as {"slash": MeaninglessTokens("/")}')
    given = dict(conditions or {})
    for name, condition in given.items():
        if not callable(getattr(condition, "apply", None)):
            raise OptionError(f"the condition {name!r} is a {type(condition).__name__}; give MeaninglessTokens(…), say")
    return {BASELINE: given.pop(BASELINE, Baseline()), **given}


def _checked_analyses(analyses: Seq[Analysis] | Analysis | None) -> list[Analysis]:
    if isinstance(analyses, Analysis):
        analyses = [analyses]
    made: list[Analysis] = [ReceivedAttention()] if analyses is None else list(analyses)
    names = [analysis.name for analysis in made]
    if not made or len(set(names)) < len(names):
        raise OptionError(f"analyses={names}: give at least one, and each name once")
    return made


def check_sequences(
    prompt: Prompt, made: dict[str, Sequence], named: dict[str, Condition], analyses: Seq[Analysis], model: Any
) -> None:
    limit, size = model.cfg.n_ctx, model.cfg.d_vocab
    for name, sequence in made.items():
        where = f'prompt {prompt.id} ("{prompt.excerpt}")'
        inserted = int(sequence.inserted.sum())
        if name == BASELINE and (inserted or sequence.knocked or sequence.interventions):
            does = "inserts tokens" if inserted else "intervenes"
            raise OptionError(
                f'the condition "baseline" {does}; every comparison is with it, so give this another name'
            )
        if len(sequence) > limit:
            raise PromptTooLong(
                f'{where} has {len(sequence):,} tokens with the condition "{name}" ({inserted} inserted); '
                f"{model.cfg.model_name} takes {limit:,}. Shorten it, or insert fewer tokens"
            )
        if len(sequence) < 2:
            raise PromptError(f"{where} is a single token: no query comes after it, so nothing can be measured")
        if not 0 <= int(sequence.tokens.min()) <= int(sequence.tokens.max()) < size:
            raise PromptError(f"{where} holds a token id outside of the vocabulary (0 to {size - 1})")
        for analysis in analyses:
            if problem := analysis.problem(sequence):
                raise PromptError(f"{where} {problem}")


def check_variants(model: Any, sequences: list[dict[str, Sequence]]) -> None:
    """Whether this model can hide the inserted tokens, and keep the positions of the others, where asked to."""
    hides = sorted({name for made in sequences for name, sequence in made.items() if sequence.knocked})
    layers = hooks.attention_layers(model)
    if hides and len(layers) < model.cfg.n_layers:
        raise OptionError(
            f"{model.cfg.model_name} has attention in {len(layers)} of {model.cfg.n_layers} layers; the others would "
            f"carry on tokens that attention cannot see: leave out {', '.join(map(repr, hides))}"
        )
    kept = sorted({name for made in sequences for name, sequence in made.items() if sequence.keeps_positions})
    if kept and not hooks.takes_position_ids(model):
        raise OptionError(
            f"{model.cfg.model_name} takes no position ids (its attention counts positions itself, as ALiBi does), so "
            f"the original tokens cannot keep theirs: leave out {', '.join(map(repr, kept))}"
        )
    negative = {n: -int(s.position_ids.min()) for made in sequences for n, s in made.items() if s.keeps_positions}
    if kept and hasattr(model, "pos_embed") and max(negative.values()) > 0:
        name = max(negative, key=lambda condition: negative[condition])
        raise OptionError(
            f"{model.cfg.model_name} has learned positions, and {name!r} needs {negative[name]} before the first: "
            "insert after at least as many tokens as are inserted (a longer system prompt, or a smaller count)"
        )


def check_interventions(model: Any, ids: list[str], sequences: list[dict[str, Sequence]]) -> None:
    """Every intervention can act on this model, and on the prompts that it is for."""
    found: dict[int, tuple[Any, list[str]]] = {}
    for prompt, made in zip(ids, sequences, strict=True):
        for sequence in made.values():
            for intervention in sequence.interventions:
                found.setdefault(id(intervention), (intervention, []))[1].append(prompt)
            if sequence.knocked and sequence.knocked.layers is not None:
                hooks.chosen_layers(model, sequence.knocked.layers)
    for intervention, prompts in found.values():
        intervention.check(model, prompts)


def _batch(model: Any, sequences: list[dict[str, Sequence]], indices: list[int]) -> Batch:
    rows = [(index, name) for index in indices for name in sequences[index]]
    pad = getattr(model.tokenizer, "pad_token_id", None) or 0
    return pad_right([sequences[index][name] for index, name in rows], rows, pad)


def _progress(batches: list[Batch], show: bool) -> Iterable[Batch]:
    from tqdm.auto import tqdm

    return tqdm(batches, desc="prompts", unit="batch", delay=2, disable=not show)


def _sequences_dataset(
    model: Any, prompts: list[Prompt], conditions: list[str], sequences: list[dict[str, Sequence]]
) -> Any:
    """The tokens that the model read, their segments and origins, and the texts of the first prompt's tokens."""
    import numpy as np
    import xarray as xr

    longest = max(len(s) for made in sequences for s in made.values())
    shape = (len(prompts), len(conditions), longest)
    arrays = {name: np.full(shape, -2, dtype=np.int32) for name in ("tokens", "origin", "segment_index")}
    for i, made in enumerate(sequences):
        for j, sequence in enumerate(made.values()):
            arrays["tokens"][i, j, : len(sequence)] = sequence.tokens
            arrays["origin"][i, j, : len(sequence)] = sequence.origin
            arrays["segment_index"][i, j, : len(sequence)] = sequence.segment
    texts = np.full(shape[1:], "", dtype=object)
    for j, sequence in enumerate(sequences[0].values()):
        texts[j, : len(sequence)] = token_texts(model, sequence.tokens)
    dims = ("prompt", "condition", "pos")
    variables: dict[str, Any] = {name: (dims, array) for name, array in arrays.items()}
    variables["first_prompt_text"] = (dims[1:], texts.astype(np.dtypes.StringDType()))
    made_dataset = xr.Dataset(variables, coords={"prompt": [p.id for p in prompts], "condition": conditions})
    return made_dataset.assign_attrs({"segments": ", ".join(SEGMENTS), "padding": -2})


def token_texts(model: Any, tokens: Tensor) -> list[str]:
    """Each token as text; its id where the model has no tokenizer."""
    if model.tokenizer is None:
        return [str(t) for t in tokens.tolist()]
    return [model.tokenizer.decode([t]) for t in tokens.tolist()]


def _provenance(
    model: Any, prompts: list[Prompt], named: dict[str, Condition], analyses: Seq[Analysis], layers: list[int]
) -> dict[str, Any]:
    parameters = next(model.parameters())
    about = known(model) or Known()
    return {
        "model": {
            "name": str(model.cfg.model_name),
            "architecture": str(getattr(model.cfg, "architecture", None) or model.cfg.original_architecture),
            "parameters": hooks.count_parameters(model if about.native is None else about.native),
            "heads": int(model.cfg.n_heads),
            "layers": int(model.cfg.n_layers),
            "dtype": str(parameters.dtype).removeprefix("torch."),
            "device": str(parameters.device),
            "prepends_bos": bool(getattr(model.cfg, "default_prepend_bos", False)),
            "hooked_by": type(model).__name__,
            "weights": about.weights,
            "verified": about.verified,
            "not_verified": about.report.not_checked if about.report else [],
            "mended": list(about.mended),
        },
        "prompts": {"count": len(prompts), "hash": provenance.digest(prompts), "template": prompts[0].template},
        "conditions": {name: repr(condition) for name, condition in named.items()},
        "analyses": {analysis.name: dict(analysis.options) for analysis in analyses},
        "measured_layers": layers,
        "threads": torch.get_num_threads(),
        "versions": provenance.versions(),
        "time": provenance.now(),
    }
