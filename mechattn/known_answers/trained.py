"""A two-layer attention-only model trained here to copy, which must form an induction head in layer 1."""

from __future__ import annotations

from typing import Any

import torch

from mechattn.known_answers.spans import LENGTH, VOCABULARY, repeated_spans

STEPS, BATCH = 600, 64


def copying_model(seed: int = 0, steps: int = STEPS) -> Any:
    """A GPT-2 of two layers × four heads without MLPs, trained on random spans that are repeated."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=1 + LENGTH, n_embd=64, n_layer=2, n_head=4, n_inner=1, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(config)
        for name, weight in model.named_parameters():
            if ".mlp." in name:
                weight.requires_grad_(False).zero_()
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.01)
        if not steps:
            return model.eval()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
        for _ in range(steps):
            tokens, foreseen = repeated_spans(BATCH)
            logits = model(tokens).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits[foreseen[:, 1:]], tokens[:, 1:][foreseen[:, 1:]])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()
