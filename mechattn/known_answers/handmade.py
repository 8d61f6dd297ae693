"""A GPT-2 with handwritten weights, whose heads have known attention."""

from __future__ import annotations

from typing import Any

import torch

from mechattn.known_answers.spans import VOCABULARY

POSITIONS, D_HEAD = 72, 128
HEADS = {
    (0, 0): "previous token",
    (0, 1): "duplicate token",
    (0, 2): "first token",
    (0, 3): "uniform",
    (1, 0): "induction",
}
_TOKEN, _POSITION, _BEFORE = 0, VOCABULARY, VOCABULARY + POSITIONS  # the slices of the residual stream, each one-hot
_SHARP = 60.0  # the score of a match, far above all others


def handmade_model() -> Any:
    """A GPT-2 of two layers, attention only, in float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=POSITIONS, n_embd=4 * D_HEAD, n_layer=2, n_head=4, n_inner=4,
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.transformer.wte.weight[:, _TOKEN : _TOKEN + VOCABULARY] = torch.eye(VOCABULARY)
        model.transformer.wpe.weight[:, _POSITION : _POSITION + POSITIONS] = torch.eye(POSITIONS)
        for ones, block in zip((2, 3), model.transformer.h, strict=True):
            _undo(block.ln_1, ones)
        first, second = (block.attn for block in model.transformer.h)
        _previous_token(first, 0)
        _duplicate_token(first, 1)
        _first_token(first, 2)
        _induction(second, 0)
        _undo(model.transformer.ln_f, 3)
        model.lm_head.weight[:, _TOKEN : _TOKEN + VOCABULARY] = torch.eye(VOCABULARY)
    return model


def _undo(norm: torch.nn.LayerNorm, ones: int) -> None:
    """Set a layer norm so that a vector with this number of ones, and zeros elsewhere, is unchanged."""
    width = norm.weight.shape[0]
    mean = ones / width
    norm.weight.fill_((ones / width - mean**2 + norm.eps) ** 0.5)
    norm.bias.fill_(mean)


def _matrix(attention: Any, which: str, head: int) -> torch.Tensor:
    """W_Q, W_K or W_V of a head, [d_model d_head], as a view."""
    start = "qkv".index(which) * 4 * D_HEAD + head * D_HEAD
    return attention.c_attn.weight[:, start : start + D_HEAD]


def _look(attention: Any, head: int, query: int, key: int, size: int, sharp: float, at: int = 0) -> None:
    """Set the scores to ``sharp`` where two one-hot vectors of the residual stream agree."""
    same = torch.eye(size)
    _matrix(attention, "q", head)[query : query + size, at : at + size] = sharp * D_HEAD**0.5 * same
    _matrix(attention, "k", head)[key : key + size, at : at + size] = same


def _previous_token(attention: Any, head: int) -> None:
    _look(attention, head, _POSITION, _POSITION, POSITIONS, _SHARP)
    query = _matrix(attention, "q", head)
    query[_POSITION : _POSITION + POSITIONS] = query[_POSITION : _POSITION + POSITIONS].roll(-1, dims=1)
    tokens = torch.eye(VOCABULARY)
    _matrix(attention, "v", head)[_TOKEN : _TOKEN + VOCABULARY, :VOCABULARY] = tokens
    attention.c_proj.weight[head * D_HEAD : head * D_HEAD + VOCABULARY, _BEFORE : _BEFORE + VOCABULARY] = tokens


def _duplicate_token(attention: Any, head: int) -> None:
    """Attend to the same token but not the same position: the query's own key loses twice what its token adds."""
    _look(attention, head, _TOKEN, _TOKEN, VOCABULARY, _SHARP)
    _look(attention, head, _POSITION, _POSITION, POSITIONS, -2 * _SHARP, at=VOCABULARY)


def _first_token(attention: Any, head: int) -> None:
    bias = attention.c_attn.bias[head * D_HEAD : (head + 1) * D_HEAD]
    bias[0] = _SHARP * D_HEAD**0.5
    _matrix(attention, "k", head)[_POSITION, 0] = 1.0


def _induction(attention: Any, head: int) -> None:
    _look(attention, head, _TOKEN, _BEFORE, VOCABULARY, _SHARP)
