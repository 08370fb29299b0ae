"""Rotation and attention of decodes in one launch, against each in its own."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.batch import AttentionBatch
from quire.kernels.pages import LayerPages
from quire.kernels.plain import Rotation
from quire.kernels.scoring import Scoring

KV_HEADS, WIDTH, BLOCK = 2, 16, 4


def batch_of(context: int, device: str) -> AttentionBatch:
    """One new token; without a context it is padding."""
    blocks, last = max(1, -(-context // BLOCK)), context - 1
    table = torch.randperm(blocks)
    slot = int(table[last // BLOCK]) * BLOCK + last % BLOCK if context else -1
    return AttentionBatch(
        torch.tensor([slot], device=device),
        table.int().view(1, -1).to(device),
        torch.tensor([0, 1], dtype=torch.int32, device=device),
        torch.tensor([context], dtype=torch.int32, device=device),
        query_lens=[1],
        contexts=[context],
    )


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("window", [None, 1, 20, 300])
@pytest.mark.parametrize("context", [0, 1, 65, 130])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_it_is_both(triton_device, context, window, group, has_sinks):
    from quire.kernels.triton import TritonBackend

    torch.manual_seed(group)
    backend, dtype, heads = TritonBackend(), torch.float16, KV_HEADS * group
    batch = batch_of(context, triton_device)
    pool = torch.randn(batch.block_tables.numel(), 2, KV_HEADS, BLOCK, WIDTH)
    pools = [pool.to(triton_device, dtype) for _ in range(2)]
    mine, theirs = (LayerPages(each[:, 0], each[:, 1]) for each in pools)
    qkv = torch.randn(1, (heads + 2 * KV_HEADS) * WIDTH).to(triton_device, dtype)
    numbers = torch.randn(2, 1, 1, WIDTH).to(triton_device, dtype)
    rotation = Rotation(numbers[0], numbers[1])
    sinks = torch.randn(heads).to(triton_device) if has_sinks else None
    scoring = Scoring(WIDTH**-0.5, window, None, sinks)
    backend.begin(batch)
    for _ in range(2):  # the second has splits that were made before
        found = backend.rotate_and_attend(qkv, rotation, mine, batch, scoring)
    assert found is not None
    q = backend.rotate_and_write(qkv, None, rotation, theirs, batch)
    right = backend.paged_attention(q, theirs, batch, scoring)
    assert torch.equal(*pools)
    torch.testing.assert_close(found, right, atol=4e-3, rtol=0)


@pytest.mark.parametrize(
    ("query_lens", "softcap", "group", "dtype"),
    [
        ([2], None, 1, torch.float16),
        ([1, 1], None, 1, torch.float16),
        ([1], 30.0, 1, torch.float16),
        ([1], None, 17, torch.float16),
        ([1], None, 1, torch.float32),
    ],
)
def test_what_two_launches_do(triton_device, query_lens, softcap, group, dtype):
    from quire.kernels.triton.attention.rotated_decode import can_rotate

    nothing = torch.zeros(0, dtype=torch.int64, device=triton_device)
    batch = AttentionBatch(nothing, nothing, nothing, nothing, query_lens, query_lens)
    pool = torch.zeros(1, 2, KV_HEADS, BLOCK, WIDTH, dtype=dtype, device=triton_device)
    qkv = pool.new_zeros(sum(query_lens), (group + 2) * KV_HEADS * WIDTH)
    pages = LayerPages(pool[:, 0], pool[:, 1])
    assert not can_rotate(qkv, pages, batch, Scoring(1.0, None, softcap))
