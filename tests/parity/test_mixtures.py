"""Activations in mixtures of experts against a loop over tokens and experts, in float64, on transformers' own modules."""

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.functional.activations import keyed_uniform, redistribute, token_keys
from mechattn.model.checkpoint import load_tokenizer
from mechattn.model.patch.mixtures import Routing
from mechattn.model.patch.nonlinearities import at_nonlinearity
from tests.parity.plain import loop_over_experts
from tests.tiny_families import tiny_model

MIXTURES = [
    "Mixtral",
    "Qwen3-Next (hybrid)",
    "GPT-OSS",
    "DeepSeek-V3 (latent attention)",
]
LAYER = 1
TOKENS = torch.tensor([[*range(5, 25)], [*range(300, 320)]])
SLASH = ma.MeaninglessTokens("/", 20)
THRESHOLD = 0.02


def silu(x):
    return x / (1 + np.exp(-x))


def one_expert(experts, number, x):
    """Gate, activation, what it is multiplied with, and the output projection [d_expert d_model], of a token."""
    if (
        type(experts).__name__ == "GptOssExperts"
    ):  # stored the other way round, gates and ups in turn, with biases
        both = (
            x @ experts.gate_up_proj[number].detach().numpy()
            + experts.gate_up_proj_bias[number].detach().numpy()
        )
        gate, up = both[::2], both[1::2].clip(-experts.limit, experts.limit)
        bounded = np.minimum(gate, experts.limit)
        down = experts.down_proj[number].detach().numpy()
        return gate, bounded / (1 + np.exp(-experts.alpha * bounded)), up + 1, down
    both = experts.gate_up_proj[number].detach().numpy() @ x
    gate, up = np.split(both, 2)
    return gate, silu(gate), up, experts.down_proj[number].detach().numpy().T


def shared_expert(mixture, x):
    """The same of the shared expert, and its weight; None where there is none."""
    shared = getattr(mixture, "shared_experts", None) or getattr(mixture, "shared_expert", None)
    if shared is None:
        return None
    gate, up = (
        getattr(shared, f"{name}_proj").weight.detach().numpy() @ x for name in ("gate", "up")
    )
    own = getattr(mixture, "shared_expert_gate", None)
    weight = 1.0 if own is None else 1 / (1 + np.exp(-(own.weight.detach().numpy() @ x).item()))
    return weight, gate, silu(gate), up, shared.down_proj.weight.detach().numpy().T


def by_hand(mixture, x, chosen, weights, moved=None):
    """Of each token: its experts, gates, weighted activations, and the output; ``moved`` takes the activations' place."""
    found = {"experts": [], "gate": [], "act": [], "out": []}
    for token, row in enumerate(x):
        experts, gates, acts, out, start = [], [], [], 0.0, 0
        parts = []
        for slot in sorted(range(chosen.shape[1]), key=lambda s: chosen[token, s]):
            number = int(chosen[token, slot])
            experts.append(number)
            parts.append((weights[token, slot], *one_expert(mixture.experts, number, row)))
            bias = getattr(mixture.experts, "down_proj_bias", None)
            out = out + (
                0 if bias is None else weights[token, slot] * bias[number].detach().numpy()
            )
        if (of_all := shared_expert(mixture, row)) is not None:
            parts.append(of_all)
        for weight, gate, act, up, down in parts:
            mine = weight * act if moved is None else moved[token][start : start + len(act)]
            gates.extend(gate)
            acts.extend(mine)
            out = out + (mine * up) @ down
            start += len(act)
        for name, value in (("experts", experts), ("gate", gates), ("act", acts), ("out", out)):
            found[name].append(np.array(value))
    return {name: np.stack(values) for name, values in found.items()}


def mixture_of(plain):
    return plain.model.layers[LAYER].mlp


def passed(plain, tokens, moving=None):
    """Run the plain model; of its mixture what :func:`by_hand` finds, and its output; logits.

    ``moving`` makes other activations, with which the mixture then goes on.
    """
    mixture, seen = mixture_of(plain), {}

    def take(module, given):
        seen["given"] = [part.detach() for part in given[:3]]

    def replace(module, given, out):
        x, chosen, weights = (part.numpy() for part in seen["given"])
        if type(module.experts).__name__ == "GptOssExperts":
            assert (chosen.shape, weights.shape) == ((len(x), 2), (len(x), 2))
        found = by_hand(module, x, chosen, weights)
        seen.update(found)
        seen["whole"] = (out[0] if isinstance(out, tuple) else out).numpy().reshape(len(x), -1)
        if moving is None:
            return None
        made = torch.tensor(by_hand(module, x, chosen, weights, moving(found["act"]))["out"]).view(
            *tokens.shape, -1
        )
        return (made, *out[1:]) if isinstance(out, tuple) else made

    handles = [
        mixture.experts.register_forward_pre_hook(take),
        mixture.register_forward_hook(replace),
    ]
    with torch.no_grad():
        logits = plain(tokens).logits
    for handle in handles:
        handle.remove()
    return seen, logits


@pytest.fixture(scope="module", params=MIXTURES)
def pair(request):
    """The plain model in float64, and those that are looked at: another of it, which is no less exact, and two hooked.

    A bridge computes softmax and some norms in float32; the second one is float32 altogether, and its experts compute
    by groups, as is usual.
    """
    tokenizer = load_tokenizer("toy:llama")
    plain, twin, same, single = (tiny_model(request.param, len(tokenizer)) for _ in range(4))
    for model in (plain.double(), twin.double(), same.double()):
        loop_over_experts(model)
    hooked = ma.load_model(same, tokenizer=tokenizer, dtype=torch.float64, verify=False)
    return plain, {1e-10: twin, 1e-5: hooked}, ma.load_model(single, tokenizer=tokenizer)


def close(got, expected, tolerance):
    np.testing.assert_allclose(
        got, expected, rtol=0, atol=tolerance * abs(np.asarray(expected)).max()
    )


def shown_by(model, tokens, *sees):
    """Gates and activations of the layer as the last function is shown them; logits."""
    from contextlib import ExitStack

    got = {}

    def see(layer, pre, post):
        got.update(layer=layer, pre=pre.clone(), post=post.clone())

    with ExitStack() as stack, torch.no_grad():
        for function in (*sees, see):
            stack.enter_context(at_nonlinearity(model, {LAYER: function}))
        made = model(tokens)
    return got, getattr(made, "logits", made)


def test_activations_are_those_of_the_loop(pair):
    plain, looked_at, single = pair
    expected, logits = passed(plain, TOKENS)
    np.testing.assert_allclose(
        expected["out"], expected["whole"], atol=1e-10, err_msg="the loop is not the model"
    )
    assert len(set(map(tuple, expected["experts"]))) > 1, "all tokens go to the same experts"
    for tolerance, model in looked_at.items():
        got, same = shown_by(model, TOKENS)
        assert got["layer"] == LAYER
        close(got["pre"], expected["gate"], tolerance)
        close(got["post"], expected["act"], tolerance)
        close(same, logits, tolerance)
    got, _ = shown_by(single, TOKENS)
    off = abs(got["post"].numpy() - expected["act"]).max(-1) / abs(expected["act"]).max()
    assert (off > 1e-4).mean() < 0.05, "but for a token whose experts are all but equally likely"
    other = by_hand(
        mixture_of(plain), *(part.numpy() for part in expected["given"][:2]), np.ones((40, 2))
    )
    assert abs(got["post"].numpy() - other["act"]).max() > 0.1, (
        "negative control: without the router's weights"
    )


def test_what_is_returned_goes_on(pair):
    """As in the plain model whose mixture is computed by hand from the moved activations."""
    plain, looked_at, _ = pair

    def moving(act):
        return np.where(act > 0, 1.5 * act, act - 0.1)

    def see(layer, pre, post):
        return torch.where(post > 0, 1.5 * post, post - 0.1)

    expected, logits = passed(plain, TOKENS, moving)
    _, before = passed(plain, TOKENS)
    for tolerance, model in looked_at.items():
        got, moved = shown_by(model, TOKENS, see)
        close(got["post"], moving(expected["act"]), tolerance)
        close(moved, logits, tolerance)
        assert (moved - before).abs().max() > 0.1, "negative control: nothing was moved"
        twice, _ = shown_by(model, TOKENS, see, see)
        close(twice["post"], moving(moving(expected["act"])), tolerance)
        close(shown_by(model, TOKENS)[1], before, tolerance)


def test_arm_is_the_function_on_these_activations(pair):
    hooked = pair[2]
    arm = ma.interventions.ARM(form="released_llama", p1=95.0, layers=LAYER)
    plain, before = shown_by(hooked, TOKENS)
    with arm.on(hooked, ["a", "b"]):
        moved, after = shown_by(hooked, TOKENS)
    x = plain["post"].reshape(*TOKENS.shape, -1)
    keys = token_keys(0, ["a", "b"], torch.arange(20).expand(2, -1), LAYER, "arm")
    expected = redistribute(x, keyed_uniform(keys, x.shape[-1]), 0.13, 95.0, "released_llama")
    torch.testing.assert_close(moved["post"].reshape(x.shape), expected, rtol=0, atol=0)
    assert 0.1 < (moved["post"] != plain["post"]).float().mean() < 0.3
    assert (after - before).abs().max() > 1e-3
    _, same = shown_by(hooked, TOKENS)
    assert torch.equal(same, before), "the model was not put back"


def over_all_experts(mixture, found):
    """[token, all channels]: activations where their expert has its place, 0 elsewhere, the shared one's last."""
    width = found["act"].shape[1]
    some = one_expert(mixture.experts, 0, np.zeros(64))[0].size
    count, slots = len(mixture.experts.down_proj), found["experts"].shape[1]
    made = np.zeros((len(found["act"]), count * some + width - slots * some))
    for token, experts in enumerate(found["experts"]):
        for slot, number in enumerate(experts):
            made[token, number * some : (number + 1) * some] = found["act"][
                token, slot * some : (slot + 1) * some
            ]
    made[:, count * some :] = found["act"][:, slots * some :]
    return made


def test_the_analysis(pair, prompts):
    """Norms, shares and changes of one prompt, by segment, from the loop."""
    plain, looked_at, _ = pair
    hooked = looked_at[1e-5]
    result = ma.run(
        hooked,
        prompts[:3],
        {"slash": SLASH},
        ma.analyses.MlpActivations("absolute", THRESHOLD),
        layers=[LAYER],
    )["mlp_activations"].isel(prompt=1, layer=0)
    sequences = {
        "baseline": ma.Baseline().apply(prompts[1], hooked),
        "slash": SLASH.apply(prompts[1], hooked),
    }
    found = {name: passed(plain, s.tokens[None])[0] for name, s in sequences.items()}
    for name, sequence in sequences.items():
        asks = sequence.of_segment("question").numpy()
        x = found[name]["act"][asks]
        size = abs(x)
        expected = {
            "near_zero": (size <= THRESHOLD).mean(),
            "l1": size.sum(1).mean(),
            "l2": np.sqrt((x**2).sum(1)).mean(),
            "gini": np.mean([abs(s[:, None] - s).mean() / (2 * s.mean()) for s in size]),
            "variance": x.var(1).mean(),
        }
        for quantity, value in expected.items():
            got = float(result[f"{quantity}_by_segment"].sel(condition=name, segment="question"))
            assert got == pytest.approx(value, rel=1e-4), quantity
    mixture = mixture_of(plain)
    asks = sequences["baseline"].of_segment("question").numpy()
    place = [int((sequences["slash"].origin == k).nonzero()) for k in range(len(asks))]
    before, after = (
        over_all_experts(mixture, found["baseline"]),
        over_all_experts(mixture, found["slash"])[place],
    )
    change = (after - before)[asks]
    relative = np.linalg.norm(change, axis=1) / np.linalg.norm(before[asks], axis=1)
    at = result.sel(condition="slash")
    assert float(at.token_change_by_segment.sel(segment="question")) == pytest.approx(
        relative.mean(), rel=1e-4
    )
    assert float(at.change_product.sel(other_condition="slash")) == pytest.approx(
        (change**2).sum(), rel=1e-4
    )
    elsewhere = (found["slash"]["experts"][place] != found["baseline"]["experts"])[asks].any(1)
    if elsewhere.any():
        slots = (found["slash"]["act"][place] - found["baseline"]["act"])[asks]
        wrong = (np.linalg.norm(slots, axis=1) / np.linalg.norm(before[asks], axis=1)).mean()
        assert relative.mean() != pytest.approx(wrong, rel=1e-3), (
            "negative control: slot by slot, whatever the expert"
        )


def test_both_engines_give_the_same(pair, prompts):
    analysis = ma.analyses.MlpActivations("absolute", THRESHOLD)
    one, other = (
        ma.run(pair[2], prompts[:2], {"slash": SLASH}, analysis, engine=engine)["mlp_activations"]
        for engine in ("streaming", "hooks")
    )
    for name in ("l2_by_segment", "gini_by_segment", "token_change_by_segment"):
        np.testing.assert_allclose(one[name], other[name], rtol=1e-3, atol=1e-5, err_msg=name)


def test_some_token_goes_to_other_experts_in_another_condition(prompts):
    """What the negative control of the change needs."""
    tokenizer = load_tokenizer("toy:llama")
    plain = tiny_model("Mixtral", len(tokenizer)).double()
    loop_over_experts(plain)
    hooked = ma.load_model(tiny_model("Mixtral", len(tokenizer)), tokenizer=tokenizer)
    sequences = ma.Baseline().apply(prompts[1], hooked), SLASH.apply(prompts[1], hooked)
    one, other = (passed(plain, s.tokens[None])[0]["experts"] for s in sequences)
    place = [int((sequences[1].origin == k).nonzero()) for k in range(len(one))]
    assert (other[place] != one).any()


def test_channels_of_all_experts():
    routing = Routing(torch.tensor([[0, 2], [1, 2]]), count=3, width=2)
    x = torch.tensor([[1.0, 2, 3, 4, 9], [5, 6, 7, 8, 9]])
    assert routing.by_expert(x).tolist() == [[1, 2, 0, 0, 3, 4, 9], [0, 0, 5, 6, 7, 8, 9]]


def test_a_layer_without_experts_beside_one_with(prompts):
    """DeepSeek's first layers have an MLP."""
    tokenizer = load_tokenizer("toy:llama")
    model = ma.load_model(
        tiny_model("DeepSeek-V3 (latent attention)", len(tokenizer)), tokenizer=tokenizer
    )
    assert (
        ma.analyses.MlpActivations("absolute", 0.1).calibrated(model, [0, 1], ()).mixtures[0]
        is None
    )
    result = ma.run(model, prompts[:2], {"slash": SLASH}, ma.analyses.MlpActivations())[
        "mlp_activations"
    ]
    assert bool(result.l2_by_segment.sel(segment="question").notnull().all())
    assert result.sizes["layer"] == 2
