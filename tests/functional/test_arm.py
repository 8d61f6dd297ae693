"""ARM against a numpy writing that sorts, counts and loops, after the words of FIELD and of the released code."""

import numpy as np
import pytest
import torch

from mechattn.functional.activations import as_control, keyed_uniform, redistribute, token_keys

SHARES = {"paper": (0.02, 0.25), "released_llama": (0.2, 0.25), "released_qwen2": (0.02, 0.25)}
FORMS = [*SHARES, "gemma"]


def oracle(x, uniform, c, p1, form, shares=SHARES):
    """One row, in float64: entries in the order of their size, one at a time."""
    x, size = np.asarray(x, dtype=np.float64), np.abs(np.asarray(x, dtype=np.float64))
    n = len(x)
    if form == "gemma":
        chosen = [i for i in range(n) if size[i] <= np.quantile(size, c)]
        above = np.quantile(size, p1 / 100)
    else:
        median = np.sort(size)[(n - 1) // 2]
        mad = max(np.sort(np.abs(size - median))[(n - 1) // 2], 1e-12)
        share = np.mean(size <= 1.4826 * mad * c)
        count = round(float(np.clip(share, *shares[form]) * n))
        chosen = sorted(range(n), key=lambda i: (size[i], i))[:count]
        above = max(np.quantile(x, p1 / 100), 0.0)
    out = x.copy()
    for i in chosen:
        bound = above if x[i] > 0 else min(x.min(), 0.0)
        if x[i] != 0 and bound != 0:
            out[i] = x[i] + uniform[i] * bound if form == "paper" else uniform[i] * bound
    return out


def silu_like(rows, channels, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.silu(1.5 * torch.randn(rows, channels, generator=generator))


def drawn(shape, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


FIXED = {
    "activations": silu_like(5, 203),
    "no negatives": silu_like(5, 203).abs(),
    "no positives": -silu_like(5, 203).abs(),
    "all zeros": torch.zeros(3, 40),
    "a constant": torch.full((3, 40), 0.7),
    "a negative constant": torch.full((3, 40), -0.7),
    "ties": (silu_like(4, 200) * 10).round() / 10,
    "four entries": torch.tensor([[0.1, -0.2, 3.0, 0.0]]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scope", ["token", "tensor"])
@pytest.mark.parametrize("name", FIXED)
def test_against_numpy(name, scope, form):
    x = FIXED[name].double()
    uniform = drawn(x.shape).double()
    for c, p1 in ((0.13, 99.5), (0.32, 90.0), (0.9, 60.0)):
        got = redistribute(x, uniform, c, p1, form, scope)
        rows = (
            (x, uniform, got)
            if scope == "token"
            else (x.view(1, -1), uniform.view(1, -1), got.view(1, -1))
        )
        for row, u, made in zip(*rows, strict=True):
            np.testing.assert_allclose(
                made, oracle(row.numpy(), u.numpy(), c, p1, form), atol=1e-12
            )


def test_the_oracle_would_notice_another_clip():
    x, uniform = FIXED["activations"].double(), drawn((5, 203)).double()
    wrong = oracle(x[0].numpy(), uniform[0].numpy(), 0.13, 99.5, "paper", {"paper": (0.2, 0.25)})
    assert np.abs(redistribute(x, uniform, 0.13, 99.5)[0].numpy() - wrong).max() > 1e-3


def test_all_zeros_stay_and_c_zero_does_not_switch_it_off():
    assert not redistribute(torch.zeros(2, 40), drawn((2, 40)), 0.13, 99.5).any()
    x = FIXED["activations"]
    assert (redistribute(x, drawn(x.shape), 0.0, 99.5) != x).any()


def test_strength():
    x, uniform = FIXED["activations"].double(), drawn((5, 203)).double()
    whole = redistribute(x, uniform, 0.13, 99.5) - x
    half = redistribute(x, uniform, 0.13, 99.5, strength=0.5) - x
    torch.testing.assert_close(half, whole / 2)
    assert redistribute(x, uniform, 0.13, 99.5, strength=0.0) is x


def test_bfloat16_moves_what_float32_moves():
    x = FIXED["activations"].bfloat16()
    uniform = drawn(x.shape)
    for form in FORMS:
        got, same = (
            redistribute(x, uniform, 0.13, 99.5, form),
            redistribute(x.float(), uniform, 0.13, 99.5, form),
        )
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, same.bfloat16(), rtol=0, atol=0)


@pytest.mark.slow
def test_more_entries_than_torch_quantile_takes():
    """Against numpy's own sorting, in one piece."""
    n = 2**24 + 5
    x = torch.nn.functional.silu(torch.randn(1, n, generator=torch.Generator().manual_seed(0)))
    uniform = drawn((1, n))
    got = redistribute(x, uniform, 0.13, 99.5, "released_llama", "tensor").numpy()[0]
    values = x.numpy()[0]
    size = np.abs(values)
    median = np.partition(size, (n - 1) // 2)[(n - 1) // 2]
    mad = np.partition(np.abs(size - median), (n - 1) // 2)[(n - 1) // 2]
    count = round(float(np.clip(np.mean(size <= np.float32(1.4826 * 0.13) * mad), 0.2, 0.25) * n))
    threshold = np.partition(size, count - 1)[count - 1]
    assert (got != values).sum() <= count
    assert (got[size > threshold] == values[size > threshold]).all()
    upper = np.quantile(values.astype(np.float64), 0.995)
    chosen = (size < threshold) & (values > 0)
    np.testing.assert_allclose(got[chosen], uniform.numpy()[0][chosen] * upper, atol=2e-5)
    chosen = (size < threshold) & (values < 0)
    np.testing.assert_allclose(got[chosen], uniform.numpy()[0][chosen] * values.min(), atol=1e-6)


def test_some_entries_move_inward_where_they_are_replaced():
    x, uniform = silu_like(20, 400), drawn((20, 400))
    inward = {
        form: (redistribute(x, uniform, 0.13, 99.5, form).abs() < x.abs()).float().mean()
        for form in ("paper", "released_llama", "released_qwen2")
    }
    assert inward["paper"] == 0
    assert 0.001 < inward["released_llama"] < 0.07
    assert 0 < inward["released_qwen2"] < inward["released_llama"] / 3


def test_the_two_released_forms_differ_by_their_floor_alone():
    """A share of 5 % near zero: one moves 5 %, the other 20 %. From 20 % on they are the same."""
    generator = torch.Generator().manual_seed(0)
    uniform = drawn((30, 400))
    for share, moved in (
        (0.01, (0.2, 0.02)),
        (0.05, (0.2, 0.05)),
        (0.22, (0.22, 0.22)),
        (0.4, (0.25, 0.25)),
    ):
        x = 1 + torch.rand(
            30, 400, generator=generator
        )  # MAD 0.25, so that near zero is below 0.048
        near = torch.arange(400) < round(share * 400)
        x = torch.where(near, 0.04 * torch.rand(30, 400, generator=generator) + 1e-4, x)
        made = {
            form: redistribute(x, uniform, 0.13, 99.5, form)
            for form in ("released_llama", "released_qwen2")
        }
        shares = tuple(float((y != x).float().mean()) for y in made.values())
        assert shares == pytest.approx(moved, abs=2e-3), share
        both = (made["released_llama"] != x) & (made["released_qwen2"] != x)
        assert torch.equal(made["released_llama"][both], made["released_qwen2"][both]), (
            "what both move, they move alike"
        )
        other = oracle(
            x[0].numpy(),
            uniform[0].numpy(),
            0.13,
            99.5,
            "released_qwen2",
            {"released_qwen2": (0.2, 0.25)},
        )
        wrong = np.abs(made["released_qwen2"][0].numpy() - other).max()
        assert (wrong > 0.1) == (share < 0.2), "negative control: the oracle with the other floor"


def test_gelu_is_exactly_zero_where_it_is_switched_off():
    """In float32 below −5.5, with tanh below −5.1: these are among the smallest, so they count, and stay. SiLU has none."""
    off = torch.linspace(-8, -6, 100)
    x = torch.nn.functional.gelu(torch.cat([off, torch.linspace(0.5, 3, 300)]))[None]
    assert not x[0, :100].any()
    assert not torch.nn.functional.gelu(off, approximate="tanh").any()
    assert torch.nn.functional.silu(off).all()
    for form in FORMS:
        made = redistribute(x, drawn((1, 400)), 0.25, 99.5, form)
        assert torch.equal(made, x), f"{form}: a quarter is moved at most, and the quarter is 0"
    wider = redistribute(x, drawn((1, 400)), 0.3, 99.5, "gemma")
    assert ((wider != x).sum(), (wider[0, :100] != 0).sum()) == (20, 0)


@pytest.mark.parametrize("control", ["random_direction", "random_channels", "shuffled_signs"])
def test_controls_are_as_large_and_otherwise_elsewhere(control):
    x, uniform = silu_like(200, 400), drawn((200, 400))
    change = redistribute(x, uniform, 0.13, 99.5) - x
    made = as_control(change, drawn((200, 400), seed=5), control)
    torch.testing.assert_close(made.norm(dim=-1), change.norm(dim=-1))
    cosine = torch.cosine_similarity(made, change, dim=-1)
    assert (
        cosine.mean().abs() < 0.15
    )  # of a token few entries may move, and few signs agree by chance
    if control == "shuffled_signs":
        torch.testing.assert_close(made.abs(), change.abs())
    if control == "random_channels":
        torch.testing.assert_close(made.sort(-1).values, change.sort(-1).values)


def splitmix(state, count):
    """The published generator, in Python's integers."""
    mask, out = 2**64 - 1, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out.append((z ^ (z >> 31)) >> 40)
    return out


def test_keyed_numbers_are_those_of_splitmix64():
    key = -1234567890123456789
    got = keyed_uniform(torch.tensor([key]), 50)[0]
    expected = torch.tensor(splitmix(key % 2**64, 50)) / 2**24
    torch.testing.assert_close(got, expected.float(), rtol=0, atol=0)
    assert splitmix(0, 1)[0] == 0xE220A8  # the published first output from 0: e220a8397b1dcdaf


def test_a_tokens_numbers_depend_on_its_key_alone():
    positions = torch.tensor([[0, 1, 2, -5], [7, 1, 0, 3]])
    both = keyed_uniform(token_keys(3, ["a", "b"], positions, 2), 16)
    alone = keyed_uniform(token_keys(3, ["b"], positions[1:, [1, 3]], 2), 16)
    torch.testing.assert_close(both[1, [1, 3]], alone[0], rtol=0, atol=0)
    others = [
        token_keys(4, ["b"], positions[1:], 2),
        token_keys(3, ["a"], positions[1:], 2),
        token_keys(3, ["b"], positions[1:], 1),
        token_keys(3, ["b"], positions[1:], 2, "control"),
    ]
    for keys in others:
        assert (keyed_uniform(keys, 16) == both[1]).float().mean() < 0.05
    many = keyed_uniform(token_keys(0, ["a"], torch.arange(500)[None], 0), 400)
    counts = torch.histc(many, 20, 0, 1)
    assert (
        float(((counts - 10_000) ** 2 / 10_000).sum()) < 45
    )  # chi-square with 19 degrees of freedom: p = 0.0007
    assert abs(float(torch.corrcoef(many[0, :, :].T[:2])[0, 1])) < 0.2
