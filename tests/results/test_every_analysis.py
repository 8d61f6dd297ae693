"""Whatever an analysis measures can be stored: saved, loaded, equal, under conditions of every kind."""

import numpy as np
import pytest

import mechattn as ma
from mechattn.analysis import ANALYSES
from mechattn.results.arrays import digest

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


def assert_same(loaded, result):
    assert digest(loaded.datasets) == digest(result.datasets)
    assert loaded.datasets.keys() == result.datasets.keys()
    for name, dataset in result.datasets.items():
        for label, expected in dataset.variables.items():
            got = loaded[name].variables[label]
            assert got.dims == expected.dims
            np.testing.assert_array_equal(
                got.values.astype(expected.dtype), expected.values
            )  # NaN equals NaN


def test_saved_loaded_equal(result, tmp_path):
    result.save(tmp_path / "r.zarr")
    assert_same(ma.load_result(tmp_path / "r.zarr"), result)
