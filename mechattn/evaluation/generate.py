"""Generates answers with a key-value cache, on the model without hooks that shares the parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from mechattn.errors import ModelError, OptionError, check_counts
from mechattn.functional.activations import keyed_uniform, token_keys
from mechattn.interventions.intervention import Target, read_first
from mechattn.model.architectures import PARTICULARS, Particulars
from mechattn.model.hooked import HookedModel, alone, facts_of
from mechattn.model.hooks import keeping_one
from mechattn.model.several_devices import device_of
from mechattn.prompts.prompt import MOST
from mechattn.prompts.token_sequences import PADDING, Sequence


class SamplingOptions(TypedDict, total=False):
    """How answers are sampled, as arguments of ``evaluate``."""

    new_tokens: int
    samples: int
    temperature: float | None


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled: how long and how many they are, at which temperature, and the seed of the draws."""

    new_tokens: int
    samples: int
    temperature: float
    seed: int


def sampling_of(options: SamplingOptions, seed: int) -> Sampling:
    """The options with their defaults, checked."""
    if unknown := [name for name in options if name not in SamplingOptions.__annotations__]:
        raise TypeError(f"evaluate() got an unexpected keyword argument {unknown[0]!r}")
    new_tokens, samples = options.get("new_tokens", 256), options.get("samples", 1)
    check_counts(new_tokens=new_tokens, samples=samples)
    if samples > MOST:
        raise OptionError(f"samples={samples}: give at most {MOST:,} answers to a question")
    temperature = options.get("temperature")
    if temperature is None:
        temperature = 0.0 if samples == 1 else 1.0
    if not 0 <= temperature < float("inf"):
        raise OptionError(
            f"temperature={temperature!r}: give 0 for the likeliest token, or a number above 0"
        )
    if temperature == 0 and samples > 1:
        raise OptionError(
            f"samples={samples} with temperature=0 gives the same answer {samples} times; give a temperature above 0"
        )
    return Sampling(new_tokens, samples, float(temperature), seed)


@dataclass(frozen=True)
class Request:
    """A requested answer: the prompt's id, the sequence that the model reads, and which of several answers it is."""

    prompt: str
    sequence: Sequence
    sample: int


@dataclass(frozen=True)
class Answer:
    """A generated answer without its end token; ``finished``: the model ended it before the limit."""

    tokens: tuple[int, ...]
    finished: bool
    logprob: float


def native_of(model: HookedModel) -> Any:
    """The model without hooks."""
    facts = facts_of(model)
    if facts is None or facts.native is None:
        why = facts.why_not_native if facts else "it has not gone through load_model"
        raise ModelError(
            f"{model.cfg.model_name} cannot generate here: it has no twin without hooks ({why})"
        )
    if "past_key_values" not in inspect.signature(facts.native.forward).parameters:
        raise ModelError(
            f"{model.cfg.model_name} cannot generate here: it takes no past_key_values but has another cache, "
            "like Mamba and RWKV, so each token would be read without the earlier ones"
        )
    return facts.native


@alone
def answers(
    model: Any,
    asked: Seq[Request],
    new_tokens: int,
    end: frozenset[int],
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Answer]:
    """Generate one answer for each sequence, all in one batch, padded on the left."""
    from transformers import DynamicCache

    device = device_of(model)
    batch = _Padded(asked, device)
    cache = DynamicCache(config=model.config)
    keep = keeping_one(model.config.get_text_config(decoder=True))
    written: list[Tensor] = []
    likely: list[Tensor] = []
    open_ = torch.ones(len(asked), dtype=torch.bool, device=device)
    tokens = batch.tokens
    with torch.no_grad(), batch.acting(model):
        for step in range(new_tokens):
            read = dict(
                input_ids=tokens,
                attention_mask=batch.mask(step),
                position_ids=batch.position_ids(step),
            )
            out = model(**read, past_key_values=cache, use_cache=True, **keep)
            logits = out.logits[:, -1].float()
            following = logits.argmax(-1)
            if temperature > 0:  # the one at a keyed random point of the cumulative distribution
                at = zip(asked, batch.lengths + step, strict=True)
                keys = [
                    token_keys(seed, [a.prompt], p.view(1, 1), a.sample, "answer") for a, p in at
                ]
                cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1)
                point = keyed_uniform(torch.cat(keys), 1)[:, 0].double() * cumulative[:, -1:]
                following = torch.searchsorted(cumulative, point).clamp(max=logits.shape[-1] - 1)[
                    :, 0
                ]
            written.append(following)
            likely.append(logits.gather(-1, following[:, None])[:, 0] - logits.logsumexp(-1))
            open_ &= ~torch.isin(following, torch.tensor(sorted(end), device=device))
            if not open_.any():
                break
            tokens = following[:, None]
    rows, logprobs = torch.stack(written, 1).tolist(), torch.stack(likely, 1).double()
    return [until_end(row, each, end) for row, each in zip(rows, logprobs, strict=True)]


def until_end(row: list[int], logprobs: Float[Tensor, " token"], end: frozenset[int]) -> Answer:
    """The answer up to the first end token."""
    at = next((i for i, token in enumerate(row) if token in end), None)
    through = len(row) if at is None else at + 1
    return Answer(tuple(row[:at]), at is not None, float(logprobs[:through].mean()))


class _Padded:
    """Sequences padded on the left, with the model's inputs at each step."""

    def __init__(self, asked: Seq[Request], device: torch.device) -> None:
        self.asked, self.device = asked, device
        sequences = [a.sequence for a in asked]
        self.longest = max(map(len, sequences))
        self.lengths = torch.tensor([len(s) for s in sequences], device=device)

        def padded(parts: list[Shaped[Tensor, " _"]], value: int) -> Shaped[Tensor, "batch pos"]:
            rows = [
                torch.cat([part.new_full((self.longest - len(part),), value), part])
                for part in parts
            ]
            return torch.stack(rows).to(device)

        self.tokens: Int[Tensor, "batch pos"] = padded([s.tokens for s in sequences], 0)
        self.real: Bool[Tensor, "batch pos"] = padded(
            [torch.ones(len(s), dtype=torch.bool) for s in sequences], 0
        )
        self._ids: Int[Tensor, "batch pos"] = padded([s.position_ids for s in sequences], 0)
        origin = [torch.where(s.inserted, -1 - torch.arange(len(s)), s.origin) for s in sequences]
        self._origin: Int[Tensor, "batch pos"] = padded(origin, -1 - self.longest)
        self._segments: Int[Tensor, "batch pos"] = padded([s.segment for s in sequences], PADDING)
        self.cut = None  # blind queries, the keys that they don't see, and whether generated tokens are blind too
        if any(s.edge_mask for s in sequences):
            no = [torch.zeros(len(s), dtype=torch.bool) for s in sequences]
            cut = [
                (s.edge_mask.queries, s.edge_mask.keys) if s.edge_mask else (n, n)
                for s, n in zip(sequences, no)
            ]
            later = torch.tensor(
                [bool(s.edge_mask and s.edge_mask.later) for s in sequences], device=device
            )
            self.cut = padded([q for q, _ in cut], 0), padded([k for _, k in cut], 0), later
        # Position ids with gaps need a mask: without one, transformers treats them as several packed sequences.
        self.plain = (
            bool(self.real.all())
            and self.cut is None
            and not any(s.keeps_positions for s in sequences)
        )
        self.step = 0

    def position_ids(self, step: int) -> Int[Tensor, "batch pos"]:
        """The position ids of the tokens read at this step."""
        return self._ids if step == 0 else self._ids[:, -1:] + step

    def mask(self, step: int) -> Tensor | None:
        """Which keys are tokens, None if all are; with cut edges, which query sees which key."""
        self.step = step
        if self.plain:
            return None
        real = torch.nn.functional.pad(self.real, (0, step), value=True)
        if self.cut is None:
            return real.long()
        queries, keys, later = self.cut
        keys = torch.nn.functional.pad(keys, (0, step))
        if step:
            return (real & ~(later[:, None] & keys))[:, None, None]
        positions = torch.arange(self.longest, device=self.device)
        seen = (positions[:, None] >= positions) & real[:, None]
        seen &= ~(queries[:, :, None] & keys[:, None] & (positions[:, None] != positions))
        return (seen | (positions[:, None] == positions))[:, None]

    def positions(self) -> Int[Tensor, "batch pos"]:
        """For each token read at this step, its index in the baseline sequence, for interventions."""
        return self._origin if self.step == 0 else self._origin.amax(1, keepdim=True) + self.step

    def segments(self) -> Int[Tensor, "batch pos"]:
        """The segment of each token read at this step; generated tokens have none."""
        return self._segments if self.step == 0 else torch.full_like(self._segments[:, :1], PADDING)

    @contextmanager
    def acting(self, model: Any) -> Iterator[None]:
        """The interventions of the sequences, in order, each acting on its rows."""

        def target(rows: list[int]) -> Any:
            index = torch.tensor(rows, device=self.device)
            ids = tuple(self.asked[row].prompt for row in rows)
            return lambda: Target(index, ids, self.positions()[index], self.segments()[index])

        found: dict[tuple[int, ...], tuple[tuple[Any, ...], list[int]]] = {}
        for row, asked in enumerate(self.asked):
            several = asked.sequence.interventions
            found.setdefault(tuple(map(id, several)), (several, []))[1].append(row)
        with ExitStack() as stack:
            for several, rows in found.values():
                for intervention in several:
                    stack.enter_context(intervention.acting(model, target(rows)))
            if read_first(each for several, _ in found.values() for each in several):
                mask, ids = self.mask(0), self.position_ids(0)
                model(
                    input_ids=self.tokens,
                    attention_mask=mask,
                    position_ids=ids,
                    use_cache=False,
                    **keeping_one(model.config.get_text_config(decoder=True)),
                )
            yield


def refuse_what_cannot_generate(model: Any, sequence: Sequence, name: str) -> None:
    """Refuse edges that are cut in some layers only, or in a model that takes no mask of edges."""
    if sequence.edge_mask is None:
        return
    if sequence.edge_mask.layers is not None:
        raise OptionError(
            f"{name!r} cuts edges in some layers only, which works in run but not in evaluate"
        )
    config = getattr(model.config, "text_config", model.config)
    kind = getattr(config, "model_type", "")
    if not PARTICULARS.get(kind, Particulars()).masks_edges:
        why = "has ALiBi"
    elif "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        why = "has layers with windows, whose cache is cut short"
    else:
        return
    raise OptionError(
        f"{name!r} cuts edges, and a {kind} model {why}: generation with cut edges is not supported "
        f"here. Omit the condition"
    )
