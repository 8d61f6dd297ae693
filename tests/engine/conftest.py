"""What the tests of batches share: prompts of given lengths, and the batches that they are read in."""

from importlib import import_module

import pytest
import torch

import mechattn as ma
from mechattn.engine import batches as batch_plans


def prompts_of(tokenizer, lengths):
    """Prompts of random tokens, so many each."""
    prompts = []
    for number, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(5, len(tokenizer), (length - 1,), generator=generator).tolist()
        tokens = (tokenizer.bos_token_id, *tokens)
        prompts.append(ma.Prompt(tokens=tokens, id=f"p{number}", solution="3", system=""))
    return prompts


def received(result, prompt, condition="baseline"):
    """What each token of a prompt receives [layer, head, key]."""
    dataset = result["received_attention"]
    values = dataset.received_per_prompt.sel(prompt=prompt.id, condition=condition)
    return values.isel(key=slice(len(prompt.tokens))).values


@pytest.fixture
def batches(monkeypatch):
    """As few batches as there can be, whatever the lengths; the lengths in each."""
    seen = []
    module = import_module("mechattn.engine.run")  # the function of that name hides nothing so
    pad = module.pad_right

    def noting(sequences, *arguments):
        seen.append([len(sequence) for sequence in sequences])
        return pad(sequences, *arguments)

    monkeypatch.setattr(batch_plans, "_LEAST_FILL", 0.0)
    monkeypatch.setattr(module, "pad_right", noting)
    return seen
