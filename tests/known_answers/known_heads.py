"""Known heads: handwritten ones, and induction heads in models trained here to copy; and these models."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import xarray as xr

from mechattn.analysis.attention_focus import AttentionFocus
from mechattn.engine.engines import Engine
from mechattn.engine.run import run
from mechattn.interventions.ablation import HeadAblation
from mechattn.interventions.intervention import on
from mechattn.model.checkpoint import lettered_tokenizer
from mechattn.model.hooked import HookedModel
from mechattn.model.load import load_model
from mechattn.stats.paired import paired

VOCABULARY, SHORTEST, LONGEST, LENGTH = 48, 8, 24, 48
STEPS, BATCH = 600, 64
POSITIONS, D_HEAD = 72, 128
HEADS = {  # handmade, each with the measure that is exactly 1 for it
    (0, 0): ("previous token", "previous_mass"),
    (0, 1): ("duplicate token", "duplicate_mass"),
    (0, 2): ("first token", "first_mass"),
    (0, 3): ("uniform", "entropy_share"),
    (1, 0): ("induction", "induction_mass"),
}
# Where the parts of the residual stream begin, each one-hot.
_TOKEN = 0
_POSITION = VOCABULARY
_BEFORE = VOCABULARY + POSITIONS
_SHARP = 60.0  # the score of a match, far above all others
PROMPTS = 24


def focus_of_handmade() -> list[xr.Dataset]:
    """Where the handwritten heads look, by both engines."""
    hooked = hooked_model(handmade_model())
    tokens, _ = repeated_spans(PROMPTS, torch.Generator().manual_seed(0))
    return [attention_focus(hooked, tokens, engine) for engine in ("streaming", "hooks")]


def distances_from_what_was_written(
    focus_by_engine: list[xr.Dataset], heads: dict[tuple[int, int], tuple[str, str]]
) -> dict[tuple[int, int], float]:
    """How far each handwritten head's measure is from 1, the larger of both engines'."""
    distances = {}
    for (layer, head), (_, measure) in heads.items():
        distances[layer, head] = max(
            float(abs(focus[measure].sel(layer=layer, head=head) - 1).max())
            for focus in focus_by_engine
        )
    return distances


def induction_heads(model: HookedModel, tokens: torch.Tensor) -> list[tuple[int, int]]:
    """The heads with more than half of their attention on the tokens after earlier occurrences, and q < 0.05."""
    focus = attention_focus(model, tokens)
    excess = focus.induction_mass - focus.induction_mass_uniform
    tested = paired(excess.transpose("prompt", "layer", "head").values, bootstrap_ends=False)
    means = focus.induction_mass.mean("prompt").transpose("layer", "head").values
    layers, heads = ((means > 0.5) & (tested.q < 0.05)).nonzero()
    return [(int(layer), int(head)) for layer, head in zip(layers, heads, strict=True)]


def copied_share(
    model: HookedModel,
    tokens: torch.Tensor,
    foreseen: torch.Tensor,
    ablated: list[tuple[int, int]] | None = None,
) -> float:
    """The fraction of tokens that are predicted, with the outputs of some heads set to zero."""
    without = on(HeadAblation(tuple(ablated)), model) if ablated else nullcontext()
    with torch.no_grad(), without:
        logits = model(tokens)
    return float((logits[:, :-1].argmax(-1) == tokens[:, 1:])[foreseen[:, 1:]].double().mean())


def attention_focus(
    model: HookedModel, tokens: torch.Tensor, engine: Engine = "auto"
) -> xr.Dataset:
    made = run(model, tokens, {}, [AttentionFocus()], engine=engine)
    return made["attention_focus"].sel(condition="baseline", segment="question").astype("float64")


def hooked_model(model: Any) -> HookedModel:
    return load_model(model, tokenizer=lettered_tokenizer(VOCABULARY))


def repeated_spans(
    count: int, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [count, 1 + LENGTH], and which of them can be predicted."""
    tokens = torch.full((count, 1 + LENGTH), VOCABULARY - 1)
    foreseen = torch.ones(count, 1 + LENGTH, dtype=torch.bool)
    for row, span in enumerate(
        torch.randint(SHORTEST, LONGEST + 1, (count,), generator=generator).tolist()
    ):
        drawn = torch.randperm(VOCABULARY - 1, generator=generator)[:span]
        tokens[row, 1:] = drawn.repeat(LENGTH // span + 1)[:LENGTH]
        foreseen[row, : span + 2] = False
    return tokens, foreseen


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
        _look(second, 0, _TOKEN, _BEFORE, VOCABULARY, _SHARP)  # the induction head
        _undo(model.transformer.ln_f, 3)
        model.lm_head.weight[:, _TOKEN : _TOKEN + VOCABULARY] = torch.eye(VOCABULARY)

    return model


def _undo(norm: torch.nn.LayerNorm, ones: int) -> None:
    """Set a layer norm so that a vector with this number of ones, and zeros elsewhere, is unchanged."""
    mean = ones / norm.weight.shape[0]
    norm.weight.fill_((mean - mean**2 + norm.eps) ** 0.5)
    norm.bias.fill_(mean)


def _matrix(attention: Any, which: str, head: int) -> torch.Tensor:
    """W_Q, W_K or W_V of a head, [d_model d_head], as a view."""
    start = "qkv".index(which) * 4 * D_HEAD + head * D_HEAD
    return attention.c_attn.weight[:, start : start + D_HEAD]


def _look(
    attention: Any, head: int, query: int, key: int, size: int, sharp: float, at: int = 0
) -> None:
    """Set the scores to ``sharp`` where two one-hot vectors of the residual stream agree."""
    same = torch.eye(size)
    _matrix(attention, "q", head)[query : query + size, at : at + size] = sharp * D_HEAD**0.5 * same
    _matrix(attention, "k", head)[key : key + size, at : at + size] = same


def _previous_token(attention: Any, head: int) -> None:
    _look(attention, head, _POSITION, _POSITION, POSITIONS, _SHARP)
    query = _matrix(attention, "q", head)
    query[_POSITION : _POSITION + POSITIONS] = query[_POSITION : _POSITION + POSITIONS].roll(
        -1, dims=1
    )
    tokens = torch.eye(VOCABULARY)
    _matrix(attention, "v", head)[_TOKEN : _TOKEN + VOCABULARY, :VOCABULARY] = tokens
    attention.c_proj.weight[
        head * D_HEAD : head * D_HEAD + VOCABULARY, _BEFORE : _BEFORE + VOCABULARY
    ] = tokens


def _duplicate_token(attention: Any, head: int) -> None:
    """Attend to the same token but not the same position: the query's own key loses twice what its token adds."""
    _look(attention, head, _TOKEN, _TOKEN, VOCABULARY, _SHARP)
    _look(attention, head, _POSITION, _POSITION, POSITIONS, -2 * _SHARP, at=VOCABULARY)


def _first_token(attention: Any, head: int) -> None:
    attention.c_attn.bias[head * D_HEAD] = _SHARP * D_HEAD**0.5
    _matrix(attention, "k", head)[_POSITION, 0] = 1.0


def copying_model(seed: int = 0, steps: int = STEPS, batch: int = BATCH) -> Any:
    """A GPT-2 of two layers × four heads without MLPs, trained on random spans that are repeated.

    It can copy in no other way than by an induction head in layer 1.
    """
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
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 3e-3, total_steps=steps, pct_start=0.1
        )
        for _ in range(steps):
            tokens, foreseen = repeated_spans(batch)
            logits = model(tokens).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits[foreseen[:, 1:]], tokens[:, 1:][foreseen[:, 1:]]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()

    return model.eval()
