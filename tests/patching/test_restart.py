"""A pass that changes a later layer starts there: the same bits, without the layers before it."""

import pytest
import torch
from xarray.testing import assert_allclose, assert_identical

import mechattn as ma
from mechattn.patching import patch
from tests.conftest import loaded_once, short_problems

SLASH = ma.MeaninglessTokens("/", count=5)
NEVER = staticmethod(lambda model, sequence, layers: [])


@pytest.fixture(scope="module")
def prompts():
    return short_problems(2)


@pytest.fixture
def unverified():
    """A toy whose verification would count as passes, and what hooks the MLP of a layer until the test ends."""
    model = loaded_once("toy:llama", verify=False)
    handles = []

    def hook(layer, function):
        handles.append(model.blocks[layer].mlp.register_forward_hook(function))

    yield model, hook
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(
    ("name", "at"), [("toy:falcon", "resid_post"), ("toy:llama", [(2, 1), (3, 0), (3, 5)])]
)
def test_the_same_numbers_as_from_the_first_layer(name, at, prompts, monkeypatch):
    model = loaded_once(name, dtype=torch.float64)
    patched = ma.patch(model, prompts, SLASH, at=at)
    monkeypatch.setattr(patch, "possible_starts", NEVER)
    assert_identical(patched.effects, ma.patch(model, prompts, SLASH, at=at).effects)


def test_the_layers_before_are_not_computed_again(prompts, unverified):
    model, hook = unverified
    rows = [0] * 4
    for layer in range(4):

        def counted(module, given, out, layer=layer):
            rows[layer] += len(out)

        hook(layer, counted)
    ma.patch(model, prompts, SLASH, at=[(2, 1), (3, 0), (3, 5)], direction="denoising")
    # Both runs of both prompts, another prompt's for the shorter one, and the two copies with whose
    # logits those are compared that start later.
    unpatched = 2 + 2 + 1 + 2
    assert rows[0] == rows[1] == unpatched
    of_head = 2 + 3  # rows: the longer prompt has no other prompt as its control
    assert rows[3] == unpatched + 3 * of_head + 4  # and copies that show that one may start here
    # Four copies of each prompt go together, in the order of layers: only the first pass has one
    # that changes layer 2.
    assert rows[2] == unpatched + 2 * 4 + 2


def test_prompts_of_one_length_share_their_passes(unverified):
    """Each pass reads all weights, which takes longer than computing with few rows."""
    model, hook = unverified
    questions = [f"Anna has {number} shells and" for number in (3, 5, 7, 9)]
    prompts = [ma.Prompt(question, answer=" 5", template="joined") for question in questions]
    rows = []
    hook(3, lambda module, given, out: rows.append(len(out)))
    together = ma.patch(model, prompts, SLASH, at=[(2, 1), (3, 0)], controls=())
    # Three passes show that one may start later; then both versions, and a pass for each head.
    assert rows == [2, 2, 2, 4, 4, 4, 4]

    for index, prompt in enumerate(prompts):
        alone = ma.patch(model, [prompt], SLASH, at=[(2, 1), (3, 0)], controls=())
        expected = alone.effects.isel(prompt=0, drop=True)
        effects = together.effects.isel(prompt=index, drop=True)
        assert_allclose(effects, expected, atol=2e-5)

        next_prompt = together.effects.isel(prompt=(index + 1) % 4, drop=True)
        assert abs(next_prompt - expected).effect.max() > 2e-4, "exchanged rows would be noticed"


@pytest.mark.parametrize("missing", ["nothing is added", "an error"])
def test_a_bypass_of_blocks_starts_at_the_first(missing, prompts, unverified, monkeypatch):
    """A later layer adds what the first has read in the same pass, as models with shared keys and values do."""
    model, hook = unverified
    read = []

    def reads(module, given, out):
        read.append(out.mean())

    def adds(module, given, out):
        if not read and missing == "nothing is added":
            return out
        return out + read.pop()

    hook(0, reads)
    hook(3, adds)

    def effects():
        return ma.patch(model, prompts, SLASH, at=[(2, 1), (3, 0)]).effects

    patched = effects()
    monkeypatch.setattr(patch, "possible_starts", NEVER)
    assert_identical(patched, effects())
    if missing == "nothing is added":
        anywhere = staticmethod(lambda model, sequence, layers: layers)
        monkeypatch.setattr(patch, "possible_starts", anywhere)
        assert not patched.identical(effects()), "a pass that starts later would be noticed"


def test_an_error_unrelated_to_restarting_is_raised(prompts, unverified):
    model, hook = unverified
    passes = []
    hook(0, lambda module, given, out: passes.append(1))

    def fails(module, given, out):
        if not passes:
            raise MemoryError
        passes.clear()

    hook(3, fails)
    with pytest.raises(MemoryError):
        ma.patch(model, prompts, SLASH, at=[(2, 1), (3, 0)])
