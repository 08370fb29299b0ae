"""Gathering streams of KV into block images, and scattering images into streams.

    a stream   at any strides: [heads, width] for each token    one of a layer's, in its own tensor
    an image   the parts of all streams: [heads, tokens, width] packed, one part behind the other

One launch moves all streams of many blocks that are alike in shape and strides: those of a model
are, or fall into two or three kinds. A program moves the rows of some heads and tokens of one block
and one stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.sizes import cdiv, next_power_of_2

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TILE = 2048  # words that a program moves


@dataclass(frozen=True)
class AlikeStreams:
    """Streams of one shape, with the same strides. All sizes but `tokens` and `heads` are in words,
    as wide as everything is aligned to."""

    word: torch.dtype
    pointers: Tensor  # int64: where each begins
    starts: Tensor  # int64: and its part of an image
    token_strides: tuple[int, ...]  # of blocks and tokens, or of slots
    head_stride: int
    width_stride: int
    tokens: int
    heads: int
    width: int

    def token_offsets(self, blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where the tokens of blocks lie: `[blocks, tokens]`. `blocks` are numbers, or such an
        array of slots."""
        if blocks.ndim == 2:
            return blocks * self.token_strides[0]
        block_stride, token_stride = self.token_strides
        tokens = np.arange(self.tokens, dtype=np.int64)
        return blocks[:, None] * block_stride + tokens * token_stride


def alike(views: Sequence[Tensor], starts: Sequence[int], tokens: int) -> list[AlikeStreams]:
    """Streams by their kind. `views` end with heads and width; `starts` are bytes of an image."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for at, view in enumerate(views):
        kinds.setdefault((view.shape, view.stride(), view.itemsize), []).append(at)
    return [
        _alike([views[at] for at in kind], [starts[at] for at in kind], tokens)
        for kind in kinds.values()
    ]


def _alike(views: Sequence[Tensor], starts: Sequence[int], tokens: int) -> AlikeStreams:
    first, size = views[0], views[0].itemsize
    heads, width = first.shape[-2:]
    *strides, width_stride = (stride * size for stride in first.stride())
    word = size
    if width_stride == size or width == 1:  # whole rows may be moved in wider words
        pointers = [view.data_ptr() for view in views]
        word = gcd(8, width * size, *strides, *starts, *pointers)
        width_stride = word
    device = first.device
    return AlikeStreams(
        _WORDS[word],
        torch.tensor([view.data_ptr() for view in views], device=device),
        torch.tensor([start // word for start in starts], device=device),
        tuple(stride // word for stride in strides[:-1]),
        strides[-1] // word,
        width_stride // word,
        tokens,
        heads,
        width * size // word,
    )


def move_streams(
    streams: AlikeStreams, token_offsets: Tensor, images: Tensor, to_images: bool
) -> None:
    """Gather blocks into the first rows of `images`, or scatter these rows into blocks.

    `token_offsets` are those of the blocks, on the device; rows of `images` are bytes, aligned to
    eight of them.
    """
    words = images.view(streams.word)
    num_rows = streams.heads * streams.tokens
    columns = next_power_of_2(streams.width)
    rows = min(max(1, _TILE // columns), next_power_of_2(num_rows))
    grid = (len(token_offsets), len(streams.pointers), cdiv(num_rows, rows))
    _move[grid](
        streams.pointers,
        streams.starts,
        token_offsets,
        words,
        words.stride(0),
        streams.head_stride,
        streams.width_stride,
        HEADS=streams.heads,
        TOKENS=streams.tokens,
        WIDTH=streams.width,
        ROWS=rows,
        COLUMNS=columns,
        TO_IMAGES=to_images,
    )


@triton.jit
def _move(
    pointers,
    starts,
    token_offsets,
    images,
    image_stride,
    head_stride,
    width_stride,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TO_IMAGES: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    is_row = row < HEADS * TOKENS
    live = is_row[:, None] & (column < WIDTH)[None, :]
    offset = tl.load(token_offsets + block * TOKENS + row % TOKENS, mask=is_row, other=0)
    offset += (row // TOKENS).to(tl.int64) * head_stride
    values = tl.load(pointers + stream).to(tl.pointer_type(images.dtype.element_ty))
    values += offset[:, None] + column[None, :] * width_stride
    part = images + block * image_stride + tl.load(starts + stream)
    part += row[:, None] * WIDTH + column[None, :]
    if TO_IMAGES:
        tl.store(part, tl.load(values, mask=live), mask=live)
    else:
        tl.store(values, tl.load(part, mask=live), mask=live)
