"""Every statistic of a row block, streamed, against the same of the hooks' whole pattern, in float32."""

import pytest
import torch

import mechattn as ma
from mechattn.engine.engines import forward_in_blocks, forward_through_hooks
from mechattn.functional import focus, received
from mechattn.functional.attention import mix
from mechattn.model import hooks
from mechattn.prompts.token_sequences import pad_right
from tests.parity.plain import MECHANISMS

PROBABILITIES = {"pattern", "first", "second", "own", "to_first"}


def statistics(rows, batch):
    """Everything that issue C lists, for the rows of real tokens."""
    first, second, at = focus.top_two(rows.pattern)
    inserted = batch.inserted[:, rows.keys]
    return {
        "first": first,
        "second": second,
        "at": at + rows.keys.start,
        "own": received.self_attention(rows.pattern, rows.queries.start, rows.keys.start).clone(),
        "to_first": rows.pattern[..., 0].clone()
        if rows.keys.start == 0
        else torch.zeros_like(first),
        "entropy": focus.entropy(rows.pattern),
        "distance": focus.mean_distance(rows.pattern, rows.queries.start, rows.keys.start),
        "shift": mix(
            rows.pattern, rows.attention.v[:, :, rows.keys] * inserted[:, None, :, None]
        ).norm(dim=-1),
    }


def collected(model, batch, forward):
    windows = {
        layer: hooks.attention_window(model, layer) for layer in hooks.attention_layers(model)
    }
    rows_of, columns = {}, {}

    def see(layer, rows):
        rows_of.setdefault(layer, []).append(statistics(rows, batch))
        sums = columns.setdefault(
            layer, torch.zeros(*rows.pattern.shape[:2], batch.tokens.shape[1])
        )
        sums[..., rows.keys] += received.column_sums(rows.pattern, batch.real[:, rows.queries])

    forward(model, batch, windows, see, max(windows))
    joined = {
        layer: {name: torch.cat([block[name] for block in blocks], -1) for name in blocks[0]}
        for layer, blocks in rows_of.items()
    }
    return joined, columns


@pytest.mark.parametrize("name", MECHANISMS)
def test_streaming_agrees_with_the_hooks(name, prompts, shared):
    model = shared(name)
    slash = ma.MeaninglessTokens("/", 55)
    sequences = [c.apply(p, model) for p in prompts[:3] for c in (ma.Baseline(), slash)]
    batch = pad_right(
        sequences, [(i // 2, "baseline" if i % 2 == 0 else "slash") for i in range(6)], 0
    )
    streamed, streamed_columns = collected(model, batch, forward_in_blocks)
    shown, shown_columns = collected(model, batch, forward_through_hooks)
    real = batch.real[:, None].expand(-1, model.cfg.n_heads, -1)
    for layer in shown:
        for quantity, expected in shown[layer].items():
            got, expected = streamed[layer][quantity][real].double(), expected[real].double()
            where = f"layer {layer}, {quantity}"
            if quantity == "at":
                tied = (shown[layer]["first"] - shown[layer]["second"])[real] < 4e-6
                assert (got == expected)[~tied].all(), where
            elif quantity in PROBABILITIES:
                assert (got - expected).abs().max() <= 2e-6, where
            else:
                # Probabilities may differ by 2e-6; a distance is one of them times places.
                most = 1e-6 * batch.tokens.shape[1] if quantity == "distance" else 2e-5
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=most, msg=where)
        torch.testing.assert_close(
            streamed_columns[layer], shown_columns[layer], rtol=1e-5, atol=1e-5
        )
