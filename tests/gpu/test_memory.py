"""A card whose memory is full, and a pass that does not wait for the card inside a layer."""

import warnings

import pytest
import torch
import xarray as xr

import mechattn as ma
from mechattn.analysis import ANALYSES
from tests.engine.test_waiting import LEFT_OUT

# torch waits for a card to say whether eigenvalues were found.
IN_A_LAYER = {ma.analyses.AttentionSinks: 1, ma.analyses.AffineShift: 1}
PROMPT = " ".join(["Tom has 3 apples and gives 2 to Mia."] * 24)
SEVERAL = [f"{n} {PROMPT}" for n in range(16)]


def reserved(model, prompts):
    """The most memory that the allocator takes from the card in a run, in bytes."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    ma.run(model, prompts, memory="64GiB")
    return torch.cuda.max_memory_reserved()


@pytest.mark.parametrize("engine", ["streaming", "fused", "hooks"])
def test_a_batch_that_does_not_fit_the_card_is_halved(engine, cuda):
    model = ma.load_model("toy:llama", device="cuda")
    whole = ma.run(model, SEVERAL, memory="64GiB", engine=engine)
    assert whole.provenance["halved"] == []
    limit = (reserved(model, SEVERAL) + reserved(model, SEVERAL[:8])) / 2
    torch.cuda.empty_cache()
    try:
        torch.cuda.set_per_process_memory_fraction(
            limit / torch.cuda.get_device_properties(0).total_memory
        )
        halved = ma.run(model, SEVERAL, memory="64GiB", engine=engine)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    first = whole["sequences"].prompt.values[0]
    assert halved.provenance["halved"][0] == {"prompts": 16, "first": first}
    ours, theirs = (each["received_attention"] for each in (halved, whole))
    xr.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=1e-4)


def waits(model, analyses, layers):
    """How often a run waits for the card, as torch counts it."""
    prompts = ma.load_prompts("word-problems", limit=2)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            ma.run(
                model, prompts, {"slash": ma.MeaninglessTokens("/", 20)}, analyses, layers=layers
            )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(one.message) for one in said)


@pytest.fixture(scope="module")
def on_card():
    return ma.load_model("toy:llama", device="cuda") if torch.cuda.is_available() else None


@pytest.mark.parametrize("make", [make for make in ANALYSES if make not in LEFT_OUT])
def test_waiting_for_the_card_does_not_grow_with_layers(make, on_card, cuda):
    for layers in ([3], [0, 1, 2, 3]):
        waits(on_card, [make()], layers)  # what is asked once of these layers of a model
    more = waits(on_card, [make()], [0, 1, 2, 3]) - waits(on_card, [make()], [3])
    assert more <= 3 * IN_A_LAYER.get(make, 0)


def test_the_count_would_notice_a_layer_that_waits(on_card, cuda, monkeypatch):
    values = ma.ReceivedAttention.values

    def waiting(self, sums, batch, window):
        assert batch.real.any()
        return values(self, sums, batch, window)

    monkeypatch.setattr(ma.ReceivedAttention, "values", waiting)
    waits(on_card, [ma.ReceivedAttention()], [3])
    one, four = (waits(on_card, [ma.ReceivedAttention()], layers) for layers in ([3], [0, 1, 2, 3]))
    assert four >= one + 3
