"""The check that a row's numbers are its own: it passes where they are, reaches far, and can fail."""

import pytest

import mechattn as ma
from mechattn.model.hooked import facts_of
from mechattn.model.verify import checks
from tests.model.unusual import DYNAMIC, factors, unusual_model
from tests.tiny_families import bridge_of, tiny_model


@pytest.mark.parametrize("name", ["Llama LongRoPE", *DYNAMIC])
def test_a_boundary_that_is_known_is_not_crossed_and_said(name):
    model = bridge_of(unusual_model(name))
    check = facts_of(model).report["neighbours"]
    assert check.outcome == "passed"
    assert "32 positions" in check.detail
    assert "no batch holds both" in check.detail


def test_an_unknown_boundary_is_found_at_any_distance(monkeypatch):
    at = 200_000
    monkeypatch.setattr(checks, "boundary_of", lambda model: None)
    scaling = {"rope_type": "longrope", **factors(8), "original_max_position_embeddings": at}
    native_model = unusual_model("Llama LongRoPE", max_position_embeddings=8 * at,
        rope_parameters={**scaling, "rope_theta": 1e4, "factor": 8.0},
    )  # fmt: skip
    model = bridge_of(native_model, verify=False)
    check = ma.verify_model(model)["neighbours"]
    assert check.outcome == "failed"
    assert f"to {8 * at - 1:,}" in check.detail
    with pytest.raises(ma.errors.ModelError, match=r"neighbours failed.*on the batch"):
        facts_of(model).report.require()


def test_what_rows_share_is_found():
    """A layer that adds the mean over the batch to each row."""
    native_model = tiny_model("Llama")
    norm = native_model.model.layers[1].input_layernorm
    norm.register_forward_hook(lambda module, given, out: out + out.mean(0, keepdim=True))
    model = bridge_of(native_model, verify=False)
    assert ma.verify_model(model)["neighbours"].outcome == "failed"
