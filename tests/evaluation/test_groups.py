"""Right and wrong answers to problems that come in groups: over groups, against loops; without them as before."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

import mechattn as ma
from mechattn.commands.evaluate import accuracy_table
from mechattn.errors import OptionError
from mechattn.evaluation.evaluation import Evaluation
from mechattn.stats.accuracy import share_difference, share_interval
from tests.evaluation import by_hand

N, SIZE = 10, 4
GROUPS = {str(number): f"g{number // SIZE}" for number in range(N * SIZE)}


def simulated(seed=0, samples=1, groups=GROUPS):
    """Forty problems in groups of four that are mostly right together, under two conditions that do nothing."""
    generator = np.random.default_rng(seed)
    chance = np.clip(generator.normal(0.6, 0.3, N), 0.02, 0.98)
    answers = []
    for name in ("baseline", "slash"):
        of_group = np.clip(chance + generator.normal(0, 0.15, N), 0, 1)
        for number in range(N * SIZE):
            for sample in range(samples):
                right = generator.random() < of_group[number // SIZE]
                answers.append(by_hand.answer(number, name, right, sample=sample))
    return Evaluation(
        tuple(answers), {"conditions": {"baseline": "", "slash": ""}, "groups": groups}
    )


def all_right(evaluation):
    return Evaluation(
        tuple(replace(answer, right=True) for answer in evaluation.answers), evaluation.provenance
    )


def by_group(values):
    return values.reshape(N, SIZE).mean(1)


@pytest.mark.parametrize("samples", [1, 3])
def test_accuracies_and_differences_are_of_group_means(samples):
    evaluation = simulated(samples=samples)
    table = evaluation.accuracy().set_index("condition")
    right = {name: evaluation.right(name).mean(1) for name in ("baseline", "slash")}
    for name, values in right.items():
        ends = table.loc[name, ["accuracy", "low", "high"]].astype(float)
        assert_allclose(ends, share_interval(by_group(values)))
    assert set(table.n) == {N}
    assert evaluation.accuracy().attrs["unit"] == "groups (10 of 40 prompts)"

    compared = evaluation.compare("slash")
    differences = by_group(right["slash"] - right["baseline"])
    exact = stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=np.inf
    )
    figures = [compared[name] for name in ("difference", "p", "n", "low", "high")]
    interval = share_difference(differences)[1:]
    assert figures == pytest.approx([differences.mean(), exact.pvalue, N, *interval])
    assert compared["detectable"] > 0.5 * (compared["high"] - compared["low"])
    assert ("only_first" in compared) == (samples == 1)
    assert "sign flips, over groups (10 of 40 prompts)" in accuracy_table(evaluation)
    shares = evaluation.pass_at_k(1).set_index("condition").estimate
    assert shares["slash"] == pytest.approx(by_group(right["slash"]).mean())


def test_without_groups_and_with_unit_prompt_it_is_mcnemars_test():
    grouped = simulated()
    alone = simulated(groups={})
    assert grouped.compare("slash", unit="prompt") == alone.compare("slash")
    assert alone.compare("slash") != grouped.compare("slash"), "negative control"
    assert_array_equal(grouped.accuracy(unit="prompt").values, alone.accuracy().values)


def test_no_spread_between_groups_is_no_certainty():
    alike = all_right(simulated())
    low = stats.binomtest(N, N).proportion_ci(method="wilson").low
    assert alike.accuracy().low.tolist() == pytest.approx([low, low]), "a group is one problem"
    compared = alike.compare("slash")
    assert (compared["difference"], compared["p"]) == (0, 1)
    assert compared["low"] == -compared["high"] < -0.2
    assert compared["detectable"] > 0.2


def test_several_conditions_are_one_family():
    evaluation = simulated()
    third = [
        replace(answer, condition="dots")
        for answer in evaluation.answers
        if answer.condition == "slash"
    ]
    three = Evaluation((*evaluation.answers, *third), evaluation.provenance)
    table = three.comparisons()
    assert table.condition.tolist() == ["slash", "dots"]
    assert table.p.tolist() == [three.compare(name)["p"] for name in table.condition]
    assert_allclose(table.q, stats.false_discovery_control(table.p))
    other = evaluation.comparisons()
    adjusted = ma.adjust([table, other])
    assert adjusted.condition.tolist() == ["slash", "dots", "slash"]
    expected = stats.false_discovery_control([*table.p, *other.p])
    assert adjusted.q_difference.tolist() == expected.tolist()
    with pytest.raises(OptionError, match="no condition other than 'dots'"):
        Evaluation(tuple(third), evaluation.provenance).comparisons("dots")


def test_one_small_group_leaves_the_problem_the_unit():
    alone = simulated(groups={})
    for pairs, unit in ((2, "prompts"), (4, "groups (36 of 40 prompts)")):
        groups = {str(i): str(i - i % 2 if i < 2 * pairs else i) for i in range(40)}
        grouped = simulated(groups=groups)
        assert grouped.accuracy().attrs["unit"] == unit
        assert (grouped.compare("slash") == alone.compare("slash")) == (unit == "prompts")


def test_the_best_is_chosen_and_reported_on_different_groups(monkeypatch):
    restricted_to = Evaluation._restricted_to
    halves = []

    def spy(evaluation, problems):
        halves.append({GROUPS[problem] for problem in problems})
        return restricted_to(evaluation, problems)

    monkeypatch.setattr(Evaluation, "_restricted_to", spy)
    best = simulated().best()
    assert not halves[0] & halves[1]
    assert best["n"] == 5
    best = simulated(groups={"0": "one", "1": "one", "2": "one", "3": "one"}).best()
    assert best["accuracy"] - best["baseline"] == pytest.approx(best["difference"])


def test_a_group_or_two_are_too_few(toy):
    problems = ma.load_prompts("word-problems", limit=4)
    grouped = [replace(prompt, group="one") for prompt in problems]
    evaluation = ma.evaluate(toy, grouped, {"slash": ma.MeaninglessTokens("/", 5)}, new_tokens=2)
    assert evaluation.provenance["groups"] == {str(number): "one" for number in range(4)}
    with pytest.raises(OptionError, match="1 groups of 4 prompts"):
        evaluation.accuracy()
    high = stats.binomtest(0, 4).proportion_ci(method="wilson").high
    assert evaluation.accuracy(unit="prompt").high[0] == pytest.approx(high)
    alone = ma.evaluate(toy, problems, new_tokens=2)
    assert "groups" not in alone.provenance, "each prompt has a template of its own"


def test_two_evaluations_with_equal_numbers_are_not_one_table():
    evaluation = simulated()
    longer = [replace(answer, text=f"{answer.text} ") for answer in evaluation.answers]
    tables = [evaluation.comparisons(), Evaluation(tuple(longer), {}).comparisons()]
    assert len(ma.adjust(tables)) == 2
    with pytest.raises(OptionError, match="table 1 is the same as table 0"):
        ma.adjust([evaluation.comparisons(), evaluation.comparisons()])
