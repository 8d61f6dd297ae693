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


BY_SEGMENT = Quantity(("head", "segment"), "probability", "own")
NAMES = iter(["own", "own", "other"])  # in layer 0, in its null, and in layer 1


@pytest.mark.parametrize(
    ("quantity", "values", "message"),
    [
        (
            OWN,
            lambda own: {next(NAMES): own},
            r"values\(\) gives \['other'\]; its quantities are \['own'\]",
        ),
        (OWN, lambda own: own, r"values\(\) gives a Tensor; give a mapping"),
        (OWN, lambda own: {"own": own.sum(-1)}, r"of shape \[4\]; .* \[batch, head\] = \[4, 8\]"),
        (
            BY_SEGMENT,
            lambda own: {"own": own[..., None].expand(-1, -1, 5)},
            r"of shape \[4, 8, 5\]; .* \[batch, head, segment\] = \[4, 8, 7\]",
        ),
    ],
)
def test_values_that_are_not_those_that_were_promised(toy, prompts, quantity, values, message):
    conditions = {"slash": ma.MeaninglessTokens("/", 20)}
    with pytest.raises(OptionError, match=f"own_key: .*{message}"):
        ma.run(toy, prompts[:2], conditions, own_key({"own": quantity}, values))


def test_values_that_were_promised(toy, prompts):  # negative control
    kept = own_key({"own": OWN}, lambda own: {"own": own.bfloat16()})
    assert ma.run(toy, prompts[:2], {}, kept)["own_key"].own.notnull().all()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(8, 8), r"the sum 'own' has the shape \[8, 8\]; its first axis"),
        (0.0, "the sum 'own' is a float; give a tensor whose first axis"),
        (torch.zeros(1, 0), r"'own' is a Tensor of shape \[1, 0\]"),
    ],
)
def test_a_sum_that_is_not_batch_first(toy, value, message):
    own = own_key({"own": OWN}, lambda own: {"own": own})
    own.start = lambda batch, heads: {"own": value}
    own.add = lambda sums, rows: None
    with pytest.raises(OptionError, match=message):
        ma.run(toy, "Tom has 3 apples.", analyses=own)


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ("values", r"which is not an analysis \(it lacks values\)"),
        ("add", r"the analysis own_key receives no data: define add\(sums, rows\)"),
    ],
)
def test_an_analysis_that_lacks_a_part(no_forward, lacking, message):
    own = own_key({"own": OWN}, lambda own: {"own": own})
    delattr(type(own), lacking)
    with pytest.raises(OptionError, match=message):
        ma.run(no_forward, "Why is the old river quiet?", analyses=own)


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


@pytest.mark.parametrize("analysis", [Surprise(), Failing()], ids=["given", "raised"])
def test_nan_of_ones_own_analysis_says_what_it_may_be(toy, analysis):
    message = r"layer 0 .* gives NaN or infinity for prompt 0 .* without surprise, .* divides by 0"
    with pytest.raises(ModelError, match=message):
        ma.run(toy, "Tom has 3 apples.", analyses=[ma.ReceivedAttention(), analysis])


def test_an_analysis_of_a_blind_head_gives_advice(toy, prompts):
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
