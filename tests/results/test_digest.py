"""The digest of a result's numbers: equal for equal numbers, and for nothing else."""

import json
from dataclasses import replace

import numpy as np
import pytest

import mechattn as ma
from mechattn.results.result import Result
from mechattn.store.objects import digest_of

QUANTITY = "received_by_segment"


def run(toy, prompts):
    conditions = {"“é”": ma.conditions.RandomTokens(count=5)}
    return ma.run(toy, prompts[:3], conditions, layers=[0, 1])


@pytest.fixture(scope="module")
def result(toy, prompts):
    return run(toy, prompts)


def changed(result, change):
    """The result with another dataset of received attention."""
    datasets = {name: dataset.copy(deep=True) for name, dataset in result.datasets.items()}
    datasets["received_attention"] = change(datasets["received_attention"])
    return Result(datasets, result.provenance)


def with_value(result, value):
    def change(dataset):
        dataset[QUANTITY].values[0, 1, 0, 2, 1] = value
        return dataset

    return changed(result, change)


def test_two_equal_runs_have_the_same_one(toy, prompts, result):
    assert run(toy, prompts).digest() == result.digest()
    assert len(result.digest()) == 32
    later = {**result.provenance, "time": "2001-01-01T00:00:00+00:00"}
    assert replace(result, provenance=later).digest() == result.digest()
    stored = {digest_of(json.dumps(about), {}) for about in (result.provenance, later)}
    assert len(stored) == 2, "negative control: the digest of a stored result covers the clock"


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.assign({QUANTITY: d[QUANTITY] * (1 + 1e-6)}),
        lambda d: d.rename({QUANTITY: "received_by_part"}),
        lambda d: d.transpose(*list(d.dims)[::-1]),
        lambda d: d.assign({QUANTITY: d[QUANTITY].astype("float64")}),
        lambda d: d.assign_attrs(more="words"),
        lambda d: d.assign({QUANTITY: d[QUANTITY].assign_attrs(units="nats")}),
        lambda d: d.assign_coords(condition=["baseline", "e"]),
        lambda d: d.drop_vars(QUANTITY),
    ],
    ids=["numbers", "name", "dimensions", "kind", "attribute", "unit", "text", "one fewer"],
)
def test_anything_else_is_another(result, change):
    other = changed(result, change)
    assert other.digest() != result.digest()
    assert changed(result, lambda d: d).digest() == result.digest(), "a copy is not"


def nan(dtype, bits):
    return np.array([bits], dtype=f"u{np.dtype(dtype).itemsize}").view(dtype)[0]


@pytest.mark.parametrize(
    "pair",
    [
        (nan("f4", 0x7FC00000), nan("f4", 0xFFC00000)),
        (nan("f4", 0x7FC00000), nan("f4", 0x7F800001)),
        (np.float32(0.0), np.float32(-0.0)),
    ],
    ids=["sign of NaN", "signalling", "sign of 0"],
)
def test_what_a_cpu_may_write_otherwise_is_the_same(result, pair):
    one, other = (with_value(result, value) for value in pair)
    contents = [of["received_attention"][QUANTITY].values.tobytes() for of in (one, other)]
    assert contents[0] != contents[1], "negative control: the bytes differ"
    assert one.digest() == other.digest() != result.digest()


def test_the_order_of_bytes_in_memory_is_not_in_it(result):
    other = changed(result, lambda d: d.assign({QUANTITY: d[QUANTITY].astype(">f4")}))
    assert other["received_attention"][QUANTITY].dtype.byteorder == ">"
    assert other.digest() == result.digest()
