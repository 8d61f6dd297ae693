"""Keys and values of filler from another run, against surgery on the cache of transformers."""

from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch
from torch.testing import assert_close

import mechattn as ma
from mechattn.evaluation.generate import answers, native_of
from mechattn.evaluation.generating_rows import PaddedPrompts, Request, acting_on_prompts
from mechattn.interventions.intervention import Target
from tests.conftest import short_problems

FUSED = ("GPT-2", "Phi-3")  # and toy:falcon


@dataclass(frozen=True)
class OneToken(ma.conditions.Insertion):
    """A run of one token, whatever the tokenizer."""

    count: int = 10
    place: str = "middle"
    token: int = 7

    def filler(self, prompt, model, seed=0):
        return [self.token] * self.count


def two_prompts(model, length=40):
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(5, model.cfg.d_vocab - 5, (2, length), generator=draw)
    if model.cfg.default_prepend_bos:
        rows[:, 0] = model.tokenizer.bos_token_id
    return [ma.Prompt(tokens=tuple(row), id=str(i)) for i, row in enumerate(rows.tolist())]


def native_logits(model, condition, prompt, batched_with=()):
    """As ``evaluate`` reads a prompt, on the model without hooks; perhaps beside longer ones."""
    asked = [Request(p.id, condition.apply(p, model), 0) for p in (prompt, *batched_with)]
    padded = PaddedPrompts([request.sequence for request in asked], torch.device("cpu"))
    native = native_of(model)
    with torch.no_grad(), acting_on_prompts(native, asked, padded):
        logits = native(**padded.inputs).logits
    return logits[0, -len(asked[0].sequence) :]


def hooked_logits(model, condition, prompt):
    """As ``run`` reads it."""
    sequence = condition.apply(prompt, model)
    target = Target(torch.arange(1), (prompt.id,), sequence.origin[None], sequence.segment[None])
    with ExitStack() as stack, torch.no_grad():
        for intervention in sequence.interventions:
            stack.enter_context(intervention.acting(model, lambda: target))
        model(sequence.tokens[None], return_type=None)  # the first of two passes, unchanged
        return model(sequence.tokens[None], return_type="logits")[0]


def exchange(cache, other, places, layers):
    """Put the keys and values of another cache into one, at some places."""
    for layer in layers:
        cache.layers[layer].keys[:, :, places] = other.layers[layer].keys[:, :, places]
        cache.layers[layer].values[:, :, places] = other.layers[layer].values[:, :, places]


@pytest.mark.parametrize(("name", "layers"), [("toy:gemma3", (1,)), ("toy:falcon", None)])
def test_later_tokens_read_the_other_prompts_filler(name, layers, shared):
    """The oracle: both prompts are read as far as the filler's end, cache entries exchanged, and one is read on."""
    model = shared(name)
    condition = OneToken()
    prompts = two_prompts(model)
    recorded = ma.record_keys_values(model, prompts, condition)
    swapped = condition.under(
        ma.interventions.KVPatch("inserted", recorded.from_other_prompts(), layers)
    )
    native = native_of(model)
    first, second = (condition.apply(prompt, model) for prompt in prompts)
    start = int(first.inserted.nonzero()[0])
    end = start + 10
    with torch.no_grad():
        mine, other = (
            native(sequence.tokens[None, :end], use_cache=True).past_key_values
            for sequence in (first, second)
        )
        exchange(mine, other, slice(start, end), layers or range(len(mine.layers)))
        expected = native(first.tokens[None, end:], past_key_values=mine).logits[0]
    plain = native_logits(model, condition, prompts[0])
    assert (plain[end:] - expected).abs().max() > 0.01, "nothing had to change"
    for logits in (
        native_logits(model, swapped, prompts[0]),
        hooked_logits(model, swapped, prompts[0]),
    ):
        assert_close(logits[end:], expected, atol=1e-4, rtol=0)
        assert_close(logits[:end], plain[:end], atol=1e-4, rtol=0)


def test_answers_are_those_of_an_edited_cache(shared):
    """Also the first token, which the last filler token predicts: it has read its own prompt's filler."""
    model = shared("toy:relay")
    native = native_of(model)
    condition = ma.MeaninglessTokens("/", 6, "before_answer")
    by_length = {}
    for prompt in ma.load_prompts("recall", limit=20):
        by_length.setdefault(len(condition.apply(prompt, model)), []).append(prompt)
    prompts = max(by_length.values(), key=len)[:3]
    made = {prompt.id: condition.apply(prompt, model) for prompt in prompts}
    recorded = ma.record_keys_values(model, prompts, condition).from_other_prompts()
    swapped = condition.under(ma.interventions.KVPatch("inserted", recorded))
    changed = 0
    for prompt in prompts:
        mine, other = made[prompt.id], made[recorded.source_of(prompt.id)]
        filler = mine.inserted
        assert filler[-6:].all()
        answer = []
        with torch.no_grad():
            edited, given = (native(each.tokens[None], use_cache=True) for each in (mine, other))
            cache = edited.past_key_values
            exchange(cache, given.past_key_values, filler, range(len(cache.layers)))
            logits = edited.logits
            for _ in range(4):
                answer.append(int(logits[0, -1].argmax()))
                logits = native(torch.tensor([answer[-1:]]), past_key_values=cache).logits
        tokens = {}
        for asked in (swapped, condition):
            request = Request(prompt.id, asked.apply(prompt, model), 0)
            [read] = answers(native, [request], 4, frozenset())
            tokens[asked] = list(read.tokens)
        assert tokens[swapped] == answer
        changed += tokens[swapped] != tokens[condition]
    assert changed, "nothing had to change"


@pytest.mark.parametrize("family", FUSED)
def test_families_with_one_projection_with_and_without_hooks(family, shared):
    model = shared(family)
    prompts = two_prompts(model)
    condition = OneToken()
    recorded = ma.record_keys_values(model, prompts, condition)
    swapped = condition.under(ma.interventions.KVPatch("inserted", recorded.from_other_prompts()))
    own = condition.under(ma.interventions.KVPatch("inserted", recorded))
    plain = native_logits(model, condition, prompts[0])
    native = native_logits(model, swapped, prompts[0])
    assert (native - plain).abs().max() > 0.02
    assert_close(hooked_logits(model, swapped, prompts[0]), native, atol=2e-4, rtol=0)
    assert_close(native_logits(model, own, prompts[0]), plain, atol=2e-4, rtol=0)


def test_a_batch_padded_on_the_left(toy):
    """Filler is told from padding, and each row gets its own source."""
    prompts = short_problems(3, with_answer=False)
    condition = ma.MeaninglessTokens("/", 6, "middle")
    swapped = condition.under(
        ma.interventions.KVPatch(
            "inserted", ma.record_keys_values(toy, prompts, condition).from_other_prompts()
        )
    )
    alone = native_logits(toy, swapped, prompts[0])
    assert_close(native_logits(toy, swapped, prompts[0], prompts[1:]), alone, atol=1e-4, rtol=0)


def test_in_run(toy):
    prompts = short_problems(3, with_answer=False)
    condition = ma.MeaninglessTokens("/", 6, "middle")
    recorded = ma.record_keys_values(toy, prompts, condition)
    conditions = {
        "slash": condition,
        "own": condition.under(ma.interventions.KVPatch("inserted", recorded)),
        "other": condition.under(
            ma.interventions.KVPatch("inserted", recorded.from_other_prompts())
        ),
        "other, layer 3": condition.under(
            ma.interventions.KVPatch("inserted", recorded.from_other_prompts(), layers=3)
        ),
    }
    result = ma.run(toy, prompts, conditions, ma.ReceivedAttention())
    received = result["received_attention"].received_by_segment

    def change(condition):
        """The largest in each layer."""
        made = abs(received.sel(condition=condition) - received.sel(condition="slash"))
        return made.max(["prompt", "head", "segment"]).values

    assert (change("own") < 1e-5).all()
    assert (change("other")[1:] > 1e-4).all()
    assert change("other")[0] < 1e-6, "in layer 0 a slash is a slash"
    assert (change("other, layer 3")[:3] < 1e-6).all()
    assert change("other, layer 3")[3] > 1e-4


def test_sources_are_a_ring(toy):
    prompts = short_problems(5, with_answer=False)
    recorded = ma.record_keys_values(toy, prompts, ma.MeaninglessTokens("/", 3), layers=[0, 2])
    assert recorded.layers == (0, 2)
    assert recorded.by_prompt["0"][2]["v"].shape == (3, 4 * 16)
    ring = recorded.from_other_prompts(seed=1)
    assert sorted(ring.sources.values()) == sorted(ring.sources)
    assert all(a != b for a, b in ring.sources.items())
    assert (
        ring.sources
        == recorded.from_other_prompts(seed=1).sources
        != recorded.from_other_prompts(seed=2).sources
    )
