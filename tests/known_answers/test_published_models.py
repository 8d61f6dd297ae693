"""Two models that others trained give the activations and the text that were published with them."""

import base64
import json
from itertools import product

import numpy as np
import pytest
import torch

import mechattn as ma

STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball. She wanted to play with it, but it was too high.\n"
    "Lily's mom said, \"Lily, let's go to the park.\" Lily was sad and didn't know what to do."
)  # llama2.c, doc/stories260K.md (A. Karpathy)
LETTERS = 6
STORED_NAMES = {  # ours, and those of the file that llm-viz (B. Bycroft) publishes
    "q": "q",
    "k": "k",
    "v": "v",
    "attn_scores": "att",
    "pattern": "attSm",
    "z": "y",
    "logits": "lm_head",
}


@pytest.fixture(scope="module")
def stored_activations(models):
    path = models / "llm-viz-sort" / "gpt-nano-sort-t0-partials.json"
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def sorting_model(models):
    return ma.load_model(str(models / "llm-viz-sort"))


def decoded_array(stored):
    numbers = np.frombuffer(base64.b64decode(stored["data"]), "<f4")
    return numbers.reshape(stored["shape"]).astype(np.float64)


def activation_distances(model, stored):
    """The largest difference of each activation of layer 0; relative where values are above 1."""
    tokens = torch.tensor(decoded_array(stored["idx"]).astype(int))
    with torch.no_grad():
        logits, cache = model.run_with_cache(tokens)

    ours = {"logits": logits.double().numpy()}
    for name in ("q", "k", "v", "attn_scores", "pattern", "z"):
        ours[name] = cache[f"blocks.0.attn.hook_{name}"].double().numpy()

    for name in ("q", "k", "v"):
        ours[name] = ours[name].swapaxes(1, 2)

    ours["z"] = ours["z"].reshape(*ours["z"].shape[:2], -1)

    distances = {}
    for name, stored_name in STORED_NAMES.items():
        expected = decoded_array(stored[stored_name])
        finite = np.isfinite(expected)  # scores of later tokens are −∞ there
        scale = max(1.0, float(abs(expected[finite]).max()))
        distances[name] = float(abs(ours[name][finite] - expected[finite]).max()) / scale

    return distances


def is_greedy(model, text):
    """Whether each token of a text is the likeliest after BOS and the tokens before it."""
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([[model.tokenizer.bos_token_id, *ids]]))[0, :-1]
    return logits.argmax(-1).tolist() == ids


def test_each_sequence_of_six_letters_is_sorted(sorting_model):
    letters = torch.tensor(list(product(range(3), repeat=LETTERS)))
    tokens = letters
    with torch.no_grad():
        for _ in range(LETTERS):
            tokens = torch.cat([tokens, sorting_model(tokens)[:, -1:].argmax(-1)], 1)
    assert len(letters) == 729
    assert (tokens[:, LETTERS:] == letters.sort(-1).values).all()


def test_activations_equal_another_implementation(sorting_model, stored_activations):
    distances = activation_distances(sorting_model, stored_activations)
    assert max(distances.values()) <= 1e-6, distances


def test_weights_off_by_1e_5_are_noticed(sorting_model, stored_activations):  # negative control
    weight = sorting_model.blocks[0].attn.q.weight
    before = weight.clone()
    with torch.no_grad():
        weight.mul_(1.00001)
        distances = activation_distances(sorting_model, stored_activations)
        weight.copy_(before)
    assert distances["q"] > 1e-6
    assert distances["k"] <= 1e-6


def test_the_published_story_is_told(models):
    model = ma.load_model(str(models / "stories260K"))
    assert is_greedy(model, STORY)
    assert not is_greedy(model, STORY.replace("red ball", "blue ball"))  # negative control
