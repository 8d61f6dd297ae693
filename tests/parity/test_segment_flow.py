"""`SegmentFlow` against loops over queries and keys of plain transformers in float64."""

import numpy as np
import pytest

import mechattn as ma
from mechattn.axes import SEGMENTS
from tests.parity.plain import SHORT, models, passed


def oracle(pattern, values, segments, source, target):
    """Flow and value flow between two segments of one head: means over queries."""
    weights = pattern * np.linalg.norm(values, axis=-1)
    shares = weights / weights.sum(-1, keepdims=True)
    block = np.ix_(segments == source, segments == target)
    return pattern[block].sum(-1).mean(), shares[block].sum(-1).mean()


def test_flow_equals_the_oracle(prompts):
    plain, hooked = models("toy:falcon")
    slash = ma.MeaninglessTokens("/", 20)
    some = [SHORT, prompts[0]]
    results = [
        ma.run(hooked, some, {"slash": slash}, ma.analyses.SegmentFlow(), engine=engine)
        for engine in ("streaming", "hooks")
    ]
    sequence = slash.apply(SHORT, hooked)
    segments = np.array(SEGMENTS)[sequence.segment.numpy()]
    run = passed(plain, sequence.tokens.tolist())
    for layer in range(hooked.cfg.n_layers):
        for source, target in (
            ("question", "inserted"),
            ("question", "question"),
            ("inserted", "system"),
        ):
            flow, by_value = oracle(
                run.pattern[layer][1], run.v[layer][1], segments, source, target
            )
            for result in results:
                at = dict(prompt=0, condition=1, layer=layer, head=1)
                cell = result["segment_flow"].isel(at).sel(segment=source, to_segment=target)
                assert float(cell.flow) == pytest.approx(flow, abs=5e-6)
                assert float(cell.value_flow) == pytest.approx(by_value, abs=5e-6)
    whole = results[0]["segment_flow"].flow.sum("to_segment").sel(segment="question")
    np.testing.assert_allclose(whole, 1, atol=1e-5)
    uniform = results[0]["segment_flow"].flow_uniform.sel(
        condition="slash", segment="question", layer=0
    )
    visible = np.arange(1, len(segments) + 1)
    shares = (segments == "inserted").cumsum() / visible
    expected = shares[segments == "question"].mean()
    got = float(uniform.isel(prompt=0).sel(to_segment="inserted"))
    assert got == pytest.approx(expected, abs=1e-6)
