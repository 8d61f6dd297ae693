"""ARM against a numpy writing that sorts, counts and loops, after the words of the paper and of the released code."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from mechattn.functional.activations import as_control, keyed_uniform, redistribute, token_keys

SHARES = {"paper": (0.02, 0.25), "released_llama": (0.2, 0.25), "released_qwen2": (0.02, 0.25)}
FORMS = [*SHARES, "gemma"]


def oracle(x, uniform, c, p1, form, shares=SHARES):
    """One row, in float64: entries in the order of their size, one at a time."""
    x = np.asarray(x, dtype=np.float64)
    size = np.abs(x)
    n = len(x)
    if form == "gemma":
        chosen = [i for i in range(n) if size[i] <= np.quantile(size, c)]
        above = np.quantile(size, p1 / 100)
    else:
        median = np.sort(size)[(n - 1) // 2]
        mad = max(np.sort(abs(size - median))[(n - 1) // 2], 1e-12)
        share = np.mean(size <= 1.4826 * mad * c)
        count = round(float(np.clip(share, *shares[form]) * n))
        chosen = sorted(range(n), key=lambda i: (size[i], i))[:count]
        above = max(np.quantile(x, p1 / 100), 0.0)
    out = x.copy()
    for i in chosen:
        bound = above if x[i] > 0 else min(x.min(), 0.0)
        if x[i] != 0 and bound != 0:
            out[i] = uniform[i] * bound
            if form == "paper":
                out[i] += x[i]
    return out


def silu_like(rows, channels):
    generator = torch.Generator().manual_seed(0)
    pre = 1.5 * torch.randn(rows, channels, generator=generator, dtype=torch.float64)
    return torch.nn.functional.silu(pre)


def drawn(shape, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).double()


ACTIVATIONS = silu_like(3, 203)
# In float32 GELU is exactly 0 below −5.5: these count among the smallest, and stay.
SWITCHED_OFF = torch.nn.functional.gelu(
    torch.cat([torch.linspace(-8, -6, 50), torch.linspace(0.5, 3, 150)])
)
INPUTS = {
    "activations": ACTIVATIONS,
    "no negatives": ACTIVATIONS.abs(),
    "no positives": -ACTIVATIONS.abs(),
    "all zeros": torch.zeros(2, 40),
    "a constant": torch.full((2, 40), -0.7),
    "ties": (ACTIVATIONS * 10).round() / 10,
    "switched off": SWITCHED_OFF[None],
    "four entries": torch.tensor([[0.1, -0.2, 3.0, 0.0]]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", INPUTS)
def test_against_numpy(name, form):
    x = INPUTS[name].double()
    uniform = drawn(x.shape)
    for c, p1 in ((0.13, 99.5), (0.32, 90.0), (0.9, 60.0)):
        moved = redistribute(x, uniform, c, p1, form)
        for row, row_uniform, row_moved in zip(x, uniform, moved, strict=True):
            expected = oracle(row, row_uniform.numpy(), c, p1, form)
            np.testing.assert_allclose(row_moved, expected, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_the_whole_tensor_is_one_row(form):
    uniform = drawn(ACTIVATIONS.shape)
    moved = redistribute(ACTIVATIONS, uniform, 0.32, 90.0, form, "tensor")
    expected = oracle(ACTIVATIONS.flatten(), uniform.flatten().numpy(), 0.32, 90.0, form)
    np.testing.assert_allclose(moved.flatten(), expected, atol=1e-12)


def test_the_oracle_would_notice_another_clip():
    uniform = drawn(ACTIVATIONS.shape)
    shares = {"paper": (0.2, 0.25)}
    wrong = oracle(ACTIVATIONS[0], uniform[0].numpy(), 0.13, 99.5, "paper", shares)
    right = redistribute(ACTIVATIONS, uniform, 0.13, 99.5)[0].numpy()
    assert np.abs(right - wrong).max() > 1e-3


def test_strength():
    uniform = drawn(ACTIVATIONS.shape)
    whole, half, nothing = (
        redistribute(ACTIVATIONS, uniform, 0.13, 99.5, strength=s) for s in (1.0, 0.5, 0.0)
    )
    assert_close(half - ACTIVATIONS, (whole - ACTIVATIONS) / 2)
    assert torch.equal(nothing, ACTIVATIONS)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_moves_what_float32_moves(form):
    x = ACTIVATIONS.bfloat16()
    uniform = drawn(x.shape).float()
    moved = redistribute(x, uniform, 0.13, 99.5, form)
    expected = redistribute(x.float(), uniform, 0.13, 99.5, form).bfloat16()
    assert_close(moved, expected, rtol=0, atol=0)


@pytest.mark.parametrize("control", ["random_direction", "random_channels", "shuffled_signs"])
def test_controls_are_as_large_and_otherwise_elsewhere(control):
    x = silu_like(200, 400)
    change = redistribute(x, drawn(x.shape), 0.13, 99.5) - x
    controlled = as_control(change, drawn(x.shape, seed=5), control)
    assert_close(controlled.norm(dim=-1), change.norm(dim=-1))
    cosine = torch.cosine_similarity(controlled, change, dim=-1)
    # Of a token few entries may move, and few signs agree by chance.
    assert cosine.mean().abs() < 0.15
    if control == "shuffled_signs":
        assert_close(controlled.abs(), change.abs())
    if control == "random_channels":
        assert_close(controlled.sort(-1).values, change.sort(-1).values)


def splitmix(state, count):
    """The published generator, in Python's integers."""
    mask = 2**64 - 1
    numbers = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        numbers.append((z ^ (z >> 31)) >> 40)
    return numbers


def test_keyed_numbers_are_those_of_splitmix64():
    key = -1234567890123456789
    numbers = keyed_uniform(torch.tensor([key]), 50)[0]
    expected = torch.tensor(splitmix(key % 2**64, 50)) / 2**24
    assert_close(numbers, expected.float(), rtol=0, atol=0)
    assert splitmix(0, 1)[0] == 0xE220A8  # the published first output from 0: e220a8397b1dcdaf


def test_a_tokens_numbers_depend_on_its_key_alone():
    positions = torch.tensor([[0, 1, 2, -5], [7, 1, 0, 3]])
    both = keyed_uniform(token_keys(3, ["a", "b"], positions, 2), 16)
    alone = keyed_uniform(token_keys(3, ["b"], positions[1:, [1, 3]], 2), 16)
    assert_close(both[1, [1, 3]], alone[0], rtol=0, atol=0)
    for seed, prompt, layer, purpose in (
        (4, "b", 2, ""),
        (3, "a", 2, ""),
        (3, "b", 1, ""),
        (3, "b", 2, "control"),
    ):
        keys = token_keys(seed, [prompt], positions[1:], layer, purpose)
        assert (keyed_uniform(keys, 16) == both[1]).float().mean() < 0.05
