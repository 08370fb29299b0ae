"""How KV is split: every token once, and no more splits than there is room for."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

from quire.kernels.batch import AttentionBatch

TILE = 32


def split(device: str, lengths: Sequence[tuple[int, int]], programs: int, window=None, span=1):
    """The list of splits and of sequences with several, of `(new tokens, context)`."""
    from quire.kernels.triton.attention import kv_splits

    starts = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0, dtype=torch.int32)
    contexts = torch.tensor([context for _, context in lengths], dtype=torch.int32)
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    batch = AttentionBatch(
        nothing,
        nothing.view(len(lengths), 0),
        starts.to(device),
        contexts.to(device),
        query_lens=[new for new, _ in lengths],
        contexts=contexts.tolist(),
    )
    q = torch.zeros(0, 4, 16, device=device)
    made = kv_splits.split_kv(batch, q, 16, programs, TILE, 4, 16, window, span)
    rows, split_rows = made.table.tolist(), made.split_sequences.tolist()
    return (
        [row for row in rows if row[0] >= 0],
        split_rows[1 : 1 + split_rows[0][0]],
        starts.tolist(),
    )


@pytest.fixture
def device(subject) -> str:
    if subject.backend.name != "triton":
        pytest.skip("only a GPU has these splits")
    return str(subject.device)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("seed", range(4))
def test_every_token_that_is_seen_is_in_one_split(device, seed, window):
    draw = random.Random(seed)
    span = draw.choice([1, 16])
    lengths = []
    for _ in range(draw.choice([1, 5, 30])):
        context = draw.choice([0, draw.randint(1, 40), draw.randint(1, 2000)])
        lengths.append((min(draw.choice([0, 1, 1, 1, 9, 16, 17]), max(context, 1)), context))
    rows, split_rows, starts = split(device, lengths, draw.choice([1, 7, 40]), window, span)
    expected_splits = []
    for sequence, (new, context) in enumerate(lengths):
        own = [(item, row) for item, row in enumerate(rows) if row[0] == sequence]
        assert bool(own) == (0 < new <= span)
        if not own:
            continue
        at = 0 if window is None else max(0, context - window - new + 1)
        for _, (_, row, first, end, count, length, start, _) in own:
            assert (row, count, length, start) == (starts[sequence], len(own), new, context - new)
            assert first == at and end - first <= -(-context // TILE) * TILE
            at = end
        assert at == context
        if len(own) > 1:
            expected_splits.append([starts[sequence], new, own[0][0], len(own)])
    assert split_rows == expected_splits


@pytest.mark.parametrize(
    ("sequences", "context", "programs", "splits"),
    [
        (1, 4096, 33, 32),
        (64, 4096, 132, 2),
        (64, 1024, 66, 1),
        (40, 4096, 132, 3),
        (256, 800, 66, 1),
    ],
)
def test_as_many_splits_as_keep_a_gpu_busy(device, sequences, context, programs, splits):
    rows, _, _ = split(device, [(1, context)] * sequences, programs)
    assert len(rows) == sequences * splits


@pytest.mark.parametrize(
    ("sequences", "window", "splits"), [(4, 1024, 8), (33, 1024, 1), (40, 1024, 1), (1, 128, 1)]
)
def test_windows_are_split_only_where_they_are_long_and_too_few_for_a_gpu(
    device, sequences, window, splits
):
    lengths = [(1, 1100 + 300 * i) for i in range(sequences)]
    rows, split_rows, _ = split(device, lengths, programs=33, window=window)
    of_last = [row for row in rows if row[0] == sequences - 1]
    assert len(of_last) == splits and bool(split_rows) == (splits > 1)


def test_large_splits_come_first(device):
    """A GPU hands programs out in this order: what is left to do at the end should be little."""
    draw = random.Random(0)
    lengths = [(1, draw.randint(1, 3000)) for _ in range(300)]
    rows, _, _ = split(device, lengths, programs=132)
    sizes = [-(-lengths[row[0]][1] // row[4]) for row in rows]  # of the even splits, in tokens
    class_size = max(sizes) / 16 + 2 * TILE
    least = itertools.accumulate(sizes, min)
    assert all(size <= so_far + class_size for size, so_far in zip(sizes, least, strict=True))
    assert len(set(sizes)) > 100 and sizes[-1] < TILE < 20 * TILE < sizes[0]
