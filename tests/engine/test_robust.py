"""What happens when the memory is full, or a model gives NaN."""

import math

import numpy as np
import pytest
import torch

import mechattn as ma
from mechattn.engine.batches import is_out_of_memory
from mechattn.engine.pending_sums import PendingSums
from mechattn.engine.placed_batch import PlacedBatch
from mechattn.errors import ModelError

CONDITIONS = {"slash": ma.MeaninglessTokens(count=5)}
ANALYSES = [ma.ReceivedAttention(), ma.analyses.MlpActivations()]


def full(rows, error, layer, monkeypatch):
    """Memory that holds no batch of more than some rows; it is full in the middle of a pass, after some layers."""
    begin = PlacedBatch.of
    complete = PendingSums.complete
    batches = []

    def begun(model, batch, *arguments):
        batches.append(batch.rows)
        return begin(model, batch, *arguments)

    def fails(self, number, layer_now, part):
        if len(self.batch.input_batch.rows) > rows and layer_now == layer:
            raise error
        complete(self, number, layer_now, part)

    monkeypatch.setattr(PlacedBatch, "of", begun)
    monkeypatch.setattr(PendingSums, "complete", fails)
    return batches


@pytest.fixture(scope="module")
def some(prompts):
    return prompts[:4]


@pytest.fixture(scope="module")
def whole(toy, some):
    return ma.run(toy, some, CONDITIONS, ANALYSES)


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError(
        "[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 68719476736 bytes."
    ),
    MemoryError(),
]


def test_a_batch_too_large_is_halved_with_a_notice(toy, some, whole, monkeypatch):
    batches = full(2, ERRORS[1], 2, monkeypatch)
    halved = ma.run(toy, some, CONDITIONS, ANALYSES)
    assert whole.provenance["halved"] == []
    too_large = [rows for rows in batches if len(rows) > 2]
    expected = [{"prompts": len(rows) // 2, "first": some[rows[0][0]].id} for rows in too_large]
    assert halved.provenance["halved"] == expected
    assert len({part["first"] for part in expected}) > 1, "a second half was halved too"
    for name, dataset in whole.datasets.items():
        for variable in dataset:
            if dataset[variable].dtype.kind in "fi":
                ours = halved[name][variable].values
                theirs = dataset[variable].values
                np.testing.assert_allclose(
                    ours, theirs, atol=2e-5, rtol=1e-4, equal_nan=True, err_msg=variable
                )
    n = halved["received_attention"].received_n.sel(condition="baseline", layer=0, key=1)
    assert (n == len(some)).all(), "no prompt is counted twice"


def test_a_single_prompt_too_large_is_refused(toy, prompts, monkeypatch):
    full(0, MemoryError("16 GiB"), 0, monkeypatch)
    with pytest.raises(
        ModelError,
        match=r"alone with all its conditions does not fit in memory \(MemoryError: 16 GiB\)",
    ):
        ma.run(toy, prompts[:2], CONDITIONS)


def test_another_error_is_not_taken_for_a_full_memory(toy, prompts, monkeypatch):
    full(0, RuntimeError("shapes cannot be multiplied"), 0, monkeypatch)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ma.run(toy, prompts[:2], CONDITIONS)
    assert not is_out_of_memory(ValueError("out of memory"))
    assert all(map(is_out_of_memory, ERRORS))


@pytest.mark.parametrize("engine", ["streaming", "hooks"])
def test_nan_names_the_layer_and_the_prompt(engine, monkeypatch):
    # Of weights that were so when the model was verified, which no probe has read.
    monkeypatch.setattr("mechattn.model.load.refuse_changes", lambda *arguments: None)
    model = ma.load_model("toy:llama")
    prompts = [ma.Prompt("Tom has 3 apples.", id="a"), ma.Prompt("Tom has 3 books now.", id="b")]
    books, apples = (set(model.tokenizer(word)["input_ids"]) for word in (" books", " apples"))
    token = max(books - apples)
    options = {"conditions": CONDITIONS, "layers": [1, 2], "engine": engine}
    ma.run(model, prompts, **options)  # probes the model, too
    with torch.no_grad():
        model.embed.weight[token] = math.nan
    assert ma.run(model, prompts[:1], **options).provenance["prompts"]["count"] == 1
    with pytest.raises(ModelError, match=r'prompt b with the condition "baseline"') as raised:
        ma.run(model, prompts, **options)
    assert "layer 1" in str(raised.value)
