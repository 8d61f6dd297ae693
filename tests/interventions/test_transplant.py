"""Keys and values of filler from another run, against surgery on the cache of transformers."""

from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch

import mechattn as ma
from mechattn.evaluation.generate import Request, _Padded, native_of
from mechattn.interventions.intervention import Target
from mechattn.model.architectures import FAMILIES, tiny_model
from mechattn.model.toys import toy_names

FUSED = ("GPT-2", "GPT-NeoX", "Falcon (RoPE)", "Phi-3", "MPT")


@dataclass(frozen=True)
class OneToken(ma.Insertion):
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
    batch, native = _Padded(asked, torch.device("cpu")), native_of(model)
    with torch.no_grad(), batch.acting(native):
        logits = native(batch.tokens, attention_mask=batch.mask(0), position_ids=batch.position_ids(0)).logits
    return logits[0, -len(asked[0].sequence) :]


def hooked_logits(model, condition, prompt):
    """As ``run`` reads it."""
    sequence = condition.apply(prompt, model)
    target = Target(torch.arange(1), (prompt.id,), sequence.origin[None], sequence.segment[None])
    with ExitStack() as stack, torch.no_grad():
        for intervention in sequence.interventions:
            stack.enter_context(intervention.acting(model, lambda: target))
        return model(sequence.tokens[None], return_type="logits")[0]


@pytest.mark.parametrize("name", toy_names())
def test_later_tokens_read_the_other_prompts_filler(name):
    """The oracle: both prompts are read as far as the filler's end, cache entries exchanged, and one is read on."""
    model, condition = ma.load_model(name), OneToken()
    prompts = two_prompts(model)
    recorded = ma.record_keys_values(model, prompts, condition)
    swapped = condition.under(ma.Transplant("inserted", recorded.from_other_prompts()))
    native, (first, second) = native_of(model), [condition.apply(p, model) for p in prompts]
    start = int(first.inserted.nonzero()[0])
    end = start + 10
    with torch.no_grad():
        caches = [native(s.tokens[None, :end], use_cache=True).past_key_values for s in (first, second)]
        for layer, other in zip(caches[0].layers, caches[1].layers, strict=True):
            layer.keys[:, :, start:end] = other.keys[:, :, start:end]
            layer.values[:, :, start:end] = other.values[:, :, start:end]
        expected = native(first.tokens[None, end:], past_key_values=caches[0]).logits[0]
    plain = native_logits(model, condition, prompts[0])
    assert (plain[end:] - expected).abs().max() > 0.05, "nothing had to change"
    for logits in (native_logits(model, swapped, prompts[0]), hooked_logits(model, swapped, prompts[0])):
        torch.testing.assert_close(logits[end:], expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(logits[:start], plain[:start], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=[] if f in FUSED else pytest.mark.slow)
        for f in FAMILIES
        if not f.startswith(("Mamba", "Deep", "Qwen3-Next"))
    ],
)
def test_every_family_with_and_without_hooks(family, tokenizer):
    model = ma.load_model(tiny_model(family, len(tokenizer)), tokenizer=tokenizer)
    prompts, condition = two_prompts(model), OneToken()
    recorded = ma.record_keys_values(model, prompts, condition)
    swapped = condition.under(ma.Transplant("inserted", recorded.from_other_prompts()))
    own = condition.under(ma.Transplant("inserted", recorded))
    plain, native = native_logits(model, condition, prompts[0]), native_logits(model, swapped, prompts[0])
    assert (native - plain).abs().max() > 0.02
    torch.testing.assert_close(hooked_logits(model, swapped, prompts[0]), native, atol=2e-4, rtol=0)
    torch.testing.assert_close(native_logits(model, own, prompts[0]), plain, atol=2e-4, rtol=0)


def test_a_batch_padded_on_the_left(toy):
    """Filler is told from padding, and each row gets its own donor."""
    prompts = ma.load_prompts("word-problems", limit=3)
    condition = ma.MeaninglessTokens("/", 6, "middle")
    swapped = condition.under(
        ma.Transplant("inserted", ma.record_keys_values(toy, prompts, condition).from_other_prompts())
    )
    alone = native_logits(toy, swapped, prompts[0])
    torch.testing.assert_close(native_logits(toy, swapped, prompts[0], prompts[1:]), alone, atol=1e-4, rtol=0)


def test_in_run(toy):
    prompts = ma.load_prompts("word-problems", limit=3)
    condition = ma.MeaninglessTokens("/", 6, "middle")
    recorded = ma.record_keys_values(toy, prompts, condition)
    conditions = {
        "slash": condition,
        "own": condition.under(ma.Transplant("inserted", recorded)),
        "other": condition.under(ma.Transplant("inserted", recorded.from_other_prompts())),
        "other, layer 3": condition.under(ma.Transplant("inserted", recorded.from_other_prompts(), layers=3)),
    }
    result = ma.run(toy, prompts, conditions, ma.ReceivedAttention(), progress=False)
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


def test_donors_are_a_ring(toy):
    prompts = ma.load_prompts("word-problems", limit=5)
    recorded = ma.record_keys_values(toy, prompts, ma.MeaninglessTokens("/", 3), layers=[0, 2])
    assert recorded.layers == (0, 2)
    assert recorded.of["0"][2]["v"].shape == (3, 4 * 16)
    ring = recorded.from_other_prompts(seed=1)
    assert sorted(ring.donors.values()) == sorted(ring.donors)
    assert all(a != b for a, b in ring.donors.items())
    assert ring.donors == recorded.from_other_prompts(seed=1).donors != recorded.from_other_prompts(seed=2).donors
