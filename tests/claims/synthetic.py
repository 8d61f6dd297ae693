"""Evidence that is made up: nothing happens in it but what a test puts there."""

import numpy as np
import xarray as xr

from mechattn.axes import SEGMENTS
from mechattn.claims.measures import Evidence
from mechattn.evaluation.evaluation import Evaluation, GradedAnswer
from mechattn.results.result import Result

LAYERS, HEADS, SYSTEM, QUESTION, INSERTED = 6, 4, 4, 20, 10
CONDITIONS = ["baseline", "slash", "sentence"]
MLP = [*CONDITIONS, "arm", "direction"]


def attention(n):
    """A result in which no condition changes anything: everything is uniform, and the same in all prompts."""
    shape = (n, len(CONDITIONS), LAYERS, HEADS)
    by_segment = [*shape, len(SEGMENTS)]
    length = SYSTEM + INSERTED + QUESTION
    dims = ("prompt", "condition", "layer", "head", "segment")
    per_key = ("prompt", "condition", "layer", "head", "key")
    by_origin = ("prompt", "condition", "layer", "head", "original_key")
    originals = SYSTEM + QUESTION

    def uniform(dims):
        return tuple(dim for dim in dims if dim != "head")

    received = xr.Dataset(
        {
            "received_by_segment": (dims, np.full(by_segment, 0.01)),
            "received_by_segment_uniform": (uniform(dims), np.full([*shape[:3], len(SEGMENTS)], 0.01)),
            "received_per_prompt": (per_key, np.full([*shape, length], 0.01)),
            "received_by_origin_per_prompt": (by_origin, np.full([*shape, originals], 0.01)),
            "received_uniform_by_origin_per_prompt": (uniform(by_origin), np.full([*shape[:3], originals], 0.01)),
        }
    )
    affine = {"relative_error": 0.3, "total_variation": 0.1, "scale": 0.5}
    focus = {"self_share": 0.2, "self_mass": 0.2, "first_share": 0.2, "first_mass": 0.2}
    updates = {"magnitude": 0.1, "orientation": 0.02}
    made = [
        xr.Dataset({k: (dims, np.full(by_segment, v)) for k, v in some.items()}) for some in (affine, focus, updates)
    ]
    coords = {"condition": CONDITIONS, "segment": list(SEGMENTS), "layer": range(LAYERS), "head": range(HEADS)}
    datasets = dict(zip(("affine_shift", "attention_focus", "head_updates"), made), received_attention=received)
    datasets = {
        name: data.assign_coords({k: v for k, v in coords.items() if k in data.dims}) for name, data in datasets.items()
    }
    return Result({**datasets, "sequences": _sequences(n)}, {})


def _sequences(n):
    length = SYSTEM + INSERTED + QUESTION
    origin = np.full((n, len(CONDITIONS), length), -2)
    segment = np.full_like(origin, -2)
    system, inserted, question = (SEGMENTS.index(name) for name in ("system", "inserted", "question"))
    origin[:, 0, : SYSTEM + QUESTION] = np.arange(SYSTEM + QUESTION)
    segment[:, 0, : SYSTEM + QUESTION] = [system] * SYSTEM + [question] * QUESTION
    later = np.arange(QUESTION) + SYSTEM
    origin[:, 1:] = [*range(SYSTEM), *[-1] * INSERTED, *later]
    segment[:, 1:] = [system] * SYSTEM + [inserted] * INSERTED + [question] * QUESTION
    dims = ("prompt", "condition", "pos")
    return xr.Dataset({"origin": (dims, origin), "segment_index": (dims, segment)}, {"condition": CONDITIONS})


def activations(n):
    """Changes without anything in common, that leave the share near zero as it is."""
    product = np.tile(np.diag([0.0, 1, 1, 1, 1]), (n, 1, 1, 1))  # [prompt, layer, condition, other]
    share = np.full((n, len(MLP), 1, len(SEGMENTS)), 0.25)
    data = xr.Dataset(
        {
            "near_zero_by_segment": (("prompt", "condition", "layer", "segment"), share),
            "change_product": (("prompt", "layer", "condition", "other_condition"), product),
        },
        {"condition": MLP, "other_condition": MLP, "segment": list(SEGMENTS), "layer": [0]},
    )
    sequences = xr.Dataset({"origin": (("prompt",), np.zeros(n))})
    return Result({"mlp_activations": data, "sequences": sequences}, {})


def answers(right, samples=1):
    """From the right ones of each condition [problem, sample]."""
    made = [
        GradedAnswer(str(i), name, j, "", (1,), "1", "1", bool(one), True, 0.0)
        for name, each in right.items()
        for i, row in enumerate(np.asarray(each).reshape(-1, samples))
        for j, one in enumerate(row)
    ]
    return Evaluation(tuple(made), {"conditions": dict.fromkeys(right, "")})


def evidence(n, **given):
    """One in which nothing happens, beside three draws in which nothing happens either."""
    made = {
        "attention": attention(n),
        "activations": activations(n),
        "random_attention": tuple(attention(n) for _ in range(3)),
        "random_activations": tuple(activations(n) for _ in range(3)),
    }
    return Evidence(**(made | given))
