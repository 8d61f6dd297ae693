"""Attention while a model writes its own answers, right against wrong, in pairs of the same length."""

import os
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from scipy import stats

import mechattn as ma
from mechattn.axes import SEGMENTS
from mechattn.errors import OptionError
from mechattn.evaluation.evaluation import Evaluation
from mechattn.evaluation.graded_answers import GradedAnswer
from mechattn.evaluation.while_answering import WhileAnswering, matched_pairs
from mechattn.stats.units import Units
from tests.conftest import MODELS

needs_models = pytest.mark.skipif(
    not MODELS.is_dir() and not os.environ.get("CI"),
    reason=f"the models of others are not at {MODELS}",
)
QUESTION = SEGMENTS.index("question")
SLASH = {"slash": ma.MeaninglessTokens("/", 20)}
TEXTS = (
    "9 + 4 = 13. Answer: 13",
    "Answer: 7",
    "9 + 4 = 12. Answer: 12",
    "Answer: 8",
    "",
    "1 + 1 = 2. Answer: 2",
)


def ids_of(model, text):
    """Each character's own token: a text that a model may well write, but that its tokenizer would cut otherwise."""
    return tuple(
        token for c in text for token in model.tokenizer(c, add_special_tokens=False)["input_ids"]
    )


def evaluation(toy, prompts):
    """Answers written by hand: what they say decides nothing here."""
    answers = [
        GradedAnswer(p.id, name, 0, text, ids_of(toy, text), text, "1", bool(i % 2 == 0), True)
        for name in ("baseline", "slash")
        for i, (p, text) in enumerate(zip(prompts, TEXTS, strict=False))
    ]
    return Evaluation(tuple(answers), {"conditions": ["baseline", "slash"]})


@pytest.fixture(scope="module")
def measured(toy, prompts):
    return ma.while_answering(toy, evaluation(toy, prompts), prompts[:6], SLASH)


@pytest.fixture(scope="module")
def predicting(toy, prompts):
    return ma.while_answering(toy, evaluation(toy, prompts), prompts[:6], SLASH, predicting=True)


@pytest.mark.parametrize("earlier", [0, 1], ids=["reading", "predicting"])
def test_it_is_the_attention_of_the_answers_own_tokens(measured, predicting, toy, prompts, earlier):
    """Query by query, from the pattern of the hooked model over the ids that were written."""
    measured = predicting if earlier else measured
    assert ("predict" if earlier else "read") in str(measured).splitlines()[0]
    sequence = SLASH["slash"].apply(prompts[2], toy)
    answer = torch.tensor(ids_of(toy, TEXTS[2]))
    assert not answer.equal(
        torch.tensor(toy.tokenizer(TEXTS[2], add_special_tokens=False)["input_ids"])
    )
    tokens = torch.cat([sequence.tokens, answer])
    _, cache = toy.run_with_cache(
        tokens[None], names_filter=lambda name: name.endswith("hook_pattern")
    )
    queries = [q - earlier for q in range(len(sequence), len(tokens))]
    for layer, head in ((0, 1), (3, 5)):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0, head].double().numpy()
        for segment in ("system", "question", "inserted"):
            keys = np.append(sequence.of_segment(segment).numpy(), [False] * len(answer))
            expected = np.mean([pattern[q][keys].sum() for q in queries])
            found = [measured._to(measured.flow["slash"], segment)[2, layer, head]]
            assert found[0] == pytest.approx(expected, abs=1e-5), segment
            uniform = np.mean([keys[: q + 1].sum() / (q + 1) for q in queries])
            assert measured._to(measured.uniform["slash"], segment)[
                2, layer, head
            ] == pytest.approx(uniform, abs=1e-6)
    assert np.isnan(measured.flow["slash"][4]).all(), "an empty answer looks nowhere"
    assert np.isnan(measured._to(measured.flow["baseline"], "inserted")).all()


@needs_models
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_answers_of_a_real_model_are_those_that_it_wrote(temperature):
    """Attention of plain transformers in float64 over the ids; some of these answers would be cut otherwise as texts."""
    from transformers import AutoModelForCausalLM

    place = str(MODELS / "stories260K")
    model = ma.load_model(place)
    native = AutoModelForCausalLM.from_pretrained(
        place, dtype=torch.float64, attn_implementation="eager"
    )
    some = [
        ma.Prompt(text, id=text, solution="1")
        for text in ("Once upon a time", "One day, Lily", "The big red ball")
    ]
    made = ma.evaluate(model, some, new_tokens=60, temperature=temperature)
    made = Evaluation(
        (*made.answers[:2], replace(made.answers[2], tokens=ids_of(model, "Lily ran."))),
        made.provenance,
    )
    for predicting in (False, True):
        measured = ma.while_answering(model, made, some, predicting=predicting)
        for i, (prompt, answer) in enumerate(zip(some, made.answers, strict=True)):
            read = ma.Baseline().apply(prompt, model)
            ids = torch.cat([read.tokens, torch.tensor(answer.tokens)])
            keys = read.of_segment("question").nonzero()[:, 0]
            queries = torch.arange(len(read), len(ids)) - int(predicting)
            for layer, pattern in enumerate(native(ids[None], output_attentions=True).attentions):
                expected = pattern[0][:, queries][:, :, keys].sum(-1).mean(-1).detach().numpy()
                found = measured.flow["baseline"][i, layer, :, QUESTION]
                np.testing.assert_allclose(found, expected, atol=2e-6)


def test_pairs_are_as_many_and_as_alike_as_can_be():
    draw = np.random.default_rng(0)
    for _ in range(20):
        tokens = draw.integers(5, 40, 7)
        right = np.array([True] * 4 + [False] * 3)
        found = matched_pairs(tokens, right, ~right)
        best = max(
            _quality(tokens, zip(order, (4, 5, 6), strict=False))
            for order in permutations(range(4), 3)
        )
        assert _quality(tokens, found) == best
        assert len({a for a, _ in found}) == len(found) == len({b for _, b in found})
    assert (
        len(matched_pairs(np.array([10, 11]), np.array([True, True]), np.array([False, False])))
        == 0
    )


def _quality(tokens, pairs):
    """Pairs that are near enough, and then how near."""
    apart = [
        abs(int(tokens[a]) - int(tokens[b]))
        for a, b in pairs
        if abs(tokens[a] - tokens[b]) <= max(0.15 * max(tokens[a], tokens[b]), 2)
    ]
    return len(apart), -sum(apart)


def made_up(effect, confounded, count=60, groups=None, seed=1, shared=0.0):
    """Wrong answers are longer; attention to the question falls with length, and in right ones is larger by an effect."""
    draw = np.random.default_rng(seed)
    right = np.arange(count) % 2 == 0
    tokens = draw.integers(20, 40, count) + (0 if not confounded else 8 * ~right)
    null = np.zeros((count, 2, 3, 6))
    null[..., QUESTION] = (20 / tokens)[:, None, None]
    flow = null + draw.normal(0, 0.01, null.shape)
    flow[..., QUESTION] += effect * right[:, None, None]
    if groups is None:
        units = Units(count)
    else:  # in each, right answers differ from wrong ones by as much, in either direction
        units = Units.grouped([str(i % groups) for i in range(count)])
        flow[..., QUESTION] += (draw.normal(0, shared, groups)[units.of] * right)[:, None, None]
    return WhileAnswering(
        {"a": flow}, {"a": null}, {"a": right}, {"a": tokens}, (0, 1), units, "made up"
    )


def test_an_effect_is_found_and_length_is_not_taken_for_one():
    table = made_up(effect=0.05, confounded=True).table().iloc[0]
    assert table.p_beyond < 0.01
    assert table.beyond_low < 0.05 < table.beyond_high
    none = made_up(effect=0.0, confounded=True).table().iloc[0]
    assert none.right - none.wrong > 0.05, (
        "right answers look more at the question, since they are shorter"
    )
    assert none.beyond_low < 0 < none.beyond_high
    assert abs(none.difference) < (none.right - none.wrong) / 2
    heads = made_up(effect=0.05, confounded=False).heads("a")
    assert len(heads) == 6
    assert (heads.q_beyond < 0.05).all()


def test_pairs_are_made_within_groups_which_are_the_unit():
    measured = made_up(effect=0.05, confounded=False, groups=5, shared=0.01)
    table = measured.table()
    assert table.attrs["unit"] == "groups (5 of 60 prompts)"
    flow, null, right = (getattr(measured, name)["a"] for name in ("flow", "uniform", "right"))
    beyond = (flow - null)[..., QUESTION].mean((1, 2))
    by_group = []
    for group in range(5):
        of = np.flatnonzero(np.arange(60) % 5 == group)
        pairs = of[matched_pairs(measured.tokens["a"][of], right[of], ~right[of])]
        by_group.append(np.mean([beyond[a] - beyond[b] for a, b in pairs]))
    assert table.beyond[0] == pytest.approx(np.mean(by_group))
    half = stats.t.ppf(0.975, 4) * np.std(by_group, ddof=1) / np.sqrt(5)
    assert table.beyond_high[0] == pytest.approx(np.mean(by_group) + half)
    assert table.right[0] == pytest.approx(
        np.mean([flow[g:60:5][right[g:60:5]][..., QUESTION].mean() for g in range(5)])
    )
    with pytest.raises(OptionError, match="both from one group, in at least 3 groups"):
        made_up(effect=0.05, confounded=False, groups=2).heads("a")


def test_what_a_group_shares_is_not_taken_for_an_effect():
    """60 evaluations in which groups differ in either direction; as single problems, they give false findings."""
    grouped = [made_up(0.0, False, groups=5, seed=seed, shared=0.05) for seed in range(60)]
    single = [replace(one, units=Units(60)) for one in grouped]
    covered = []
    for some in (grouped, single):
        tables = [one.table() for one in some]
        covered.append(
            np.mean([table.beyond_low[0] <= 0 <= table.beyond_high[0] for table in tables])
        )
    assert covered[0] > 0.9
    assert covered[1] < 0.7, "negative control"


def test_what_cannot_be_compared(measured, toy, prompts):
    assert np.isnan(measured.table().beyond).all(), "two pairs are too few"
    assert "too few" in ma.render.while_answering(measured).layout.meta["says"]
    with pytest.raises(OptionError, match="pairs of a right and a wrong answer"):
        measured.heads("slash")
    with pytest.raises(OptionError, match="no condition 'dots'"):
        measured.heads("dots")
    with pytest.raises(OptionError, match="to='answers': choose one of"):
        measured.table("answers")
    with pytest.raises(OptionError, match="'dots' was not evaluated"):
        ma.while_answering(toy, evaluation(toy, prompts), prompts[:6], {"dots": SLASH["slash"]})
    with pytest.raises(OptionError, match="prompt 6 was not evaluated"):
        ma.while_answering(toy, evaluation(toy, prompts), prompts[:8])


def test_the_figure_shows_the_table():
    figure = ma.render.while_answering(made_up(effect=0.05, confounded=True))
    table = made_up(effect=0.05, confounded=True).table().iloc[0]
    right, null, wrong, _, pairs = figure.data
    assert right.x[0] == pytest.approx(100 * table.right)
    assert wrong.x[0] == pytest.approx(100 * table.wrong)
    assert null.x[0] == pytest.approx(100 * table.right_uniform)
    assert pairs.x[0] == pytest.approx(100 * table.beyond)
    assert pairs.error_x.array[0] == pytest.approx(100 * (table.beyond_high - table.beyond))


def test_dose_curves_hold_accuracy_and_attention(toy, prompts):
    conditions = ma.sweep(SLASH["slash"], count=[3, 9])
    result = ma.run(toy, prompts[:4], conditions)
    right = {"baseline": 1, "count=3": 1, "count=9": 0}
    answers = tuple(
        GradedAnswer(str(p), name, 0, "", (1,), "1", "1", bool(value), True)
        for name, value in right.items()
        for p in range(4)
    )
    accuracy = Evaluation(answers, {"conditions": list(right)}).accuracy()
    figure = ma.render.dose_curves(accuracy, result)
    assert list(figure.data[0].y) == [100, 100, 0]
    change = 100 * float(result.verdict("count=9").change.estimate)
    assert figure.data[1].y[-1] == pytest.approx(change)
    with pytest.raises(OptionError, match="'count=9' was evaluated but not the other"):
        ma.render.dose_curves(
            accuracy, ma.run(toy, prompts[:3], {"count=3": conditions["count=3"]})
        )
