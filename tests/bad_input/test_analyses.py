"""An analysis of one's own that does not give what it promises is told so at its first batch, in its own words."""

import pytest
import torch

import mechattn as ma
from mechattn.analysis.analysis import Quantity
from mechattn.errors import MechattnError, ModelError, OptionError


def own_key(quantities, values):
    """The analysis of the how-to, with other quantities or values."""

    class OwnKey:
        name = "own_key"
        options = {}

        def problem(self, sequence):
            return None

        def start(self, batch, heads):
            return {"own": torch.zeros(len(batch.rows), heads)}

        def add(self, sums, rows):
            own = rows.pattern.diagonal(rows.queries.start - rows.keys.start, -2, -1)
            sums["own"] += (own * rows.batch.real[:, None, rows.queries]).sum(-1)

    OwnKey.quantities = quantities
    OwnKey.values = lambda self, sums, batch, window: values(sums["own"])
    return OwnKey()


OWN = Quantity(("head",), "probability", "attention to the own key")


@pytest.mark.parametrize(
    ("quantities", "values", "message"),
    [
        (
            {"own": OWN},
            lambda own: {},
            "own_key: values.. lacks 'own', which its quantities declare",
        ),
        (
            {"own": OWN},
            lambda own: {"own": own, "more": own},
            "gives 'more', which is not one of its quantities .'own'.",
        ),
        (
            {"own": OWN},
            lambda own: {"own": own.sum(-1)},
            r"'own' has the shape \[4\]; its dims .*\[batch 4, head 8\]",
        ),
        (
            {"own": OWN},
            lambda own: {"own": own.numpy()},
            "'own' is a ndarray; values.. must return tensors",
        ),
        (
            {"own": Quantity(("head", "segment"), "probability", "own")},
            lambda own: {"own": own[..., None].expand(-1, -1, 5)},
            r"has the shape \[4, 8, 5\].*promise \[batch 4, head 8, segment 7\]",
        ),
    ],
)
def test_values_that_are_not_those_that_were_promised(toy, prompts, quantities, values, message):
    conditions = {"slash": ma.MeaninglessTokens("/", 20)}
    with pytest.raises(OptionError, match=message):
        ma.run(toy, prompts[:2], conditions, own_key(quantities, values))
    kept = own_key({"own": OWN}, lambda own: {"own": own})
    assert ma.run(toy, prompts[:2], conditions, kept)["own_key"].own.notnull().all()


class Surprise(ma.analyses.QueryAnalysis):
    name = "surprise"
    numbers = {"x": ("nats", "mean log of the pattern, which is 0 where a key is later")}

    def of_queries(self, rows):
        return {"x": rows.pattern.log().mean(-1)}


class Failing(Surprise):
    def values(self, sums, batch, window):
        if sums["x"].shape[1] > 1:  # one head is the null's
            raise ValueError("a number was expected")
        return super().values(sums, batch, window)


@pytest.mark.parametrize("engine", ["streaming", "hooks"])
@pytest.mark.parametrize("analysis", [Surprise(), Failing()], ids=["given", "raised"])
def test_nan_of_ones_own_analysis_is_told_from_the_models(
    checkpoint, analysis, engine, monkeypatch
):
    # Of weights that were so when the model was verified, which no probe has read.
    monkeypatch.setattr("mechattn.model.verified_models.refuse_changes", lambda *arguments: None)
    model = ma.load_model(str(checkpoint))
    for analyses in ([analysis], [ma.ReceivedAttention(), analysis]):
        with pytest.raises(
            OptionError,
            match=r"the analysis surprise gives NaN or infinity in layer 0 for prompt 0 .*fin",
        ):
            ma.run(model, "Tom has 3 apples.", analyses=analyses, engine=engine)
    with torch.no_grad():
        model.blocks[0].attn.q.weight[:8] = torch.nan
    with pytest.raises(ModelError) as raised:
        ma.run(model, "Tom has 3 apples.", analyses=analysis, engine=engine)
    assert "surprise" not in str(raised.value)
    assert "layer 0" in str(raised.value)


def test_an_analysis_that_cannot_be_measured_on_a_blind_head_says_what_to_do(toy, prompts):
    """It takes the values' width for granted, which is 1 there."""

    def wide(no_null):
        made = own_key(
            {"own": Quantity(("head",), "probability", "own", no_null=no_null)},
            lambda own: {"own": own},
        )

        def add(sums, rows):
            rows.v[..., toy.cfg.d_head - 1]
            sums["own"] += rows.pattern.amax((-1, -2))

        made.add = add
        return made

    with pytest.raises(
        MechattnError,
        match=r"own_key cannot be measured on the rows of a content-blind head.*no_null=",
    ):
        ma.run(toy, prompts[:2], analyses=wide(""))
    result = ma.run(
        toy, prompts[:3], {"a": ma.MeaninglessTokens("/", 5)}, wide("it needs the values")
    )
    assert "own_uniform" not in result["own_key"]
    assert result.compare("a", quantity="own").attrs["null"].startswith("no null is known")
