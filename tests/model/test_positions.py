"""Where frequencies change, as transformers itself shows it; and which models take position ids before 0."""

from types import SimpleNamespace

import pytest
import torch

from mechattn.errors import ModelError
from mechattn.model.positions import (
    Boundary,
    boundary_of,
    takes_negative_ids,
    takes_position_ids,
)
from tests.model.unusual import BOUNDARY, DYNAMIC, LONGROPE, TABLES, unusual_model
from tests.tiny_families import FAMILIES, bridge_of, tiny_model

TABLE_FAMILIES = {"GPT-2", "GPT-Neo", "GPT-J", "OPT"}  # learned positions, and GPT-J's sines
# Each way to rotate, which bfloat16 rounds in its own way, and a table.
ROUNDED = ("GPT-NeoX", "DeepSeek-V3 (latent attention)", "GPT-2")


def cosines(model, longest):
    """What the model's rotary module gives position 3 in a batch whose longest row has so many positions."""
    rotary = next(module for name, module in model.named_modules() if name.endswith("rotary_emb"))
    ids = torch.tensor([[3, longest - 1]])
    return rotary(torch.zeros(1, 2, 64), ids)[0][0, 0]


@pytest.mark.parametrize("name", [*LONGROPE, *DYNAMIC])
def test_the_boundary_is_where_transformers_takes_other_frequencies(name):
    model = unusual_model(name)
    boundary = boundary_of(model)
    assert boundary == Boundary(BOUNDARY, "dynamic" if name in DYNAMIC else "longrope")
    short = cosines(model, 8)
    assert torch.equal(cosines(model, boundary.at), short)
    beyond = cosines(model, boundary.at + 1)
    assert not torch.equal(beyond, short)
    assert torch.equal(cosines(model, boundary.at + 100), beyond) == (boundary.kind == "longrope")
    assert [boundary.side(n) for n in (1, BOUNDARY, BOUNDARY + 1)] == ["short", "short", "long"]


@pytest.mark.parametrize("kind", ["llama3", "linear", "yarn"])
def test_other_scalings_are_the_same_in_every_batch(kind):
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    scaling = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4, **more}
    if kind != "linear":
        scaling["original_max_position_embeddings"] = 32
    model = tiny_model("Llama", rope_parameters=scaling)
    assert boundary_of(model) is None
    assert torch.equal(cosines(model, 8), cosines(model, 200))


def configured(**config):
    return SimpleNamespace(
        config=SimpleNamespace(max_position_embeddings=256, text_config=None, **config)
    )


def test_old_spellings_and_layers_that_differ():
    """A checkpoint with code of its own has a configuration that transformers has not put in order."""
    su = {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}
    assert boundary_of(
        configured(rope_scaling=su, original_max_position_embeddings=64)
    ) == Boundary(64, "longrope")
    layers = {
        "full_attention": {**su, "original_max_position_embeddings": 64},
        "sliding_attention": {"type": "default"},
    }
    assert boundary_of(configured(rope_parameters=layers)) == Boundary(64, "longrope")
    layers["sliding_attention"] = {**su, "original_max_position_embeddings": 128}
    with pytest.raises(ModelError, match=r"at different lengths \(64, 128\)"):
        boundary_of(configured(rope_parameters=layers))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in TABLES),
        *((family, torch.bfloat16) for family in ROUNDED),
    ],
)
def test_only_tables_of_positions_take_no_negative_ids(family, dtype, tokenizer):
    """Beside the families of the table in float32, which test_families.py tries."""
    native_model = (tiny_model if family in FAMILIES else unusual_model)(family, len(tokenizer))
    model = bridge_of(native_model, dtype=dtype, verify=False)
    assert takes_position_ids(model)
    assert takes_negative_ids(model) == (family not in {*TABLE_FAMILIES, *TABLES})
