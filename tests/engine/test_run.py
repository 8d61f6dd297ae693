"""What `run` promises: the same numbers for any batching, the same bytes for the same seed, every kind of prompt."""

from functools import partial

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

import mechattn as ma

CONDITIONS = {"slash": ma.MeaninglessTokens(count=9)}


def test_moments_are_those_of_the_prompts(toy, prompts):
    run = partial(ma.run, toy, prompts[:5], CONDITIONS, memory="1MiB")
    moments = run()["received_attention"]
    kept = run(keep="prompts")["received_attention"]
    for name in ("received", "received_by_origin"):
        every = kept[f"{name}_per_prompt"].values.astype(np.float64)
        n = (~np.isnan(every)).sum(0)
        total = np.where(np.isnan(every), 0, every).sum(0)
        mean = np.divide(total, n, out=np.full(n.shape, np.nan), where=n > 0)
        assert_allclose(moments[name], mean, rtol=1e-9)
        assert_array_equal(moments[f"{name}_n"], n)
        variance = np.nansum((every - mean) ** 2, 0) / np.where(n > 1, n - 1, np.nan)
        assert_allclose(moments[f"{name}_variance"], variance, rtol=1e-6, atol=1e-18)


def test_original_keys_are_the_same_tokens_in_both_conditions(slash_result):
    dataset = slash_result["received_attention"]
    sequences = slash_result["sequences"]
    for index in range(3):
        at = sequences.isel(prompt=index).sel(condition="slash")
        kept = at.origin.values >= 0
        baseline = sequences.tokens.isel(prompt=index).sel(condition="baseline").values
        assert_array_equal(at.tokens.values[kept], baseline[: kept.sum()])
        of_prompt = dataset.isel(prompt=index).sel(condition="slash")
        per_key, by_origin = (
            of_prompt[f"received{name}_per_prompt"].values for name in ("", "_by_origin")
        )
        positions = np.flatnonzero(kept)
        assert_array_equal(per_key[..., positions], by_origin[..., : len(positions)])


def test_texts_and_token_ids_are_prompts_too(toy):
    text = "Tom has 3 apples. How many apples does Tom have?"
    tokens = toy.tokenizer(text + "\n", return_tensors="pt")["input_ids"]
    for given in (text, [text], tokens):
        read = ma.run(toy, given)["sequences"].tokens.values[0, 0]
        assert_array_equal(read[: tokens.shape[1]], tokens[0])


def test_options_are_recorded_and_matter(toy, prompts):
    options = {"queries": "question", "include_self": True, "skip_first": True}
    result = ma.run(toy, prompts[:3], CONDITIONS, [ma.ReceivedAttention(**options)])
    assert result.provenance["analyses"]["received_attention"] == options
    dataset = result["received_attention"]
    assert dataset.received.sel(key=0).isnull().all()
    assert "queries='question'" in dataset.received.attrs["options"]


def test_only_the_chosen_layers(toy, prompts):
    every = ma.run(toy, prompts[:2])["received_attention"].received
    some = ma.run(toy, prompts[:2], layers=[2, 0])["received_attention"].received
    assert some.layer.values.tolist() == [0, 2]
    assert_allclose(some, every.sel(layer=[0, 2]), atol=1e-6)  # layers not asked for run SDPA


@pytest.mark.parametrize(("engine", "layers"), [("streaming", None), ("hooks", [1])])
def test_a_pass_ends_where_the_last_value_has_come(toy, prompts, engine, layers):
    """After the attention of the last layer nothing runs, unless something else was asked for."""

    def ran(analysis):
        found = set()
        handles = [
            toy.hook_dict[f"blocks.{n}.hook_resid_{place}"].register_forward_hook(
                lambda module, given, out, name=(n, place): found.add(name)
            )
            for n in range(4)
            for place in ("pre", "post")
        ]
        ma.run(toy, prompts[:2])  # verifies a model with new hooks, which reads all layers
        found.clear()
        ma.run(toy, prompts[:2], CONDITIONS, analysis, layers=layers, engine=engine)
        for handle in handles:
            handle.remove()
        return found

    last = 3 if layers is None else 1
    attention = ran(ma.ReceivedAttention())
    assert {(last - 1, "post"), (last, "pre")} <= attention
    assert not any((n, "post") in attention for n in range(last, 4))
    assert (last, "post") in ran([ma.ReceivedAttention(), ma.analyses.BlockUpdates()])
    assert (3, "post") in ran(ma.analyses.DirectLogits())


def test_the_model_is_left_as_it_was(toy, prompts):
    tokens = ma.Baseline().apply(prompts[0], toy).tokens[None]
    before = toy(tokens)
    ma.run(toy, prompts[:2], CONDITIONS)
    assert torch.equal(before, toy(tokens))


class OwnHead:
    """Ablates the head that a prompt names."""

    def apply(self, prompt, model, seed=0):
        ablation = ma.interventions.HeadAblation(((0, int(prompt.id)),))
        return ma.Baseline(ablation).apply(prompt, model)


def test_each_prompt_has_the_interventions_of_its_own_sequence(toy):
    prompts = [ma.Prompt("Tom has 3 apples.", id=head) for head in "05"]
    run = partial(ma.run, toy, conditions={"own": OwnHead()}, layers=1)
    both, alone = (
        run(given)["received_attention"].received_by_segment.sel(prompt="5")
        for given in (prompts, prompts[1])
    )
    assert_allclose(both, alone, atol=1e-6)
