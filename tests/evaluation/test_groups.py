"""Right and wrong answers to problems that come in groups: over groups, against loops; without them as before."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

import mechattn as ma
from mechattn.errors import OptionError
from mechattn.evaluation.evaluation import Evaluation
from mechattn.evaluation.graded_answers import GradedAnswer
from mechattn.stats.accuracy import share_difference, share_interval
from mechattn.stats.intervals import t_interval

N, SIZE = 10, 4


def made_up(seed=0, samples=1, effect=0.0, grouped=True):
    """Forty problems in groups of four that are mostly right together, under two conditions."""
    generator = np.random.default_rng(seed)
    chance = np.clip(generator.normal(0.6, 0.3, N), 0.02, 0.98)
    answers = []
    for name, less in (("baseline", 0.0), ("slash", effect)):
        each = np.clip(chance - less + generator.normal(0, 0.15, N), 0, 1)
        answers += [
            GradedAnswer(
                str(i),
                name,
                s,
                "",
                (i, s, i),
                None,
                "1",
                bool(generator.random() < each[i // SIZE]),
                True,
                0.0,
            )
            for i in range(N * SIZE)
            for s in range(samples)
        ]
    about = {"conditions": {"baseline": "", "slash": ""}}
    return Evaluation(
        tuple(answers),
        about | ({"groups": {str(i): f"g{i // SIZE}" for i in range(40)}} if grouped else {}),
    )


def by_group(values):
    return np.array([np.mean(values[g * SIZE : (g + 1) * SIZE]) for g in range(N)])


@pytest.mark.parametrize("samples", [1, 3])
def test_accuracies_and_differences_are_of_group_means(samples):
    evaluation = made_up(samples=samples)
    table = evaluation.accuracy().set_index("condition")
    right = {name: evaluation.right(name).mean(1) for name in ("baseline", "slash")}
    for name, values in right.items():
        expected = share_interval(by_group(values))
        np.testing.assert_allclose(
            table.loc[name, ["accuracy", "low", "high"]].astype(float), expected
        )
    assert set(table.n) == {N}
    assert evaluation.accuracy().attrs["unit"] == "groups (10 of 40 prompts)"
    compared = evaluation.compare("slash")
    d = by_group(right["slash"] - right["baseline"])
    exact = stats.permutation_test(
        (d,), np.mean, permutation_type="samples", n_resamples=np.inf
    ).pvalue
    given = [compared[name] for name in ("difference", "p", "n", "low", "high")]
    assert given == pytest.approx([d.mean(), exact, N, *share_difference(d)[1:]])
    assert compared["detectable"] > 0.5 * (compared["high"] - compared["low"])
    assert ("only_first" in compared) == (samples == 1)
    shares = evaluation.pass_at_k(1).set_index("condition")
    np.testing.assert_allclose(
        shares.loc["slash", ["estimate"]].astype(float), by_group(right["slash"]).mean()
    )
    mediated = evaluation.mediation("slash", {"all": "slash"}, resamples=99)
    assert (mediated.attrs["n"], mediated.attrs["unit"]) == (N, "groups (10 of 40 prompts)")
    diverse = evaluation.diversity().set_index("condition")
    assert np.isfinite(diverse.loc["slash", "estimate"])


def test_without_groups_and_with_unit_prompt_it_is_mcnemars_test():
    grouped, alone = made_up(), made_up(grouped=False)
    assert grouped.compare("slash", unit="prompt") == alone.compare("slash")
    assert alone.compare("slash")["n"] == 40
    assert alone.compare("slash") != grouped.compare("slash"), "negative control"
    np.testing.assert_array_equal(grouped.accuracy(unit="prompt").values, alone.accuracy().values)
    assert alone.accuracy().attrs["unit"] == "prompts"
    for name in ("pass_at_k", "best_of"):
        assert getattr(grouped, name)(1, unit="prompt").equals(getattr(alone, name)(1)), name


def test_no_spread_between_groups_is_no_certainty():
    evaluation = made_up()
    alike = Evaluation(
        tuple(replace(answer, right=True) for answer in evaluation.answers), evaluation.provenance
    )
    table = alike.accuracy()
    low = stats.binomtest(N, N).proportion_ci(method="wilson").low
    assert table.low.tolist() == pytest.approx([low, low]), "as if each group were one problem"
    compared = alike.compare("slash")
    assert (compared["difference"], compared["p"]) == (0, 1)
    assert compared["low"] == -compared["high"] < -0.2
    assert compared["detectable"] > 0.2


def test_several_conditions_are_one_family():
    evaluation = made_up()
    third = [
        replace(answer, condition="dots")
        for answer in evaluation.answers
        if answer.condition == "slash"
    ]
    made = Evaluation((*evaluation.answers, *third), evaluation.provenance)
    table = made.comparisons()
    assert table.condition.tolist() == ["slash", "dots"]
    assert table.p.tolist() == [made.compare(name)["p"] for name in table.condition]
    np.testing.assert_allclose(table.q, stats.false_discovery_control(table.p))
    other = evaluation.comparisons()
    assert ma.adjust([table, other]).condition.tolist() == ["slash", "dots", "slash"]
    assert (
        ma.adjust([table, other]).q_difference.tolist()
        == stats.false_discovery_control([*table.p, *other.p]).tolist()
    )
    with pytest.raises(OptionError, match="no condition other than 'only'"):
        Evaluation(
            tuple(replace(a, condition="only") for a in third), evaluation.provenance
        ).comparisons("only")


def test_all_right_in_every_sample_is_no_certainty():
    alone = made_up(grouped=False)
    twice = [
        replace(answer, right=True, sample=sample) for answer in alone.answers for sample in (0, 1)
    ]
    low = stats.binomtest(40, 40).proportion_ci(method="wilson").low
    made = Evaluation(tuple(twice), alone.provenance)
    assert made.accuracy().low.tolist() == pytest.approx([low, low])
    for table in (made.pass_at_k(2), made.best_of(2)):
        assert table.low.tolist() == pytest.approx([low, low])
    diverse = made.diversity()
    assert (diverse.high - diverse.low > 0.05).all(), "all problems are equally diverse"
    distinct = np.full(40, diverse.estimate[0])
    assert np.ptp(t_interval(distinct)) < 1e-12, "negative control: a t interval"
    change = made.mediation("slash", {"all": "slash"}).iloc[0]
    assert change.change_low < 0 < change.change_high


def test_a_few_problems_of_one_group_leave_the_problem_the_unit():
    alone = made_up(grouped=False)
    for pairs, unit in ((2, "prompts"), (4, "groups (36 of 40 prompts)")):
        groups = {str(i): str(i - i % 2 if i < 2 * pairs else i) for i in range(40)}
        made = Evaluation(alone.answers, alone.provenance | {"groups": groups})
        assert made.accuracy().attrs["unit"] == unit
        assert (made.compare("slash") == alone.compare("slash")) == (unit == "prompts")


def test_groups_keep_false_findings_rare():
    """400 evaluations in which the condition does nothing to a group but what chance does to it as a whole."""
    over_groups = [made_up(seed).compare("slash") for seed in range(400)]
    assert np.mean([made["p"] < 0.05 for made in over_groups]) < 0.08
    assert np.mean([made["low"] <= 0 <= made["high"] for made in over_groups]) > 0.92


def test_the_best_is_chosen_and_reported_on_different_groups():
    evaluation = made_up()
    original = Evaluation._of
    halves = []

    def spy(self, problems):
        halves.append({self.provenance["groups"][problem] for problem in problems})
        return original(self, problems)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Evaluation, "_of", spy)
        best = evaluation.best()
    assert not halves[0] & halves[1]
    assert best["n"] == 5


def test_a_group_or_two_are_too_few(toy):
    some = [replace(prompt, group="one") for prompt in ma.load_prompts("word-problems", limit=4)]
    evaluation = ma.evaluate(toy, some, {"slash": ma.MeaninglessTokens("/", 5)}, new_tokens=2)
    assert evaluation.provenance["groups"] == {str(i): "one" for i in range(4)}
    with pytest.raises(OptionError, match="1 groups of 4 prompts"):
        evaluation.accuracy()
    high = stats.binomtest(0, 4).proportion_ci(method="wilson").high
    assert evaluation.accuracy(unit="prompt").high[0] == pytest.approx(high)
    alone = ma.evaluate(toy, ma.load_prompts("word-problems", limit=4), new_tokens=2)
    assert "groups" not in alone.provenance, "each prompt has a template of its own"
