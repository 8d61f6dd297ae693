"""What arXiv:2510.01032 says of attention under inserted tokens, where it is exact, and not elsewhere."""

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.analysis.affine_shift import split_rows
from mechattn.engine.batches import measure_batch
from mechattn.engine.engines import forward_in_blocks
from mechattn.errors import OptionError
from mechattn.model import hooks, patterns_at_hooks
from mechattn.prompts.token_sequences import pad_right
from tests.analysis.plain import MECHANISMS
from tests.tiny_families import tiny_model

SHORT = [
    ma.Prompt(f"Tom has {n} apples and gives {n - 1} to Mia.", system="Solve it.", id=str(n))
    for n in (3, 7)
]
SLASH = ma.MeaninglessTokens("/", 20)


@pytest.fixture(params=MECHANISMS)
def toy_of_each_kind(request, shared):
    return shared(request.param)


def shift_of(model, prompts, **conditions):
    return ma.run(model, prompts, conditions, [ma.analyses.AffineShift(), ma.ReceivedAttention()])


class Parts:
    """An analysis that keeps the parts of every query."""

    name = "parts"
    options = {}
    quantities = {}

    def __init__(self):
        self.seen = {}

    def problem(self, sequence):
        return None

    def start(self, batch, heads):
        return {}

    def add_pairs(self, sums, rows):
        self.seen.setdefault(rows.layer, []).append(split_rows(rows))

    def values(self, sums, batch, window):
        return {}


def parts_of(model, prompt, condition):
    """For each layer the split of all queries of the sequence with inserted tokens, and the sequence."""
    made = [ma.Baseline().apply(prompt, model), condition.apply(prompt, model)]
    batch = pad_right(made, [(0, "baseline"), (0, "inserted")], 0)
    windows = {
        layer: hooks.attention_window(model, layer) for layer in hooks.attention_layers(model)
    }
    analysis = Parts()
    measure_batch(model, batch, forward_in_blocks, windows, [analysis], [prompt.id])
    names = ("output", "before", "scale", "shift", "rerouting", "new_values")
    for layer, blocks in analysis.seen.items():
        yield (
            layer,
            {name: torch.cat([getattr(block, name)[1] for block in blocks], 1) for name in names},
            made[1],
        )


def test_the_four_parts_are_the_output_in_every_layer(toy_of_each_kind, short_prompts):
    """Before the insertion nothing changes: λ = 1, and the output is the same."""
    for layer, part, sequence in parts_of(toy_of_each_kind, short_prompts[0], SLASH):
        original = sequence.origin >= 0
        scaled = part["scale"][..., None] * part["before"]
        whole = scaled + part["shift"] + part["rerouting"] + part["new_values"]
        largest = part["output"].abs().max()
        error = (whole - part["output"])[:, original].abs().max() / largest
        assert error < 3e-6, f"layer {layer}"

        first = int(sequence.inserted.nonzero()[0])
        assert first > 2
        assert (part["scale"][:, :first] - 1).abs().max() == 0
        change = (part["output"] - part["before"])[:, :first].abs().max()
        assert change < 1e-5 * largest, f"layer {layer}"
        assert (part["scale"][:, first + 20 : first + 23] < 1).all()


@pytest.mark.parametrize("name", ["toy:llama", "toy:gemma3"])
def test_kept_positions_make_layer_0_affine_and_no_other(name, prompts, shared):
    """In a windowed layer only as long as nothing leaves the window: inserted tokens push others out of it."""
    model = shared(name)
    window = hooks.attention_window(model, 0)
    for some in [SHORT] if window is None else [SHORT, prompts[:2]]:
        result = shift_of(model, some, slash=SLASH, unshifted=SLASH.unshifted())
        error = result["affine_shift"].relative_error.sel(segment="question")
        largest = error.max(("prompt", "head"))
        in_layer_0 = largest.sel(condition="unshifted", layer=0)
        if some is not SHORT:
            assert in_layer_0 > 1e-3
            continue
        assert in_layer_0 < 1e-5, name
        assert largest.sel(condition="slash", layer=0) > 1e-3, name
        assert largest.sel(condition="unshifted", layer=1) > 1e-3, name


def test_at_the_start_without_bos_layer_0_is_affine(tokenizer):
    """Every original token keeps its distance to every other; with a BOS ahead it does not."""
    for family in ("Llama", "BLOOM"):
        model = ma.load_model(tiny_model(family, len(tokenizer)), tokenizer=tokenizer)
        start = ma.MeaninglessTokens("/", 20, place="start")
        errors = []
        for bos in (False, True):
            model.cfg.default_prepend_bos = bos
            result = shift_of(model, SHORT, start=start)
            dataset = result["affine_shift"].sel(condition="start", segment="question", layer=0)
            errors.append(float(dataset.relative_error.max()))
        assert errors[0] < 2e-5, family
        assert errors[1] > 100 * errors[0], family


def second_over_first(part, queries):
    """How far each head's shifts are from rank 1, 2 …: singular values over the first [head, rank]."""
    values = torch.linalg.svdvals(part["shift"][:, queries].double())
    return values / values[:, :1]


def test_shift_rank_is_the_number_of_token_types(toy, prompts):
    """In layer 0 with RoPE: "/" without spaces is one type; "/" and then " /" are two; random tokens are many."""
    conditions = {
        "one": ma.MeaninglessTokens("/", 20, separator=""),
        "two": SLASH,
        "random": ma.conditions.RandomTokens(20),
    }
    types = {name: len(set(c.filler(prompts[0], toy))) for name, c in conditions.items()}
    assert (types["one"], types["two"]) == (1, 2)
    largest = {}
    for name, condition in conditions.items():
        layer, part, sequence = next(parts_of(toy, prompts[0], condition))
        assert layer == 0
        after = (sequence.origin >= 0) & (sequence.inserted.cumsum(0) > 0)
        largest[name] = second_over_first(part, after).amax(0)
    assert largest["one"][1] < 1e-6
    assert largest["two"][1] > 1e-4
    assert largest["two"][2] < 1e-6
    assert largest["random"][1] > 0.1


def patterns_of_layer_0(model, prompt, condition):
    """Patterns [head, query, key] of the baseline, and of the same tokens under the condition; and the baseline."""
    baseline = ma.Baseline().apply(prompt, model)
    changed = condition.apply(prompt, model)
    patterns = []

    def see(layer, pattern, v):
        patterns.append(pattern[0].double())

    for sequence in (baseline, changed):
        real = torch.ones(1, len(sequence), dtype=torch.bool)
        patterns_at_hooks.forward_with_patterns(model, sequence.tokens[None], real, [0], see)
    before, after = patterns
    original = changed.origin >= 0
    return before, after[:, original][:, :, original], baseline


@pytest.mark.parametrize("name", ["toy:llama", "toy:gemma3"])
def test_question_to_question_ratios_are_equal_in_layer_0(name, short_prompts, shared):
    """A'[q, k] / A[q, k] is one number for all question keys of a query; not for keys before the insertion."""
    before, after, baseline = patterns_of_layer_0(shared(name), short_prompts[4], SLASH)
    ratio = torch.where(before > 1e-3, after / before, torch.nan)
    question = baseline.of_segment("question")
    queries = question.nonzero()[2:, 0]
    of_question, before_it = (
        ratio[:, queries][..., keys].numpy() for keys in (question, ~question)
    )
    assert np.nanmax(np.nanmax(of_question, -1) / np.nanmin(of_question, -1)) < 1 + 1e-4
    assert np.nanmax(np.nanmax(before_it, -1) / np.nanmin(before_it, -1)) > 1.01


@pytest.mark.parametrize("family", ["BLOOM", "MPT"])
def test_the_alibi_law(family, shared):
    """out' = λ_S·out_S + λ_Q·out_Q + shift with λ_S / λ_Q = exp(−slope · N): the system prompt is N further away."""
    model = shared(family)
    prompt = ma.Prompt("Tom has 3 apples.", system="Solve it.", id="a")
    before, after, baseline = patterns_of_layer_0(model, prompt, ma.MeaninglessTokens("/", 12))
    question = baseline.of_segment("question")
    system = baseline.of_segment("system")
    heads = model.cfg.n_heads
    assert heads & (heads - 1) == 0, "a power of two"
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1).double() / heads)

    def share(query, keys):
        return after[:, query, keys].sum(-1) / before[:, query, keys].sum(-1)

    for query in question.nonzero()[:, 0]:
        ratio = share(query, system) / share(query, question)
        torch.testing.assert_close(ratio, torch.exp(-slopes * 12), rtol=2e-4, atol=1e-7)


def test_masked_and_unshifted_together_are_the_baseline(toy_of_each_kind):
    variants = {"masked": SLASH.masked()}
    if toy_of_each_kind.cfg.model_name != "toy:falcon":
        variants |= {"both": SLASH.masked().unshifted()}
    # SHORT, as inserted tokens push others out of a window.
    result = shift_of(toy_of_each_kind, SHORT, slash=SLASH, **variants)
    received = result["received_attention"].received_by_segment.sel(segment="question")
    scale = result["affine_shift"].scale.sel(segment="question")
    assert float(abs(scale.sel(condition="masked") - 1).max()) < 1e-6
    gap = abs(received - received.sel(condition="baseline")).max(("prompt", "layer", "head"))
    assert gap.sel(condition="masked") > 1e-3
    if "both" in variants:
        assert gap.sel(condition="both") < 5e-6


def test_a_model_that_counts_positions_itself_cannot_keep_them(shared):
    with pytest.raises(OptionError, match=r"takes no position ids.*'unshifted'"):
        shift_of(shared("toy:falcon"), SHORT, unshifted=SLASH.unshifted())


def test_models_that_cannot_hide_or_keep(shared):
    """Layers without attention would carry inserted tokens on; learned positions have none before the first."""
    hybrid = shared("Qwen3-Next (hybrid)")
    with pytest.raises(OptionError, match=r"attention in 1 of 2 layers.*'masked'"):
        shift_of(hybrid, SHORT, masked=SLASH.masked())
    learned = shared("GPT-2")
    message = r"learned positions, and 'unshifted' needs \d+ positions before the first"
    with pytest.raises(OptionError, match=message):
        shift_of(learned, SHORT, unshifted=SLASH.unshifted())
    few = ma.MeaninglessTokens("/", 3).unshifted()
    error = shift_of(learned, SHORT, few=few)["affine_shift"].relative_error
    assert error.sel(condition="few", segment="question", layer=0).max() < 1e-5
