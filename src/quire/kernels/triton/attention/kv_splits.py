"""How sequences' KV is split over programs (split-KV): on the device, once for all layers.

A split is some of one sequence's tokens, whole tiles of them. There is a share of all tiles that
would keep the whole GPU busy once; a sequence has as few even splits as have no more than that
share each. So a lone long sequence fills the GPU, and short ones among many have one split each.
The share is made larger where that leaves so many fewer splits that the GPU runs fewer waves.
Long sequences among many get smaller splits, and large splits are listed first: the GPU starts
programs as others end, and the last ones to end should be short. Where a short window of each
sequence is enough to keep the GPU busy, no window is split, and there is nothing to combine. Nor
is a window of a few tiles, however idle the GPU is: to combine them would take longer than they do.

There are never more splits than sequences and shares together: what a grid and its buffers are made
for holds for every length that a captured graph may meet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.triton.sizes import cdiv

# Sequence, row, first token, end, splits, new tokens, position of the first of these, unused.
FIELDS: tl.constexpr = tl.constexpr(8)
_CHOICES = 8  # of a share
_CLASSES = 16  # of splits, by their size
_SPLITS_PER_PROGRAM = 64
_SEQUENCES_AT_ONCE = 128
_SPLITS_PER_SEQUENCE = 2  # of a sequence, on average, at most, unless the GPU would not be busy
_LONG = 1024  # tokens: no split among many is made shorter than this
_SHORT = 256  # tokens: no window of so many is split, as a second launch takes longer than they


@dataclass(frozen=True)
class KVSplits:
    """Which program computes what, and where results stay until splits are combined."""

    count: int
    span: int  # sequences with more new tokens than this have no split
    table: Tensor  # int32 [count, FIELDS]; the sequence is -1 where there is no split
    # int32 [1 + sequences, 4]: how many sequences have several splits, and of each its first
    # row, new tokens, first split, and number of splits.
    split_sequences: Tensor
    values: Tensor  # float32 [count, span, heads, v_width]
    lse: Tensor  # float32 [count, span, heads]: log-sum-exp of the scores, base 2
    are_whole: bool = False  # no sequence has several: there is nothing to combine


def split_kv(
    batch: AttentionBatch,
    q: Tensor,
    v_width: int,
    programs: int,
    tile: int,
    group: int,
    rows: int,
    window: int | None,
    span: int,
) -> KVSplits:
    """The splits of `batch`, where so many `programs` for each KV head keep the GPU busy.

    One program takes so many `rows`, of which every new token has a `group`.
    """
    sequences, heads = len(batch.query_lens), q.shape[1]
    many = max(programs, _SPLITS_PER_SEQUENCE * sequences)
    whole_tiles = _whole_tiles(batch, programs, tile, window, span)
    are_whole = whole_tiles is not None
    count = sequences if are_whole else sequences + many
    kept = 0 if are_whole else count  # results that wait to be combined
    splits = KVSplits(
        count,
        span,
        q.new_empty(count, FIELDS.value, dtype=torch.int32),
        q.new_empty(1 + sequences, 4, dtype=torch.int32),
        q.new_empty(kept, span, heads, v_width, dtype=torch.float32),
        q.new_empty(kept, span, heads, dtype=torch.float32),
        are_whole,
    )
    _split_kv[(cdiv(count, _SPLITS_PER_PROGRAM),)](
        batch.query_starts,
        batch.context_lens,
        splits.table,
        splits.split_sequences,
        sequences,
        count,
        programs,
        many,
        whole_tiles or 1,
        TILE=tile,
        LONG=max(1, _LONG // tile),
        WINDOW=window or 0,
        SPAN=span,
        GROUP=group,
        ROWS=rows,
        CHOICES=_CHOICES,
        CLASSES=_CLASSES,
        SPLITS=_SPLITS_PER_PROGRAM,
        SEQUENCES=_SEQUENCES_AT_ONCE,
    )
    return splits


def _whole_tiles(
    batch: AttentionBatch, programs: int, tile: int, window: int | None, span: int
) -> int | None:
    """The most tiles that a sequence has, where no window is split: short ones, and those that keep
    the GPU busy as they are."""
    if window is None or window > _LONG:
        return None
    num_decodes = sum(0 < length <= span for length in batch.query_lens)
    if window > _SHORT and num_decodes < programs:
        return None
    return cdiv(window + span - 1, tile)


@triton.jit(do_not_specialize=["sequences", "count", "few", "many", "least"])
def _split_kv(
    query_starts,
    context_lens,
    splits_table,
    split_sequences,
    sequences,
    count,
    few,
    many,
    least,
    TILE: tl.constexpr,
    LONG: tl.constexpr,
    WINDOW: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    CHOICES: tl.constexpr,
    CLASSES: tl.constexpr,
    SPLITS: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """A program writes some of the list, and finds their sequences from all lengths."""
    total = 0  # tiles of all programs for one KV head
    for start in range(0, sequences, SEQUENCES):
        sequence = start + tl.arange(0, SEQUENCES)
        live = sequence < sequences
        _, length, _, seen = _lengths(query_starts, context_lens, sequence, live, WINDOW)
        total += tl.sum(_tiles(length, seen, TILE, SPAN) * tl.cdiv(length * GROUP, ROWS), 0)
    share = tl.maximum(tl.cdiv(total, many), tl.minimum(tl.cdiv(total, few), LONG))
    # This, or up to twice as much.
    shares = tl.cdiv(tl.maximum(share, least) * (CHOICES + tl.arange(0, CHOICES)), CHOICES)
    programs = tl.zeros([CHOICES], tl.int32)
    for start in range(0, sequences, SEQUENCES):
        sequence = start + tl.arange(0, SEQUENCES)
        live = sequence < sequences
        _, length, _, seen = _lengths(query_starts, context_lens, sequence, live, WINDOW)
        counts = tl.cdiv(_tiles(length, seen, TILE, SPAN)[None, :], shares[:, None])
        programs += tl.sum(counts * tl.cdiv(length * GROUP, ROWS)[None, :], 1)
    # A program's start takes as long as a tile or two.
    time = tl.cdiv(programs, few) * (shares + 2)
    share = tl.min(tl.where(time == tl.min(time, 0), shares, 2**30), 0)

    # How many splits there are of each class of sizes, and where in the list each class begins.
    classes = tl.arange(0, CLASSES)
    in_class = tl.zeros([CLASSES], tl.int32)
    for start in range(0, sequences, SEQUENCES):
        sequence = start + tl.arange(0, SEQUENCES)
        live = sequence < sequences
        _, length, _, seen = _lengths(query_starts, context_lens, sequence, live, WINDOW)
        counts, size_class = _counts_and_classes(_tiles(length, seen, TILE, SPAN), share, CLASSES)
        in_class += tl.sum(tl.where(size_class[:, None] == classes[None, :], counts[:, None], 0), 0)
    base = tl.cumsum(in_class, 0) - in_class

    item = tl.program_id(0) * SPLITS + tl.arange(0, SPLITS)
    owner = tl.full([SPLITS], -1, tl.int32)
    before = tl.zeros([SPLITS], tl.int32)  # how many splits come before the owner's
    split_before = tl.zeros([SPLITS], tl.int32)  # and how many sequences with several splits
    num_split = 0
    for start in range(0, sequences, SEQUENCES):
        sequence = start + tl.arange(0, SEQUENCES)
        live = sequence < sequences
        _, length, _, seen = _lengths(query_starts, context_lens, sequence, live, WINDOW)
        counts, size_class = _counts_and_classes(_tiles(length, seen, TILE, SPAN), share, CLASSES)
        of_class = size_class[:, None] == classes[None, :]
        added = tl.where(of_class, counts[:, None], 0)
        begin = base[None, :] + tl.cumsum(added, 0) - added
        begin = tl.sum(tl.where(of_class, begin, 0), 1)
        is_split = (counts > 1).to(tl.int32)
        split_begin = num_split + tl.cumsum(is_split, 0) - is_split
        theirs = begin[None, :] <= item[:, None]
        theirs &= item[:, None] < (begin + counts)[None, :]
        owner = tl.maximum(owner, tl.max(tl.where(theirs, sequence[None, :], -1), 1))
        before += tl.sum(tl.where(theirs, begin[None, :], 0), 1)
        split_before += tl.sum(tl.where(theirs, split_begin[None, :], 0), 1)
        base += tl.sum(added, 0)
        num_split += tl.sum(is_split, 0)

    live = owner >= 0
    row, length, context, seen = _lengths(query_starts, context_lens, owner, live, WINDOW)
    tiles = _tiles(length, seen, TILE, SPAN)
    num_splits = tl.maximum(tl.cdiv(tiles, share), 1)
    split = item - before
    tokens = tl.cdiv(tiles, num_splits) * TILE
    first = context - seen + split * tokens

    field = splits_table + item * FIELDS
    inside = item < count
    tl.store(field, owner, mask=inside)
    tl.store(field + 1, row, mask=inside)
    tl.store(field + 2, first, mask=inside)
    tl.store(field + 3, tl.minimum(first + tokens, context), mask=inside)
    tl.store(field + 4, num_splits, mask=inside)
    tl.store(field + 5, length, mask=inside)
    tl.store(field + 6, context - length, mask=inside)

    begins = live & (split == 0) & (num_splits > 1)
    field = split_sequences + (1 + split_before) * 4
    tl.store(field, row, mask=begins)
    tl.store(field + 1, length, mask=begins)
    tl.store(field + 2, item, mask=begins)
    tl.store(field + 3, num_splits, mask=begins)
    if tl.program_id(0) == 0:
        tl.store(split_sequences, num_split)


@triton.jit
def _lengths(query_starts, context_lens, sequence, live, WINDOW: tl.constexpr):
    """Each sequence's first row, its new tokens, its context, and how much of that they see;
    all 0 where it is not live."""
    row = tl.load(query_starts + sequence, mask=live, other=0)
    length = tl.load(query_starts + sequence + 1, mask=live, other=0) - row
    context = tl.load(context_lens + sequence, mask=live, other=0)
    seen = context
    if WINDOW > 0:
        seen = tl.minimum(context, WINDOW + length - 1)
    return row, length, context, seen


@triton.jit
def _counts_and_classes(tiles, share, CLASSES: tl.constexpr):
    """How many splits each sequence has, and the class of their size: 0 for the largest."""
    counts = tl.cdiv(tiles, share)
    size = tl.cdiv(tiles, tl.maximum(counts, 1))
    return counts, tl.minimum((share - size) * CLASSES // share, CLASSES - 1)


@triton.jit
def _tiles(length, seen, TILE: tl.constexpr, SPAN: tl.constexpr):
    """The tiles of each sequence: none with no new token or too many, else at least one, for the
    output of a padded row is written too."""
    ours = (length > 0) & (length <= SPAN)
    return tl.where(ours, tl.maximum(tl.cdiv(seen, TILE), 1), 0)
