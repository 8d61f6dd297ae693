"""Known heads: handwritten ones, and induction heads in models trained here to copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import xarray as xr

from mechattn.analysis.attention_focus import AttentionFocus
from mechattn.engine.run import run
from mechattn.interventions.ablation import HeadAblation
from mechattn.interventions.intervention import on
from mechattn.known_answers import handmade, trained
from mechattn.known_answers.answer import KnownAnswer, compared
from mechattn.known_answers.spans import VOCABULARY, repeated_spans
from mechattn.model.hooked import HookedModel
from mechattn.model.letter_tokenizer import lettered_tokenizer
from mechattn.model.load import load_model
from mechattn.prompts.prompt import Prompt
from mechattn.stats.paired import paired

_MEASURES = {  # the measure that is exactly 1 for each handmade head
    "previous token": "previous_mass",
    "duplicate token": "duplicate_mass",
    "first token": "first_mass",
    "uniform": "entropy_share",
    "induction": "induction_mass",
}
_PROMPTS = 24
_CLOSE = 1e-5
_OF_HAND, _TRAINED = "hand-made GPT-2", "GPT-2 of two layers, trained here"
_HALF = 0.5  # of a head's attention, for it to count as an induction head


def handmade_heads() -> Iterator[KnownAnswer]:
    """Each handwritten head does what it was written to do, with both engines."""
    hooked = _hooked(handmade.handmade_model())
    prompts = _prompts(repeated_spans(_PROMPTS, torch.Generator().manual_seed(0))[0])
    by_engine = {engine: _focus(hooked, prompts, engine) for engine in ("streaming", "hooks")}
    for (layer, head), name in handmade.HEADS.items():
        measure = _MEASURES[name]
        away = max(float(abs(values[measure].sel(layer=layer, head=head) - 1).max()) for values in by_engine.values())
        source = "written by hand"
        yield compared(_OF_HAND, f"{layer}.{head} is the {name} head: {measure} 1", away, _CLOSE, source)


def trained_heads(steps: int = trained.STEPS) -> Iterator[KnownAnswer]:
    """In models that learned to copy, induction heads are found in the second layer; without training, none."""
    source = "two layers of attention can copy in no other way (Olsson et al. 2022)"
    for seed in range(2):
        name = f"{_TRAINED}, seed {seed}"
        model = trained.copying_model(seed, steps)
        tokens, foreseen = repeated_spans(_PROMPTS, torch.Generator().manual_seed(seed))
        hooked = _hooked(model)
        right = _copied(hooked, tokens, foreseen)
        found, words = induction_heads(hooked, tokens)
        layers = {layer for layer, _ in found}
        yield KnownAnswer(
            name, "it copies: 99 % of the predictable tokens", f"{right:.1%}",
            "passed" if right >= 0.99 else "failed", "trained to do so",
        )  # fmt: skip
        known = "its induction heads (mass above a half, q < 0.05) are in layer 1"
        yield KnownAnswer(name, known, words, "passed" if layers == {1} else "failed", source)
        without = _copied(hooked, tokens, foreseen, found)
        known = "without these heads it does not copy: below 20 %"
        yield KnownAnswer(name, known, f"{without:.1%}", "passed" if found and without < 0.2 else "failed", source)
    untrained = _hooked(trained.copying_model(0, steps=0))
    tokens, _ = repeated_spans(_PROMPTS, torch.Generator().manual_seed(0))
    found, words = induction_heads(untrained, tokens)
    known = "no induction head is found"
    yield KnownAnswer("the same, not trained", known, words, "failed" if found else "passed", "nothing was learned")


def induction_heads(model: HookedModel, tokens: torch.Tensor) -> tuple[list[tuple[int, int]], str]:
    """The heads with more than half of their attention on the tokens after earlier occurrences, with p and q."""
    values = _focus(model, _prompts(tokens))
    mass, null = values.induction_mass, values.induction_mass_uniform
    tested = paired((mass - null).transpose("prompt", "layer", "head").values)
    means = mass.mean("prompt").transpose("layer", "head").values
    found = [(int(i), int(j)) for i, j in zip(*((means > _HALF) & (tested.q < 0.05)).nonzero(), strict=True)]
    if not found:
        return [], f"none; the largest mass is {means.max():.2f}"
    of = [tuple(head) for head in found]
    p, q = (max(numbers[head] for head in of) for numbers in (tested.p, tested.q))
    named = ", ".join(f"{layer}.{head} {means[layer, head]:.2f}" for layer, head in found)
    return found, f"{named}; p ≤ {p:.1g}, q ≤ {q:.1g}"


def _copied(
    model: HookedModel, tokens: torch.Tensor, foreseen: torch.Tensor, ablated: list[tuple[int, int]] | None = None
) -> float:
    """The fraction of tokens that are predicted, with the outputs of some heads set to zero."""

    without = on(HeadAblation(tuple(ablated)), model) if ablated else nullcontext()
    with torch.no_grad(), without:
        logits = model(tokens)
    return float((logits[:, :-1].argmax(-1) == tokens[:, 1:])[foreseen[:, 1:]].double().mean())


def _focus(model: HookedModel, prompts: list[Prompt], engine: str = "auto") -> xr.Dataset:
    made = run(model, prompts, {}, [AttentionFocus()], engine=engine, progress=False)  # type: ignore[arg-type]
    return made["attention_focus"].sel(condition="baseline", segment="question").astype("float64")


def _prompts(tokens: torch.Tensor) -> list[Prompt]:
    return [Prompt(tokens=tuple(row), id=str(i)) for i, row in enumerate(tokens.tolist())]


def _hooked(model: Any) -> HookedModel:
    return load_model(model, tokenizer=lettered_tokenizer(VOCABULARY))
