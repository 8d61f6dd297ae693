"""Attention while a model writes its own answers, right against wrong, in pairs of the same length."""

import os
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
import xarray as xr
from scipy import stats

import mechattn as ma
from mechattn.axes import SEGMENTS
from mechattn.errors import OptionError
from mechattn.evaluation.evaluation import Evaluation
from mechattn.evaluation.while_answering import WhileAnswering, matched_pairs
from mechattn.stats.units import Units
from tests.conftest import MODELS
from tests.evaluation import by_hand

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
    ids = model.tokenizer(list(text), add_special_tokens=False)["input_ids"] if text else []
    return tuple(token for of_character in ids for token in of_character)


def evaluation(toy, prompts):
    """Answers written by hand: what they say decides nothing here."""
    answers = [
        by_hand.answer(
            prompt.id,
            name,
            number % 2 == 0,
            text=text,
            tokens=ids_of(toy, text),
            solution=prompt.solution,
        )
        for name in ("baseline", "slash")
        for number, (prompt, text) in enumerate(zip(prompts, TEXTS, strict=False))
    ]
    return Evaluation(tuple(answers), {"conditions": ["baseline", "slash"]})


@pytest.fixture(scope="module")
def measured(toy, prompts):
    return ma.while_answering(toy, evaluation(toy, prompts), prompts[:6], SLASH)


@pytest.mark.parametrize("earlier", [0, 1], ids=["reading", "predicting"])
def test_it_is_the_attention_of_the_answers_own_tokens(measured, toy, prompts, earlier):
    """Query by query, from the pattern of the hooked model over the ids that were written."""
    if earlier:
        measured = ma.while_answering(
            toy, evaluation(toy, prompts), prompts[:6], SLASH, predicting=True
        )
    assert ("predict" if earlier else "read") in str(measured).splitlines()[0]
    sequence = SLASH["slash"].apply(prompts[2], toy)
    answer = torch.tensor(ids_of(toy, TEXTS[2]))
    cut_otherwise = toy.tokenizer(TEXTS[2], add_special_tokens=False)["input_ids"]
    assert answer.tolist() != cut_otherwise
    tokens = torch.cat([sequence.tokens, answer])
    _, cache = toy.run_with_cache(
        tokens[None], names_filter=lambda name: name.endswith("hook_pattern")
    )

    queries = [query - earlier for query in range(len(sequence), len(tokens))]
    of_slash = measured.data.sel(condition="slash")
    for layer, head in ((0, 1), (3, 5)):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0, head].double().numpy()
        for segment in ("system", "question", "inserted"):
            keys = np.append(sequence.of_segment(segment).numpy(), [False] * len(answer))
            expected = np.mean([pattern[query][keys].sum() for query in queries])
            uniform = np.mean([keys[: query + 1].sum() / (query + 1) for query in queries])
            cell = of_slash.sel(segment=segment)[dict(prompt=2, layer=layer, head=head)]
            assert float(cell.flow) == pytest.approx(expected, abs=1e-5), segment
            assert float(cell.uniform) == pytest.approx(uniform, abs=1e-6)
    assert of_slash.flow[4].isnull().all(), "an empty answer looks nowhere"
    assert measured.data.flow.sel(condition="baseline", segment="inserted").isnull().all()


@needs_models
def test_stored_answers_of_a_real_model_are_its_own():
    """Attention of plain transformers in float64 over the ids; some of these answers would be cut otherwise as texts."""
    from transformers import AutoModelForCausalLM

    place = str(MODELS / "stories260K")
    model = ma.load_model(place)
    native = AutoModelForCausalLM.from_pretrained(
        place, dtype=torch.float64, attn_implementation="eager"
    )
    texts = ("Once upon a time", "One day, Lily", "The big red ball")
    prompts = [ma.Prompt(text, id=text, solution="1") for text in texts]
    generated = ma.evaluate(model, prompts, new_tokens=60, temperature=1.0)
    by_hand = replace(generated.answers[2], tokens=ids_of(model, "Lily ran."))
    answered = Evaluation((*generated.answers[:2], by_hand), generated.provenance)

    for predicting in (False, True):
        flow = ma.while_answering(model, answered, prompts, predicting=predicting).data.flow
        for number, answer in enumerate(answered.answers):
            sequence = ma.Baseline().apply(prompts[number], model)
            ids = torch.cat([sequence.tokens, torch.tensor(answer.tokens)])
            keys = sequence.of_segment("question").nonzero()[:, 0]
            queries = torch.arange(len(sequence), len(ids)) - int(predicting)
            for layer, pattern in enumerate(native(ids[None], output_attentions=True).attentions):
                expected = pattern[0][:, queries][:, :, keys].sum(-1).mean(-1).detach().numpy()
                found = flow[0, number, layer, :, QUESTION]
                np.testing.assert_allclose(found, expected, atol=2e-6)


def test_pairs_are_as_many_and_as_alike_as_can_be():
    draw = np.random.default_rng(0)
    right = np.array([True] * 4 + [False] * 3)
    for _ in range(20):
        tokens = draw.integers(5, 40, 7)
        pairs = matched_pairs(tokens, right, ~right)
        all_pairings = [zip(order, (4, 5, 6), strict=False) for order in permutations(range(4), 3)]
        best = max(_quality(tokens, pairing) for pairing in all_pairings)
        assert _quality(tokens, pairs) == best
        assert len(set(pairs[:, 0])) == len(pairs) == len(set(pairs[:, 1]))
    nobody = np.zeros(7, dtype=bool)
    assert len(matched_pairs(tokens, ~nobody, nobody)) == 0


def _quality(tokens, pairs):
    """Pairs that are near enough, and then how near."""
    distances = []
    for one, other in pairs:
        distance = abs(int(tokens[one]) - int(tokens[other]))
        if distance <= max(0.15 * max(tokens[one], tokens[other]), 2):
            distances.append(distance)
    return len(distances), -sum(distances)


def simulated(effect, confounded, groups=None, seed=1, shared=0.0):
    """Wrong answers are longer; attention to the question falls with length, and in right ones is larger by an effect."""
    count = 60
    draw = np.random.default_rng(seed)
    right = np.arange(count) % 2 == 0
    tokens = draw.integers(20, 40, count)
    if confounded:
        tokens += 8 * ~right
    null = np.zeros((count, 2, 3, len(SEGMENTS)))
    null[..., QUESTION] = (20 / tokens)[:, None, None]
    flow = null + draw.normal(0, 0.01, null.shape)
    flow[..., QUESTION] += effect * right[:, None, None]
    units = Units(count)
    if groups is not None:  # in each, right answers differ from wrong ones, in either direction
        units = Units.grouped([str(number % groups) for number in range(count)])
        flow[..., QUESTION] += (draw.normal(0, shared, groups)[units.group_of_prompt] * right)[
            :, None, None
        ]

    dims = ("condition", "prompt", "layer", "head", "segment")
    data = xr.Dataset(
        {
            "flow": (dims, flow[None]),
            "uniform": (dims, null[None]),
            "right": (dims[:2], right[None]),
            "tokens": (dims[:2], tokens[None]),
        },
        coords={
            "condition": ["slash"],
            "layer": [0, 1],
            "head": range(3),
            "segment": list(SEGMENTS),
        },
    )
    return WhileAnswering(data, units, "simulated")


def test_an_effect_is_found_and_length_is_not():
    table = simulated(effect=0.05, confounded=True).table().iloc[0]
    assert table.p_beyond < 0.01
    assert table.beyond_low < 0.05 < table.beyond_high
    none = simulated(effect=0.0, confounded=True).table().iloc[0]
    assert none.right - none.wrong > 0.05, "right answers are shorter"
    assert none.beyond_low < 0 < none.beyond_high
    assert abs(none.difference) < (none.right - none.wrong) / 2
    heads = simulated(effect=0.05, confounded=False).heads("slash")
    assert len(heads) == 6
    assert (heads.q_beyond < 0.05).all()


def test_pairs_are_made_within_groups_which_are_the_unit():
    measured = simulated(effect=0.05, confounded=False, groups=5, shared=0.01)
    table = measured.table()
    assert table.attrs["unit"] == "groups (5 of 60 prompts)"
    data = measured.data.sel(condition="slash", segment="question")
    right = data.right.values
    beyond = (data.flow - data.uniform).mean(("layer", "head")).values
    by_group = []
    right_by_group = []
    for group in range(5):
        members = np.arange(group, 60, 5)
        pairs = matched_pairs(data.tokens.values[members], right[members], ~right[members])
        by_group.append(np.mean(beyond[members[pairs[:, 0]]] - beyond[members[pairs[:, 1]]]))
        right_by_group.append(data.flow.values[members[right[members]]].mean())
    assert table.beyond[0] == pytest.approx(np.mean(by_group))
    half = stats.t.ppf(0.975, 4) * np.std(by_group, ddof=1) / np.sqrt(5)
    assert table.beyond_high[0] == pytest.approx(np.mean(by_group) + half)
    assert table.right[0] == pytest.approx(np.mean(right_by_group))
    with pytest.raises(OptionError, match="both from one group, in at least 3 groups"):
        simulated(effect=0.05, confounded=False, groups=2).heads("slash")


def test_uniform_attention_is_averaged_over_groups_too():
    """A group of nine right answers and two of one: attention that is uniform does not differ from uniform attention."""
    measured = simulated(effect=0.0, confounded=False)
    data = measured.data.isel(prompt=slice(0, 22, 2))  # the right answers
    uniform = [0.9] * 9 + [0.3, 0.3]
    of_group = ["a"] * 9 + ["b", "c"]
    for name in ("flow", "uniform"):
        data[name] = data[name] * 0 + xr.DataArray(uniform, dims="prompt")
    table = WhileAnswering(data, Units.grouped(of_group), "simulated").table().iloc[0]
    assert table.right_uniform == pytest.approx((0.9 + 0.3 + 0.3) / 3)
    assert table.right == pytest.approx(table.right_uniform)


def test_two_groups_are_refused_before_the_model_reads(toy, prompts, monkeypatch):
    answers = evaluation(toy, prompts)
    groups = {prompt.id: str(number // 3) for number, prompt in enumerate(prompts[:6])}
    grouped = replace(answers, provenance=answers.provenance | {"groups": groups})
    measured = ma.while_answering(toy, grouped, prompts[:6], unit="prompt")
    assert measured.units.unit == "prompts"

    def unreached(*arguments, **options):
        pytest.fail("the model was run")

    monkeypatch.setattr("mechattn.evaluation.while_answering.run", unreached)
    with pytest.raises(OptionError, match=r'2 groups of 6 prompts.*unit="prompt"'):
        ma.while_answering(toy, grouped, prompts[:6])


def test_what_cannot_be_compared(measured, toy, prompts):
    assert np.isnan(measured.table().beyond).all(), "two pairs are too few"
    assert "too few" in ma.render.while_answering(measured).layout.meta["says"]
    with pytest.raises(OptionError, match="pairs of a right and a wrong answer"):
        measured.heads("slash")
    with pytest.raises(OptionError, match="condition='dots': choose one of"):
        measured.heads("dots")
    with pytest.raises(OptionError, match="to='answers': choose one of"):
        measured.table("answers")
    with pytest.raises(OptionError, match=r"level=95\.0: give a probability"):
        simulated(effect=0.05, confounded=False).table(level=95.0)
    with pytest.raises(OptionError, match="condition='dots': choose one of"):
        ma.while_answering(toy, evaluation(toy, prompts), prompts[:6], {"dots": SLASH["slash"]})
    with pytest.raises(OptionError, match="prompt 6 was not evaluated"):
        ma.while_answering(toy, evaluation(toy, prompts), prompts[:8])
    interrupted = Evaluation(evaluation(toy, prompts).answers[:-1], {})
    with pytest.raises(OptionError, match="prompt 5 was not evaluated under 'slash'"):
        ma.while_answering(toy, interrupted, prompts[:6], SLASH)


def test_the_figure_shows_the_table():
    measured = simulated(effect=0.05, confounded=True)
    figure = ma.render.while_answering(measured)
    table = measured.table().iloc[0]
    right, null, wrong, _, pairs = figure.data
    assert right.x[0] == pytest.approx(100 * table.right)
    assert wrong.x[0] == pytest.approx(100 * table.wrong)
    assert null.x[0] == pytest.approx(100 * table.right_uniform)
    assert pairs.x[0] == pytest.approx(100 * table.beyond)
    assert pairs.error_x.array[0] == pytest.approx(100 * (table.beyond_high - table.beyond))


def test_dose_curves_hold_accuracy_and_attention(toy, prompts):
    conditions = ma.sweep(SLASH["slash"], count=[3, 9])
    result = ma.run(toy, prompts[:4], conditions)
    is_right = {"baseline": [1] * 4, "count=3": [1] * 4, "count=9": [0] * 4}
    accuracy = by_hand.evaluation({"conditions": list(is_right)}, **is_right).accuracy()
    figure = ma.render.dose_curves(accuracy, result)
    assert list(figure.data[0].y) == [100, 100, 0]
    change = 100 * float(result.verdict("count=9").change.estimate)
    assert figure.data[1].y[-1] == pytest.approx(change)
    with pytest.raises(OptionError, match="'count=9' was evaluated but not run"):
        ma.render.dose_curves(accuracy, result.sel(condition=["baseline", "count=3"]))
