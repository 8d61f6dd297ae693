"""Cut edges, in both engines, against masked tokens and against patterns of the hooks."""

import pytest
import torch
from numpy.testing import assert_allclose

import mechattn as ma
from mechattn.analysis.analysis import AnalysisBase, Quantity
from mechattn.errors import OptionError

SLASH = ma.MeaninglessTokens("/", 20)


def measured(model, prompts, conditions, engine="streaming"):
    analyses = [ma.ReceivedAttention(), ma.analyses.AffineShift(), ma.analyses.SegmentFlow()]
    return ma.run(model, prompts[:3], conditions, analyses, engine=engine)


def assert_alike(one, other, most):
    """Every number of each prompt."""
    for name in ("received_attention", "affine_shift", "segment_flow"):
        for quantity, values in one[name].data_vars.items():
            if "prompt" in values.dims:
                assert_allclose(values, other[name][quantity], atol=most, err_msg=quantity)


def test_all_edges_to_the_inserted_span_are_what_masked_cuts(toy, short_prompts):
    conditions = {
        "masked": SLASH.masked(),
        "cut": SLASH.under(ma.interventions.AttentionKnockout()),
        "slash": SLASH,
    }
    result = measured(toy, short_prompts, conditions)
    assert_alike(*(result.sel(condition=name) for name in ("masked", "cut")), 1e-6)
    received = result["received_attention"].received_by_segment
    assert float(abs(received.sel(condition="cut") - received.sel(condition="slash")).max()) > 1e-3


def test_engines_agree_on_any_edges(toy, short_prompts):
    """The question doesn't see the system prompt, in two layers; inserted tokens don't see each other."""
    conditions = {
        "system": ma.Baseline(
            intervention=ma.interventions.AttentionKnockout("question", "system", layers=(1, 2))
        ),
        "inserted": SLASH.under(
            ma.interventions.AttentionKnockout("inserted", ("inserted", "system"))
        ),
    }
    one, other = (
        measured(toy, short_prompts, conditions, engine) for engine in ("streaming", "hooks")
    )
    assert_alike(one, other, 1e-4)
    to_system = one["segment_flow"].flow.sel(condition="system", to_segment="system")
    cut = to_system.sel(segment="question")
    assert float(abs(cut.sel(layer=[1, 2])).max()) == 0
    assert float(cut.sel(layer=[0, 3]).min()) > 0
    assert (to_system.sel(segment="template").mean("prompt") > 0).all()


def test_nulls_of_cut_layers_differ_from_those_of_the_others(toy, short_prompts):
    conditions = {
        "cut": ma.Baseline(
            intervention=ma.interventions.AttentionKnockout("question", "system", layers=2)
        )
    }
    data = measured(toy, short_prompts, conditions)["received_attention"]
    null = data.received_by_segment_uniform.sel(segment="question")
    apart = abs(null.sel(condition="cut") / null.sel(condition="baseline") - 1)
    assert apart.sel(layer=[0, 1, 3]).max() < 1e-6
    assert apart.sel(layer=2).min() > 1e-2
    assert (null.sel(condition="cut", layer=2) > null.sel(condition="baseline", layer=2)).all()


def test_a_token_always_sees_itself(toy):
    """A question whose tokens see nothing else gives all of its attention to itself."""
    knockout = ma.interventions.AttentionKnockout(
        "question", ("first", "template", "system", "question")
    )
    result = ma.run(
        toy,
        ma.Prompt("Tom has 3 apples."),
        {"alone": ma.Baseline(intervention=knockout)},
        ma.ReceivedAttention("question"),
    )
    received = result["received_attention"].sel(segment="question")
    for name in ("mass_by_segment", "mass_by_segment_uniform"):
        assert_allclose(received[name].sel(condition="alone"), 1, atol=1e-6)
    assert float(received.mass_by_segment.sel(condition="baseline").max()) < 1


def test_an_edge_that_is_not_there_cannot_be_cut(toy):
    for condition in (
        ma.Baseline(intervention=ma.interventions.AttentionKnockout()),
        SLASH.under(ma.interventions.AttentionKnockout("system", "question")),
    ):
        with pytest.raises(OptionError, match="cuts no edge"):
            condition.apply(ma.Prompt("Tom has 3 apples.", system="Solve.", id="a"), toy)


def test_a_model_that_takes_no_notice_is_found(tokenizer):
    """OPT's scores are read-only to hooks, so the hooks engine refuses; also where no attention is measured."""
    from mechattn.errors import ModelError
    from tests.tiny_families import tiny_model

    model = ma.load_model(tiny_model("GPT-Neo", len(tokenizer)), tokenizer=tokenizer)
    for analysis in (ma.ReceivedAttention(), ma.analyses.MlpActivations("absolute", 0.01)):
        with pytest.raises(ModelError, match="has no effect here"):
            ma.run(model, "Tom has 3 apples.", {"x": SLASH.masked()}, analysis, engine="hooks")


def test_two_cuts_at_once_are_refused(toy):
    with pytest.raises(OptionError, match="already has cut edges"):
        SLASH.masked().under(ma.interventions.AttentionKnockout("question", "system")).apply(
            ma.Prompt("Tom has 3 apples.", id="a"), toy
        )


class CutsSeen(AnalysisBase):
    """Notes in which of its methods an analysis is told of cut edges."""

    name = "cuts_seen"
    quantities = {"zero": Quantity(("head",), "probability", "0")}
    captures = ("hook_resid_pre",)

    def __init__(self):
        self.is_cut = {}

    def note(self, method, batch):
        self.is_cut.setdefault(method, set()).add(batch.edge_mask is not None)

    def start(self, batch, heads):
        self.note("start", batch)
        return {"zero": torch.zeros(len(batch.rows), heads)}

    def add(self, sums, rows):
        self.note("add", rows.batch)

    def add_pairs(self, sums, rows):
        self.note("add_pairs", rows.batch)

    def add_captures(self, sums, captures):
        self.note("add_captures", captures.batch)

    def add_activations(self, sums, activations):
        self.note("add_activations", activations.batch)
        self.note("pairs of activations", activations.pairs.batch)

    def values(self, sums, batch, window):
        self.note("values", batch)
        return sums


@pytest.mark.parametrize(("layer", "is_cut"), [(1, False), (2, True)])
def test_analyses_know_the_cut_edges_of_their_layer(toy, short_prompts, layer, is_cut):
    knockout = ma.interventions.AttentionKnockout("question", "first", layers=2)
    analysis = CutsSeen()
    conditions = {"cut": ma.Baseline(intervention=knockout)}
    ma.run(toy, short_prompts[:2], conditions, analysis, layers=[layer])
    assert len(analysis.is_cut) == 7
    assert all(seen == {is_cut} for seen in analysis.is_cut.values()), analysis.is_cut
