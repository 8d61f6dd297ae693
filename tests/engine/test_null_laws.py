"""The law of the null: where no head looks at content, nothing is found; every quantity has its null or says why not."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

import mechattn as ma
from mechattn.analysis import ANALYSES
from mechattn.analysis.analysis import PairAnalysis, RowAnalysis
from mechattn.analysis.received_attention import AttentionMap
from mechattn.analysis.score_decomposition import ScoreDecomposition
from mechattn.engine import request_checks
from tests.tiny_families import tiny_model

FAMILIES = ("Llama", "Gemma 3")  # without and with windows
ALIBI = "Falcon-RW (ALiBi)"
BY_POSITION = (ALIBI, "GPT-OSS")  # ALiBi and learned sinks: a blind head is not uniform
# A comparison computes the same for every family and every condition; but a window leaves cells out.
WITH_WINDOWS = {"received", "first_mass", "inserted_mass", "sinks"}
# The queries [head, …] among the rows of each module that has any.
QUERIES = {
    "q_proj": lambda rows, heads: rows.unflatten(0, (heads, -1)),
    "query_key_value": lambda rows, heads: rows.unflatten(0, (heads, 3, -1))[:, 0],
}
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*cells are left out"
)  # beyond a window there is nothing
OF_ROWS = [kind for kind in ANALYSES if isinstance(kind(), (RowAnalysis, PairAnalysis))]


@torch.no_grad()
def zero_queries(model, but=None):
    """All queries zero; those of one head of layer 0 as they were, where asked for."""
    heads = model.config.num_attention_heads
    blocks = max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
    for layer, block in enumerate(blocks):
        for name, module in block.named_modules():
            queries_in = QUERIES.get(name.rpartition(".")[2])
            if queries_in is None:
                continue
            for parameter in module.parameters():
                queries = queries_in(parameter, heads)
                for head in range(heads):
                    if (layer, head) != (0, but):
                        queries[head] = 0


def blind(family, tokenizer, but=None):
    model = tiny_model(family, len(tokenizer))
    zero_queries(model, but)
    return ma.load_model(model, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def answered():
    """Short prompts with a system text longer than the insertion, a question and an answer."""
    system = "Read the problem with care and then write down each step that leads to the answer of it, one by one. "
    return [
        ma.Prompt(
            question=f"Tom has {n} apples and eats {n - 1}. How many are left",
            system=system,
            answer="It is one",
            id=str(n),
        )
        for n in (3, 41, 520)
    ]


def conditions(family):
    """Every place, and every variant at one of them."""
    places = ("start", "before_question", "random")
    by_name = {place: ma.MeaninglessTokens("/", 20, place=place) for place in places}
    by_name["before_question masked"] = by_name["before_question"].masked()
    if family != ALIBI:  # which takes no position ids
        by_name["before_question unshifted"] = by_name["before_question"].unshifted()
    return by_name


def measured(family, model, prompts):
    """Every analysis of rows, under every condition that the model takes."""
    analyses = [
        ma.ReceivedAttention(),
        ma.analyses.AffineShift(per_query=True),
        ma.analyses.SegmentFlow(),
        ma.analyses.TopTargetUpdates(),
        ma.analyses.AttentionFocus(half_mass=True, per_query=True),
        ma.analyses.AttentionSinks(least_queries=8),
        ma.analyses.AttentionBudget(),
    ]
    without_null = {AttentionMap, ma.analyses.SegmentLogits}
    # A new analysis of rows belongs into the list above.
    assert {*map(type, analyses)} | without_null == set(OF_ROWS)
    return ma.run(model, prompts, conditions(family), analyses, keep="prompts")


def departures(result, kind):
    """The quantities that are further from their null than float32 explains, relative to 1 or to their size.

    One query's distance is a difference of two positions in float32, ten times as far from exact as a mean.
    """
    found = {}
    for dataset in result.datasets.values():
        for name, values in dataset.data_vars.items():
            null_name = f"{name}{kind}"
            if "_per_prompt" in name:
                null_name = name.replace("_per_prompt", f"{kind}_per_prompt")
            if null_name not in dataset or "prompt" not in values.dims or name.endswith(kind):
                continue
            null = dataset[null_name].broadcast_like(values).transpose(*values.dims)
            assert_array_equal(values.isnull(), null.isnull(), err_msg=name)
            distance = float((abs(values - null) / np.maximum(abs(null), 1)).max())
            if distance > (1e-4 if "_at_" in name else 1e-5):
                found[name] = distance
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_where_every_head_is_blind_nothing_is_beyond_the_null(
    family, tokenizer, answered, monkeypatch
):
    # Such a model takes no notice of positions, so it cannot be found out whether it is told them.
    monkeypatch.setattr(request_checks, "takes_position_ids", lambda model: True)
    result = measured(family, blind(family, tokenizer), answered)
    assert departures(result, "_uniform") == {}
    only = WITH_WINDOWS if family == "Gemma 3" else None
    compared = every_comparison(result, "before_question masked", "uniform", only)
    assert compared >= WITH_WINDOWS
    if only is None:
        assert {"mass", "entropy", "flow", "scale", "total_variation"} <= compared
        assert {"half_mass_keys", "first_alpha"} <= compared


@pytest.mark.parametrize("family", BY_POSITION)
def test_positional_scores_take_the_blind_null(family, tokenizer, answered, monkeypatch):
    monkeypatch.setattr(request_checks, "takes_position_ids", lambda model: family != ALIBI)
    result = measured(family, blind(family, tokenizer), answered)
    assert departures(result, "_blind") == {}
    focus = result["attention_focus"]
    from_uniform = focus.distance_at_per_prompt - focus.distance_at_uniform_per_prompt
    assert float(abs(from_uniform).max()) > 0.05, "such a head is not uniform"
    only = {"received", "entropy"}
    assert every_comparison(result, "before_question", "blind", only) == only


def every_comparison(result, condition, null, only=None):
    """All quantities that ``compare`` takes, or only some, are 0 beyond the null; which they are."""
    seen = set()
    for dataset in result.datasets.values():
        for name, values in dataset.data_vars.items():
            if not {"prompt", "layer"} <= set(values.dims) or f"{name}_{null}" not in dataset:
                continue
            if values.sel(condition="baseline").isnull().all():
                continue  # of inserted tokens: nothing to be compared with
            quantity = str(name).removesuffix("_by_segment")
            if only is not None and quantity not in only:
                continue
            scale = None
            if "segment" in values.dims and (values.sel(segment="question") == 0).all():
                scale = "difference"  # the first token, where every window is past it
            table = result.compare(
                condition, quantity=quantity, resamples=99, null=null, scale=scale, columns="all"
            )
            assert table.beyond.abs().max() < 1e-5, (name, condition)
            seen.add(quantity)
    return seen


def test_one_head_that_looks_at_content_is_found(tokenizer, answered):
    """The law would notice."""
    model = blind("Llama", tokenizer, but=2)
    analyses = [
        ma.ReceivedAttention(),
        ma.analyses.AttentionFocus(half_mass=True),
        ma.analyses.SegmentFlow(),
        ma.analyses.AffineShift(),
    ]
    result = ma.run(model, answered, {"slash": ma.MeaninglessTokens("/", 20)}, analyses)
    for quantity in ("received", "mass", "distance", "entropy", "first_mass", "scale"):
        table = (
            result.compare("slash", quantity=quantity, resamples=99, null="uniform", columns="all")
            .set_index(["layer", "head"])
            .beyond.abs()
        )
        assert table.loc[(0, 2)] > 1e-3, quantity
        assert table.drop((0, 2)).max() < 1e-5, quantity


def test_every_quantity_has_its_null_or_says_why_not(toy, short_prompts):
    conditions = {"slash": ma.MeaninglessTokens("/", 20)}
    kinds = [kind for kind in ANALYSES if kind is not ScoreDecomposition]  # not defined with RoPE
    analyses = [kind() for kind in kinds]
    result = ma.run(toy, short_prompts[:1], conditions, analyses, layers=[0])
    for analysis in analyses:
        dataset = result[analysis.name]
        for name in analysis.quantities:
            assert (f"{name}_uniform" in dataset) != bool(dataset[name].attrs["no_null"]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_null_has_the_closed_form_where_there_is_one(family, shared, answered):
    """Entropy is log n, distance (n − 1) / 2, half of the mass n / 2 keys, λ the share of original keys."""
    model = shared(family)
    slash = ma.MeaninglessTokens("/", 20)
    analyses = [
        ma.analyses.AttentionFocus(half_mass=True, per_query=True),
        ma.analyses.AffineShift(per_query=True),
    ]
    result = ma.run(model, answered[:1], {"slash": slash}, analyses, keep="prompts")
    sequence = slash.apply(answered[0], model)
    for layer in range(2):
        window = 8 if family == "Gemma 3" and layer == 0 else 10**6
        n = np.minimum(np.arange(len(sequence)) + 1, window).astype(float)
        inserted = [
            sequence.inserted[max(0, q + 1 - window) : q + 1].sum() for q in range(len(sequence))
        ]
        expected = {
            "entropy": np.log(n), "distance": (n - 1) / 2, "half_mass_keys": np.ceil(n / 2), "self_mass": 1 / n,
            "first_mass": np.where(np.arange(len(n)) < window, 1 / n, 0), "inserted_mass": np.array(inserted) / n,
        }  # fmt: skip
        at = dict(prompt=0, condition=1, layer=layer)
        for name, values in expected.items():
            got = result["attention_focus"][f"{name}_at_uniform_per_prompt"].isel(at)
            assert_allclose(got[1:], values[1:], atol=1e-5, err_msg=name)
        got = result["affine_shift"]["scale_at_uniform_per_prompt"].isel(at)
        assert_allclose(got, 1 - np.array(inserted) / n, atol=1e-6)
