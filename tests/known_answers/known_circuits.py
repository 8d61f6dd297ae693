"""Known circuits: models whose weights are written by hand, every true edge known, and decoys beside them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from scipy.stats import mannwhitneyu
from torch import Tensor

from mechattn.engine.record import head_means
from mechattn.interventions.ablation import HeadAblation
from mechattn.interventions.intervention import on
from mechattn.model.checkpoint import lettered_tokenizer
from mechattn.model.hooked import HookedModel
from mechattn.model.load import load_model
from mechattn.patching.edges import edge_runs, edges
from mechattn.patching.graph import graph_of, showing_edges
from mechattn.patching.pairs import request_of
from mechattn.prompts.counterparts import Counterpart
from mechattn.prompts.prompt import Prompt

SIZE = 16  # of the vocabulary, of the positions, and of every other part of the residual stream
# The parts of the stream, each one-hot: tokens and positions, two notes, what the logits read, and what nothing reads.
TOKEN, POSITION, FIRST, SECOND, OUT, JUNK = (slice(SIZE * i, SIZE * (i + 1)) for i in range(6))
_WIDTH = 6 * SIZE
_HEADS = 6
_D_HEAD = 2 * _WIDTH // _HEADS
_EPS = 1e4  # so large that a layer norm only scales
_SHARP = 12.0  # a match's score
_GAIN = 5.0  # a logit
_NOISE = 0.02  # the standard deviation of the noise on all weights
_NAMES = 8
_END = SIZE - 1
METHODS: Mapping[str, int | None] = {
    "exact": None,
    "EAP": 1,
    "EAP-IG, 5 steps": 5,
    "EAP-IG, 20 steps": 20,
}
_PROMPTS = 6


@dataclass(frozen=True)
class Look:
    """What a head compares: a part at the query with a part at the key, through a matrix times a strength."""

    query: slice
    key: slice
    matrix: Tensor
    strength: float = _SHARP


@dataclass(frozen=True)
class Written:
    """A head: what it compares, and from which part to which it carries what it reads; None if it writes nothing.

    With no looks it writes the same wherever it stands: a 1 in the first place of the part that it carries to.
    """

    looks: Sequence[Look]
    carries: tuple[slice, slice] | None


@dataclass(frozen=True)
class KnownCircuit:
    """A circuit that is known."""

    name: str  # what it computes
    heads: Mapping[tuple[int, int], Written]  # with the decoys, by layer and head
    true: frozenset[
        tuple[str, str]
    ]  # edges by which what differs between a prompt's versions reaches the answer
    prompts: Callable[[int, int], list[Prompt]]  # makes a number of pairs with a seed

    @property
    def nodes(self) -> set[str]:
        """The heads of the circuit."""
        return {writer for writer, _ in self.true} - {"embedding"}

    def model(self, seed: int = 0) -> HookedModel:
        """The model, with noise on all weights so that no score is exactly 0; loaded once."""
        return _loaded(self.name, seed)


def known_circuits() -> list[KnownCircuit]:
    """Induction, also with a constant or a further step, and a circuit that inhibits the repeated of two names."""
    same, before = (
        torch.eye(SIZE),
        torch.eye(SIZE).roll(-1, 1),
    )  # before: the query's position matches the one before
    previous, token = Look(POSITION, POSITION, before), Look(TOKEN, TOKEN, same)
    duplicate = [token, Look(POSITION, POSITION, same, -2 * _SHARP)]
    induct, further = Look(TOKEN, FIRST, same), Look(TOKEN, SECOND, same)
    ends = torch.zeros(SIZE, SIZE)
    ends[_END, 1:3] = 1.0  # the last token looks at the two names
    astray, back = torch.zeros(SIZE, SIZE), torch.zeros(SIZE, SIZE)
    astray[:, 0] = back[0, 0] = 1.0  # every token looks at the start, unless a constant prevents it
    held = [
        induct,
        Look(TOKEN, POSITION, astray, 2 * _SHARP),
        Look(SECOND, POSITION, back, -2 * _SHARP),
    ]
    mover = [Look(TOKEN, POSITION, ends), Look(SECOND, TOKEN, same, -_SHARP)]
    note, out, junk = (TOKEN, FIRST), (TOKEN, OUT), (TOKEN, JUNK)
    two_layers = {
        ("embedding", "L0H0.v"),
        ("L0H0", "L1H0.k"),
        ("embedding", "L1H0.v"),
        ("L1H0", "logits"),
    }
    return [
        KnownCircuit(
            "induction, two layers",
            {(0, 0): Written([previous], note), (1, 0): Written([induct], out)}
            | _decoys({0: [[previous], duplicate], 1: [[induct], duplicate]}, junk),
            frozenset(two_layers),
            lambda count, seed: _sequences(count, seed, 1),
        ),
        KnownCircuit(
            "induction that needs a constant, two layers",
            {(0, 0): Written([previous], note), (0, 5): Written([], (TOKEN, SECOND)), (1, 0): Written(held, out)}
            | _decoys({0: [[previous], duplicate], 1: [held, duplicate]}, junk),
            frozenset(two_layers),
            lambda count, seed: _sequences(count, seed, 1),
        ),
        KnownCircuit(
            "induction over a gap, three layers",
            {(0, 0): Written([previous], note), (1, 0): Written([previous], (FIRST, SECOND))}
            | {(2, 0): Written([further], out)}
            | _decoys({0: [[previous], duplicate], 1: [[previous], [induct]], 2: [[further], [induct]]}, junk),
            frozenset({("embedding", "L0H0.v"), ("L0H0", "L1H0.v"), ("L1H0", "L2H0.k"), ("embedding", "L2H0.v"),
                       ("L2H0", "logits")}),
            lambda count, seed: _sequences(count, seed, 2),
        ),
        KnownCircuit(
            "the name that is not repeated, three layers",
            {(0, 0): Written(duplicate, note), (1, 0): Written([previous], (FIRST, SECOND))}
            | {(2, 0): Written(mover, out)}
            | _decoys({0: [duplicate, [previous]], 1: [[previous], duplicate], 2: [mover, mover[:1]]}, junk),
            frozenset({("embedding", "L0H0.q"), ("L0H0", "L1H0.v"), ("L1H0", "L2H0.q"), ("L2H0", "logits")}),
            _names,
        ),
    ]  # fmt: skip


@cache
def _loaded(name: str, seed: int) -> HookedModel:
    (circuit,) = (circuit for circuit in known_circuits() if circuit.name == name)
    return load_model(_written(circuit.heads, seed), tokenizer=lettered_tokenizer(SIZE))


def _decoys(
    looks: Mapping[int, Sequence[Sequence[Look]]], junk: tuple[slice, slice]
) -> dict[tuple[int, int], Written]:
    """In each layer heads that attend in these ways and write where nothing reads, and as many that write nothing."""
    made: dict[tuple[int, int], Written] = {}
    for layer, ways in looks.items():
        for i, way in enumerate(ways):
            made[layer, 1 + 2 * i], made[layer, 2 + 2 * i] = Written(way, junk), Written(way, None)
    return made


def _written(heads: Mapping[tuple[int, int], Written], seed: int) -> Any:
    """A GPT-2 with these heads; every part is there with both signs, so that nothing that is written has a mean."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers = 1 + max(layer for layer, _ in heads)
    config = GPT2Config(
        vocab_size=SIZE, n_positions=SIZE, n_embd=2 * _WIDTH, n_layer=layers, n_head=_HEADS, n_inner=4,
        layer_norm_epsilon=_EPS, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model, eye = GPT2LMHeadModel(config).eval(), torch.eye(SIZE)
    generator = torch.Generator().manual_seed(seed)

    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.zero_()
            if weight.ndim > 1 and ".mlp." not in name:
                weight.normal_(0, _NOISE, generator=generator)
        for norm in (m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)):
            norm.weight.fill_(_EPS**0.5)
        stream = model.transformer
        for table, part in ((stream.wte, TOKEN), (stream.wpe, POSITION)):
            _both_signs(table.weight, part, eye)
        for (layer, head), spec in heads.items():
            _write(stream.h[layer].attn, head, spec, eye)
        model.lm_head.weight[:, OUT] += _GAIN * eye

    return model


def _both_signs(weight: Tensor, part: slice, values: Tensor) -> None:
    weight[:, part] += values
    weight[:, part.start + _WIDTH : part.stop + _WIDTH] -= values


def _write(attention: Any, head: int, spec: Written, eye: Tensor) -> None:
    """Write a head's matrices; looks at the same part of the keys share dimensions of the head."""
    start, keys = head * _D_HEAD, list(dict.fromkeys(look.key.start for look in spec.looks))
    q, v = attention.c_attn.weight[:, start:], attention.c_attn.weight[:, 4 * _WIDTH + start :]
    for look in spec.looks:
        at = SIZE * keys.index(look.key.start)
        q[look.query, at : at + SIZE] += look.strength * _D_HEAD**0.5 * look.matrix

    for i, key in enumerate(keys):
        at = 2 * _WIDTH + start + SIZE * i
        attention.c_attn.weight[key : key + SIZE, at : at + SIZE] += eye

    if spec.carries is None:
        attention.c_proj.weight[start : start + _D_HEAD] = 0.0
        return
    source, target = spec.carries
    if spec.looks:
        v[source, :SIZE] += eye
    else:
        attention.c_attn.bias[4 * _WIDTH + start] = 1.0

    _both_signs(attention.c_proj.weight[start : start + SIZE], target, eye)


def _sequences(count: int, seed: int, step: int) -> list[Prompt]:
    """Different tokens and one of them again: the answer is the token a fixed number of steps after it."""
    prompts = []
    for index in range(count):
        draw = random.Random(f"known circuit {seed} {index} {step}")
        own = draw.sample(range(SIZE - 1), 8)
        last = own[draw.randrange(1, 8 - step)]
        answer = own[own.index(last) + step]
        other = own
        wrong = answer
        while wrong == answer:  # another order, in which another token follows
            other = draw.sample(own, 8)
            place = other.index(last)
            wrong = other[place + step] if 1 <= place <= 7 - step else answer
        prompts.append(_pair(index, (*own, last), (*other, last), answer, wrong))
    return prompts


def _names(count: int, seed: int) -> list[Prompt]:
    """Two names, one of them again, and the end: the answer is the other; the counterpart repeats the other."""
    prompts = []
    for index in range(count):
        draw = random.Random(f"known names {seed} {index}")
        first, second = draw.sample(range(_NAMES), 2)
        start, between = draw.sample(range(_NAMES, _END), 2)
        opening = (start, first, second, between)
        own = (*opening, second, _END)
        other = (*opening, first, _END)
        prompts.append(_pair(index, own, other, first, second))
    return prompts


def _pair(
    index: int, own: tuple[int, ...], other: tuple[int, ...], answer: int, wrong: int
) -> Prompt:
    return Prompt(
        tokens=own, counterpart=other, answer_tokens=(answer,), other_answer=(wrong,), id=str(index)
    )


def edge_sizes(
    circuit: KnownCircuit, method: str, seed: int = 0, prompts: int = _PROMPTS
) -> dict[tuple[str, str], float]:
    """How much a method finds each edge to matter: the size of its mean effect."""
    model = circuit.model(seed)
    pairs = circuit.prompts(prompts, seed)
    steps = METHODS[method]
    graph = graph_of(model)
    if steps is None:
        with showing_edges(model):
            request = request_of(model, pairs, Counterpart(), None, "noising", "1GiB", 0)
            effects = [
                edge_runs(model, graph, 2**31, pair).exact(graph.edges) for pair in request.pairs
            ]
        mean_effect = np.mean(effects, axis=0)
    else:
        effect = edges(model, pairs, Counterpart(), steps=steps).effects.effect
        mean_effect = effect.mean("prompt").values[graph.exists]

    named = [(graph.writers[w], graph.readers[r]) for w, r in graph.edges]
    return dict(zip(named, abs(mean_effect), strict=True))


def scores_of(
    circuit: KnownCircuit, method: str, seed: int = 0, prompts: int = _PROMPTS
) -> dict[str, float]:
    """How well a method tells the true edges, and the true heads, from all others; see `scores`."""
    return scores(circuit, edge_sizes(circuit, method, seed, prompts))


def scores(circuit: KnownCircuit, size_of: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """How well sizes of edges tell the true edges, and the true heads, from all others.

    AUROC: the probability that a true one has a larger size than another; precision (and recall) of as many edges as
    there are true ones. A head's size is the largest of its edges'.
    """
    sizes = np.array(list(size_of.values()))
    true = np.array([edge in circuit.true for edge in size_of])
    precision = true[np.argsort(-sizes, kind="stable")[: true.sum()]].mean()

    writers = np.array([writer for writer, _ in size_of])
    heads = [head for head in dict.fromkeys(writers) if "H" in head]
    largest = np.array([sizes[writers == head].max() for head in heads])
    of_circuit = np.array([head in circuit.nodes for head in heads])
    return {
        "edges": auroc(sizes, true),
        "heads": auroc(largest, of_circuit),
        "precision": float(precision),
    }


def auroc(scores: np.ndarray, true: np.ndarray) -> float:
    """The probability that a true one scores higher than another; ties count half."""
    return float(mannwhitneyu(scores[true], scores[~true]).statistic / (true.sum() * (~true).sum()))


def falls_without(
    circuit: KnownCircuit, heads: Sequence[tuple[int, int]], mean: bool, prompts: int = 8
) -> list[float]:
    """How far the logit difference falls, as a fraction of itself, with each head's output set to 0 or to its mean."""
    model = circuit.model()
    pairs = circuit.prompts(2 * prompts, 0)
    means = None
    if mean:
        others = [Prompt(tokens=pair.tokens, id=pair.id) for pair in pairs[prompts:]]
        means = head_means(model, others)

    tokens = torch.tensor([pair.tokens for pair in pairs[:prompts]])
    answers = [(pair.answer_tokens[0], int(pair.other_answer[0])) for pair in pairs[:prompts]]

    def mean_logit_diff() -> float:
        with torch.no_grad():
            logits = model(tokens)[:, -1]
        answer, other_answer = logits.gather(1, torch.tensor(answers)).T
        return float((answer - other_answer).mean())

    before = mean_logit_diff()
    falls = []
    for head in heads:
        with on(HeadAblation((head,), means), model):
            falls.append(1 - mean_logit_diff() / before)
    return falls
