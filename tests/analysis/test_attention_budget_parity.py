"""`AttentionBudget` against plain transformers in float64, its identities, and what it says where positions are learned."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from transformers import AutoModelForCausalLM

import mechattn as ma
from experiments.real.budget_oracle import largest_differences, oracle
from mechattn.model.checkpoint import toy_folder, toy_tokenizer
from mechattn.model.hooked import original_of
from mechattn.model.positions import rotations_of
from mechattn.prompts.token_sequences import baseline_sequence
from tests.analysis.plain import MECHANISMS
from tests.tiny_families import bridge_of, tiny_model

SLASH = ma.MeaninglessTokens("/", 20)
PROMPT = ma.Prompt(
    "Tom has 3 apples and gives 2 to Mia, who has 5 and eats 1. How many apples has she now, and how many has he?",
    system="Solve it.",
    id="apples",
)
BUDGET = ma.analyses.AttentionBudget()


def conditions_for(name):
    if name == "toy:falcon":  # takes no position ids, and no mask of edges beside its ALiBi
        return {"slash": SLASH}
    return {"slash": SLASH, "masked": SLASH.masked(), "unshifted": SLASH.unshifted()}


@pytest.fixture(scope="module")
def budgets(shared):
    """The budget of each toy, measured once."""
    measured = {}

    def budget(name):
        if name not in measured:
            result = ma.run(shared(name), PROMPT, conditions_for(name), BUDGET)
            measured[name] = result["attention_budget"].isel(prompt=0)
        return measured[name]

    return budget


@pytest.fixture(scope="module")
def plain():
    def load(name):
        return AutoModelForCausalLM.from_pretrained(toy_folder(name), dtype=torch.float64).eval()

    return load


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_budget_equals_the_oracle(name, budgets, plain, shared):
    model = shared(name)
    double = plain(name)
    baseline = ma.Baseline().apply(PROMPT, model)
    for condition, made in conditions_for(name).items():
        expected = oracle(double, baseline, made.apply(PROMPT, model))
        measured = budgets(name).sel(condition=condition)
        differences = largest_differences(measured, expected)
        assert max(differences.values()) < 5e-6, (condition, differences)
        assert measured.attrs["one_cause"] == ""


def test_the_oracle_would_notice_a_query_one_position_off(budgets, plain, shared):
    model = shared("toy:gemma3")
    sequences = [condition.apply(PROMPT, model) for condition in (ma.Baseline(), SLASH)]
    expected = oracle(plain("toy:gemma3"), *sequences, off=1)
    measured = budgets("toy:gemma3").sel(condition="slash")
    assert largest_differences(measured, expected)["by_cause"] > 1e-2


def test_identities(budgets):
    budget = budgets("toy:gemma3")
    close = dict(rtol=0, atol=1e-6)
    change = budget.change.fillna(0)
    assert_allclose(budget.by_cause.sum("cause"), change, **close)
    assert_allclose((budget.dilution + budget.rerouting).fillna(0), change, **close)
    assert_allclose(budget.attention.sum("segment"), 1, rtol=0, atol=1e-5)
    first_layer = budget.by_cause.sel(layer=0, cause="hidden states").fillna(0)
    assert (first_layer == 0).all()
    masked = budget.sel(condition="masked")
    assert_allclose(masked.by_cause.sel(cause="mass").fillna(0), 0, **close)
    # A payer without tokens is no payer; one that a condition adds had nothing before.
    assert budget.attention.sel(segment="answer").isnull().all()
    assert (budget.attention.sel(condition="baseline", segment="inserted") == 0).all()
    assert abs(budget.by_cause).sel(condition="slash").max() > 0.05


def test_kept_positions_leave_no_distance(budgets):
    distance = budgets("toy:gemma3").by_cause.sel(condition="unshifted", cause="distance")
    assert_allclose(distance.fillna(0), 0, rtol=0, atol=1e-6)


def test_rounding_is_no_change_beside_changed_words(shared):
    """Layer 0 reads embeddings: an insertion changes none of them, a counterpart in the same batch does."""
    question = "Anna has 3 shells and Eli has 5. How many?"
    prompt = ma.Prompt(question, counterpart=question.replace("5", "8"))
    conditions = {"slash": SLASH, "words": ma.conditions.Counterpart()}
    result = ma.run(shared("toy:qwen2"), prompt, conditions, BUDGET, layers=[0])
    hidden_states = abs(result["attention_budget"].by_cause.sel(cause="hidden states"))
    assert float(hidden_states.sel(condition="slash").max()) == 0
    assert float(hidden_states.sel(condition="words").max()) > 1e-3


def test_rotations_are_found_again_when_the_frequencies_change():
    model = bridge_of(tiny_model("Llama"), verify=False)
    before, _ = rotations_of(model, [0])
    for name, buffer in original_of(model).named_buffers():
        if name.endswith("inv_freq"):
            buffer.mul_(0.5)
    after, _ = rotations_of(model, [0])
    torch.testing.assert_close(after[0].frequencies, before[0].frequencies / 2)


def test_learned_positions_are_one_cause_with_the_hidden_states(shared):
    name = "GPT-2"
    model = shared(name)
    budget = ma.run(model, PROMPT, {"slash": SLASH}, BUDGET)["attention_budget"].isel(prompt=0)
    assert "learned" in budget.attrs["one_cause"]
    causes = budget.sel(condition="slash").by_cause
    assert causes.sel(cause="distance").isnull().all()

    double = tiny_model(name, len(toy_tokenizer("toy:llama"))).double()
    sequences = [condition.apply(PROMPT, model) for condition in (ma.Baseline(), SLASH)]
    expected = oracle(double, *sequences)["by_cause"]
    together = expected[..., 0] + expected[..., 2]
    for cause, values in (("mass", expected[..., 1]), ("hidden states", together)):
        assert np.nanmax(abs(causes.sel(cause=cause).values - values)) < 5e-6, cause


def test_an_engine_without_queries_splits_without_order(budgets, shared):
    name = "toy:falcon"
    run = ma.run(shared(name), PROMPT, conditions_for(name), BUDGET, engine="hooks")
    budget = run["attention_budget"].isel(prompt=0)
    assert budget.by_cause.isnull().all()
    for quantity in ("attention", "change", "dilution", "rerouting"):
        assert_allclose(budget[quantity], budgets(name)[quantity], atol=1e-6)


def test_a_prompt_without_a_question_is_refused():
    sequence = baseline_sequence([1, 5, 6], ["bos", "system", "system"])
    assert "no question tokens" in BUDGET.problem(sequence)
    assert BUDGET.problem(baseline_sequence([1, 5, 6], ["bos", "system", "question"])) is None
