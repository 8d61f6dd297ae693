"""An analysis of one number a query, against whole patterns in float64; its null is that of uniform attention."""

import pytest
import torch
import xarray as xr

import mechattn as ma
from mechattn.functional.focus import looking_back


class Reach(ma.analyses.QueryAnalysis):
    name = "reach"
    numbers = {
        "reach": ("positions", "sum over keys of A (query - key)"),
        "top": ("probability", "the largest probability"),
    }

    def of_queries(self, rows):
        query = torch.arange(rows.queries.start, rows.queries.stop)
        key = torch.arange(rows.keys.start, rows.keys.stop)
        return {
            "reach": (rows.pattern * (query[:, None] - key)).sum(-1),
            "top": rows.pattern.amax(-1),
        }


@pytest.fixture(scope="module")
def result(toy, short_prompts):
    return ma.run(
        toy, short_prompts, {"slash": ma.MeaninglessTokens(count=7)}, Reach(), memory="4MiB"
    )


@pytest.mark.parametrize("condition", ["baseline", "slash"])
def test_means_over_segments_are_those_of_whole_patterns(toy, result, condition):
    sequences = result["sequences"].sel(condition=condition)
    for i in (0, 4):
        segment = sequences.segment_index.isel(prompt=i).values
        tokens = torch.tensor(sequences.tokens.isel(prompt=i).values[segment >= 0]).long()
        question = torch.tensor(segment[segment >= 0] == 4)
        _, cache = toy.run_with_cache(tokens[None])
        for layer in range(toy.cfg.n_layers):
            pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0].double()
            n = len(tokens)
            far = torch.arange(n)[:, None] - torch.arange(n)
            slow = {
                "reach": (pattern * far).sum(-1)[:, question].mean(-1),
                "top": pattern.amax(-1)[:, question].mean(-1),
            }
            for name, expected in slow.items():
                found = (
                    result["reach"][name]
                    .isel(prompt=i)
                    .sel(condition=condition, layer=layer, segment="question")
                )
                torch.testing.assert_close(
                    torch.tensor(found.values).double(), expected, rtol=1e-5, atol=1e-6
                )


def test_its_null_is_that_of_uniform_attention(result):
    at = (
        result["reach"]
        .reach_uniform.sel(condition="baseline", layer=0, segment="question")
        .isel(prompt=0)
    )
    segment = result["sequences"].segment_index.sel(condition="baseline").isel(prompt=0).values
    where = (segment == 4).nonzero()[0]
    assert float(at) == pytest.approx((where / 2).mean(), rel=1e-5)
    assert (
        result.compare("slash", quantity="reach", resamples=99).attrs["null"] == "uniform attention"
    )


class Previous(ma.analyses.QueryAnalysis):
    """Attention to the token before, which the first query doesn't have."""

    name = "previous"
    numbers = {
        "masked": ("probability", "only where there is one"),
        "unmasked": ("probability", "0 where there is none"),
    }
    each_query = True

    def of_queries(self, rows):
        paid = looking_back(rows.pattern, 1, rows.queries.start, rows.keys.start)
        has = (torch.arange(rows.queries.start, rows.queries.stop) > 0).expand_as(paid)
        return {"masked": (paid / has, has), "unmasked": paid}  # NaN where it is not defined


def test_a_number_that_some_queries_do_not_have(toy, short_prompts):
    analyses = [Previous(), ma.analyses.AttentionFocus(per_query=True)]
    result = ma.run(
        toy, short_prompts[:3], {"slash": ma.MeaninglessTokens(count=7)}, analyses, keep="prompts"
    )
    ours = result["previous"]
    theirs = result["attention_focus"]
    for name, expected in (
        ("masked", theirs.previous_mass),
        ("masked_uniform", theirs.previous_mass_uniform),
        ("masked_at_per_prompt", theirs.previous_mass_at_per_prompt),
    ):
        xr.testing.assert_allclose(ours[name], expected)
    assert ours.masked.sel(segment="first").isnull().all()
    assert (ours.unmasked.sel(segment="first") == 0).all(), (
        "negative control: without the mask it counts"
    )


@pytest.mark.parametrize(
    ("of_queries", "message"),
    [
        (
            lambda rows: {"x": rows.pattern.sum(-1)[:1]},
            r"'x' with the shape \[1, 8, \d+\], not \[batch, head",
        ),
        (
            lambda rows: {"x": (rows.pattern[:, :1, :, 0], rows.pattern.sum(-1) > 0)},
            r"\[\d, 1, \d+\]",
        ),
        (lambda rows: {"y": rows.pattern.sum(-1)}, r"gives \['y'\], and numbers declares \['x'\]"),
    ],
)
def test_numbers_that_are_not_one_for_each_query(toy, short_prompts, of_queries, message):
    """They would be spread over all queries, heads or prompts."""

    class Odd(ma.analyses.QueryAnalysis):
        name = "odd"
        numbers = {"x": ("1", "something")}

        def of_queries(self, rows):
            return of_queries(rows)

    with pytest.raises(ma.MechattnError, match=f"odd: .*{message}"):
        ma.run(toy, short_prompts[:1], {"slash": ma.MeaninglessTokens("/", 7)}, Odd(), layers=0)
