"""`SegmentFlow` against loops over queries and keys of plain transformers in float64."""

from itertools import product

import numpy as np
import pytest

import mechattn as ma
from mechattn.axes import SEGMENTS
from tests.analysis.plain import SHORT, models, passed


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
    result = ma.run(hooked, some, {"slash": slash}, ma.analyses.SegmentFlow())["segment_flow"]
    flow = result.sel(condition="slash").isel(prompt=0)
    sequence = slash.apply(SHORT, hooked)
    segments = np.array(SEGMENTS)[sequence.segment.numpy()]
    run = passed(plain, sequence.tokens.tolist())
    pairs = [("question", "inserted"), ("question", "question"), ("inserted", "system")]
    for layer, (source, target) in product(range(hooked.cfg.n_layers), pairs):
        expected = oracle(run.pattern[layer][1], run.v[layer][1], segments, source, target)
        cell = flow.sel(layer=layer, head=1, segment=source, to_segment=target)
        assert (float(cell.flow), float(cell.value_flow)) == pytest.approx(expected, abs=5e-6)
    of_question = flow.sel(segment="question")
    np.testing.assert_allclose(of_question.flow.sum("to_segment"), 1, atol=1e-5)
    visible = np.arange(1, len(segments) + 1)
    shares = (segments == "inserted").cumsum() / visible
    expected = shares[segments == "question"].mean()
    got = float(of_question.flow_uniform.sel(layer=0, to_segment="inserted"))
    assert got == pytest.approx(expected, abs=1e-6)
