"""Whatever an analysis measures can be stored: saved, loaded, equal, under conditions of every kind."""

import pytest
import xarray as xr

import mechattn as ma
from mechattn.analysis import ANALYSES

SLASH = ma.MeaninglessTokens(count=3)
KINDS = {
    "arm": ma.Baseline(intervention=ma.interventions.ARM(c=0.3)),
    "masked": SLASH.masked(),
    **ma.sweep(SLASH, count=[0, 4]),
}


ON_ALIBI = [ma.analyses.ScoreDecomposition]  # of scores with a position in them
CASES = {
    "toy:llama": (KINDS, [kind for kind in ANALYSES if kind not in ON_ALIBI]),
    "toy:falcon": (KINDS, ON_ALIBI),
    # Without an inserted token whole arrays are NaN.
    "the baseline alone": ({}, [ma.analyses.AffineShift]),
}


@pytest.mark.parametrize("case", CASES)
def test_saved_loaded_equal_and_with_units(case, shared, prompts, tmp_path):
    model = shared("toy:falcon" if case == "toy:falcon" else "toy:llama")
    conditions, kinds = CASES[case]
    short = sorted(prompts, key=lambda prompt: len(prompt.question))[:2]
    analyses = [kind() for kind in kinds]
    result = ma.run(model, short, conditions, analyses, layers=[0, 1])
    assert result.datasets.keys() == {analysis.name for analysis in analyses} | {"sequences"}
    result.save(tmp_path / "r.zarr")
    loaded = ma.load_result(tmp_path / "r.zarr")
    assert loaded.digest() == result.digest()
    assert loaded.datasets.keys() == result.datasets.keys()
    all_nan = []
    for name, dataset in result.datasets.items():
        assert [label for label in dataset if not dataset[label].attrs.get("units")] == []
        xr.testing.assert_identical(loaded[name], dataset)  # NaN equals NaN
        all_nan += [label for label in dataset if dataset[label].isnull().all()]
    assert bool(all_nan) == (case == "the baseline alone")
