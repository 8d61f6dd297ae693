"""Any size of block and any split of a batch gives the same statistics."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mechattn.functional import received as fn
from mechattn.functional.attention import Attention, attention_by_rows


def columns(q, k, v, counted, window, block):
    sums = torch.zeros(q.shape[:3], dtype=torch.float64)

    def see(rows):
        sums[..., rows.keys] += fn.column_sums(rows.pattern, counted[:, rows.queries])

    out = attention_by_rows(Attention(q, k, v, 0.5, window=window), see, block)
    return sums, out


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 50),
    block=st.integers(1, 60),
    window=st.one_of(st.none(), st.integers(1, 60)),
    batch=st.integers(1, 4),
    split=st.integers(0, 4),
    seed=st.integers(0, 2**16),
)
def test_any_block_and_any_split_give_the_same(length, block, window, batch, split, seed):
    generator = torch.Generator().manual_seed(seed)

    def drawn(heads):
        return 3 * torch.randn(batch, heads, length, 4, generator=generator, dtype=torch.float64)

    q = drawn(4)
    k = drawn(2)
    v = drawn(2)
    counted = torch.rand(batch, length, generator=generator) < 0.7
    whole, out = columns(q, k, v, counted, window, length)
    totals = counted.sum(-1).double()[:, None].expand(-1, 4)
    torch.testing.assert_close(whole.sum(-1), totals, atol=1e-9, rtol=0)

    split = min(split, batch)
    sums = []
    outs = []
    for part in (slice(0, split), slice(split, batch)):
        if part.stop > part.start:
            of_part = columns(q[part], k[part], v[part], counted[part], window, block)
            sums.append(of_part[0])
            outs.append(of_part[1])
    torch.testing.assert_close(torch.cat(sums), whole, atol=1e-9, rtol=0)
    torch.testing.assert_close(torch.cat(outs), out, atol=1e-9, rtol=0)
