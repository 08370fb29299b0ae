"""Sequences with few new tokens and with many, as batches of their own."""

from __future__ import annotations

import pytest
import torch
from paged import attention_batch

from quire.layers.batch_parts import split_batch

TABLES = [[7, 3], [1, 9, 2], [5], [8, 4, 6]]
CACHED, NEW, BLOCK_SIZE = [2, 0, 3, 7], [1, 10, 1, 5], 4


def whole_batch():
    return attention_batch(TABLES, CACHED, NEW, BLOCK_SIZE)


@pytest.mark.parametrize("most", [1, 5])
def test_each_is_the_batch_of_its_sequences(most):
    batch = whole_batch()
    parts = split_batch(batch, most)
    rows = torch.arange(sum(NEW))
    seen = []
    for part, is_ours in ((parts.few, lambda n: n <= most), (parts.many, lambda n: n > most)):
        chosen = [s for s, count in enumerate(NEW) if is_ours(count)]
        alone = attention_batch(
            [TABLES[s] for s in chosen],
            [CACHED[s] for s in chosen],
            [NEW[s] for s in chosen],
            BLOCK_SIZE,
        )
        for name in ("slot_mapping", "query_starts", "context_lens"):
            assert torch.equal(getattr(part.batch, name), getattr(alone, name)), name
        assert torch.equal(
            part.batch.block_tables[:, : alone.block_tables.shape[1]], alone.block_tables
        )
        assert (part.batch.query_lens, part.batch.contexts) == (alone.query_lens, alone.contexts)
        seen += part.of(rows).tolist()
    assert sorted(seen) == rows.tolist()


def test_a_batch_of_one_kind_stays_whole():
    batch = whole_batch()
    assert split_batch(batch, 10).few.batch is batch
    assert split_batch(batch, 10).many is None
    assert split_batch(batch, 0).many.batch is batch
    assert split_batch(batch, 0).few is None


def test_slots_of_all_tokens():
    part = split_batch(whole_batch(), 1).many
    blocks, offsets = part.slots(BLOCK_SIZE)
    expected = [(TABLES[s][i // 4], i % 4) for s in (1, 3) for i in range(CACHED[s] + NEW[s])]
    assert list(zip(blocks.tolist(), offsets.tolist(), strict=True)) == expected
