"""Whatever an analysis measures can be stored: saved, loaded, equal, under conditions of every kind."""

import numpy as np
import pytest

import mechattn as ma
from mechattn.analysis import ANALYSES

SLASH = ma.MeaninglessTokens(count=3)
KINDS = {
    "slash": SLASH,
    "arm": ma.Baseline(intervention=ma.interventions.ARM(c=0.3)),
    "ablation": ma.Baseline(intervention=ma.interventions.HeadAblation(((0, 1),))),
    "masked": SLASH.masked(),
    **ma.sweep(SLASH, count=[0, 1, 4]),
}
# Without an inserted token, as in the first, whole arrays are NaN.
CONDITIONS = {"the baseline alone": {}, "every kind": KINDS}


ALIBI = [
    kind for kind in ANALYSES if kind is ma.analyses.ScoreDecomposition
]  # of scores with a position in them
MODELS = {"toy:llama": [kind for kind in ANALYSES if kind not in ALIBI], "toy:falcon": ALIBI}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return request.param, ma.load_model(request.param, verify=False)


@pytest.fixture(scope="module", params=CONDITIONS)
def result(request, model, prompts):
    name, loaded = model
    short = sorted(prompts, key=lambda prompt: len(prompt.question))[:2]
    analyses = [kind() for kind in MODELS[name]]
    made = ma.run(loaded, short, CONDITIONS[request.param], analyses, layers=[0, 1])
    assert made.datasets.keys() == {analysis.name for analysis in analyses} | {"sequences"}
    return made


def test_saved_loaded_equal_and_with_units(result, tmp_path):
    result.save(tmp_path / "r.zarr")
    loaded = ma.load_result(tmp_path / "r.zarr")
    assert loaded.digest() == result.digest()
    assert loaded.datasets.keys() == result.datasets.keys()
    for name, dataset in result.datasets.items():
        assert [label for label in dataset if not dataset[label].attrs.get("units")] == []
        for label, expected in dataset.variables.items():
            stored = loaded[name].variables[label]
            assert stored.dims == expected.dims
            values = stored.values.astype(expected.dtype)
            np.testing.assert_array_equal(values, expected.values)  # NaN equals NaN
