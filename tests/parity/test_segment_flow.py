"""`SegmentFlow` on every toy against loops over queries and keys of plain transformers in float64."""

import numpy as np
import pytest

import mechattn as ma
from mechattn.axes import SEGMENTS
from tests.parity.plain import MECHANISMS, models, passed


def oracle(pattern, values, segments, source, target):
    """Flow and value flow between two segments of one head, one query at a time."""
    flows = []
    by_value = []
    for query in [q for q, s in enumerate(segments) if s == source]:
        weights = [pattern[query, k] * np.linalg.norm(values[k]) for k in range(len(segments))]
        there = [k for k, s in enumerate(segments) if s == target]
        flows.append(sum(pattern[query, k] for k in there))
        by_value.append(sum(weights[k] for k in there) / sum(weights))
    return np.mean(flows), np.mean(by_value)


@pytest.mark.parametrize("name", MECHANISMS)
def test_flow_equals_the_oracle(name, prompts, monkeypatch):
    plain, hooked = models(name)
    slash = ma.MeaninglessTokens("/", 20)
    some = prompts[:3]
    index = min(range(3), key=lambda i: len(slash.apply(some[i], hooked)))
    results = [
        ma.run(hooked, some, {"slash": slash}, ma.analyses.SegmentFlow(), engine=engine)
        for engine in ("streaming", "hooks")
    ]
    sequence = slash.apply(some[index], hooked)
    segments = [SEGMENTS[code] for code in sequence.segment.tolist()]
    run = passed(plain, sequence.tokens.tolist(), monkeypatch)
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
                at = dict(prompt=index, condition=1, layer=layer, head=1)
                cell = result["segment_flow"].isel(at).sel(segment=source, to_segment=target)
                assert float(cell.flow) == pytest.approx(flow, abs=5e-6)
                assert float(cell.value_flow) == pytest.approx(by_value, abs=5e-6)
    whole = results[0]["segment_flow"].flow.sum("to_segment").sel(segment="question")
    np.testing.assert_allclose(whole, 1, atol=1e-5)
    uniform = results[0]["segment_flow"].flow_uniform.sel(
        condition="slash", segment="question", layer=0
    )
    if name != "toy:gemma3":
        at = [q for q, s in enumerate(segments) if s == "question"]
        expected = np.mean([segments[: q + 1].count("inserted") / (q + 1) for q in at])
        assert float(uniform.isel(prompt=index).sel(to_segment="inserted")) == pytest.approx(
            expected, abs=1e-6
        )
