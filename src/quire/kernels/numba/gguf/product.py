"""Products with weights as GGUF files have them, over all threads: with a bias, or with a gate.

First the activations become codes, tile by tile; when all are, the threads go on to the
weights. An item of work is a few groups of sixteen rows with some tiles of tokens: a group's
weights, and then the tokens' activations, are read from the nearest caches again and again.
"""

from __future__ import annotations

import threading
from typing import NamedTuple, NewType

import torch
from numba import types
from numpy import float32, int64
from torch import Tensor

from quire.kernels.gguf_blocks import BlockType
from quire.kernels.numba.exp import exp
from quire.kernels.numba.gguf.activations import (
    LARGEST_TILE,
    TOKEN_BYTES,
    quantise_tile,
    tile_size,
)
from quire.kernels.numba.gguf.formats import FORMATS, STEP
from quire.kernels.numba.gguf.tile import multiply_tile
from quire.kernels.numba.kernel import Bytes, Count, Floats, Kernel, Version, launches
from quire.kernels.numba.memory import claim, count_of, floats_on_stack, helper, shift
from quire.kernels.numba.simd import LANES, load, minus_magnitude, splat, store, where_negative

CHUNK = 256  # tokens: their activations stay in the second cache
ITEMS = 8  # for each thread, where there are so many groups
SMALL = 1 << 17  # weights times tokens, below which other threads are awake too late

PRODUCTS = 2 * LARGEST_TILE * LANES  # of a tile with sixteen rows, and with sixteen more

Kind = NewType("Kind", int)


class ProductArguments(NamedTuple):
    next_tile: Count
    tiles_done: Count
    next_item: Count
    tokens: Count
    groups: Count  # of sixteen rows; with a gate, those of the gate
    groups_at_once: Count
    x: Floats  # [tokens, size]
    tiles: Bytes
    bias: Floats
    has_bias: Count
    is_gated: Count
    out: Floats
    width: Count  # of a row of `out`
    size: Count  # activations of a token
    blocks: Count  # of a row
    weights: Bytes
    group_bytes: Count
    scales_apart: Floats  # that do not lie in blocks: of each group, for each of so many blocks
    group_scales: Count  # numbers of a group
    scale_stride: Count  # numbers from one to the next
    blocks_of_scale: Count
    offset: Count
    scales: Count
    has_minimum: Count
    kind: Kind
    version: Version


def multiply(arguments):
    a = arguments[0]
    _quantise(arguments)
    both = floats_on_stack(PRODUCTS)
    chunks = (a.tokens + CHUNK - 1) // CHUNK
    parts = (a.groups + a.groups_at_once - 1) // a.groups_at_once
    while True:
        item = claim(arguments, 2)
        if item >= chunks * parts:
            return
        chunk, part = item // parts, item % parts
        end = min((chunk + 1) * CHUNK, a.tokens)
        for group in range(part * a.groups_at_once, min((part + 1) * a.groups_at_once, a.groups)):
            token = chunk * CHUNK
            while token < end:
                tokens = tile_size(end - token)
                for i in range(1 + a.is_gated):
                    place = shift(both, i * tokens * LANES)
                    _product(a, i * a.groups + group, token, tokens, place)
                if a.is_gated:
                    _store_gated(a, group, token, tokens, both)
                else:
                    _store(a, group, token, tokens, both)
                token += tokens


@helper
def _quantise(arguments):
    """All tiles; returns when those of other threads are done, too."""
    a = arguments[0]
    tiles = int64(0)
    token = int64(0)
    claimed = claim(arguments, 0)
    while token < a.tokens:
        tokens = tile_size(a.tokens - token)
        if tiles == claimed:
            tile = shift(a.tiles, token * (a.size // STEP) * TOKEN_BYTES)
            quantise_tile(a.x, a.size, token, tokens, tile, a.offset, a.scales, a.has_minimum)
            claim(arguments, 1)
            claimed = claim(arguments, 0)
        tiles += 1
        token += tokens
    while count_of(arguments, 1) < tiles:
        pass


@helper
def _product(a, group, token, tokens, out):
    weights = shift(a.weights, group * a.group_bytes)
    apart = shift(a.scales_apart, group * a.group_scales), a.scale_stride, a.blocks_of_scale
    x = shift(a.tiles, token * (a.size // STEP) * TOKEN_BYTES)
    if tokens == 8:
        multiply_tile(a.kind, 8, weights, apart, x, a.blocks, out)
    elif tokens == 4:
        multiply_tile(a.kind, 4, weights, apart, x, a.blocks, out)
    elif tokens == 2:
        multiply_tile(a.kind, 2, weights, apart, x, a.blocks, out)
    else:
        multiply_tile(a.kind, 1, weights, apart, x, a.blocks, out)


@helper
def _store(a, group, token, tokens, products):
    row = group * LANES
    for i in range(tokens):
        numbers = load(products, i * LANES)
        if a.has_bias:
            numbers = numbers + load(a.bias, row)
        store(a.out, (token + i) * a.width + row, numbers)


@helper
def _store_gated(a, group, token, tokens, both):
    one = splat(float32(1.0))
    row = group * LANES
    for i in range(tokens):
        x, up = load(both, i * LANES), load(both, (tokens + i) * LANES)
        if a.has_bias:
            x, up = x + load(a.bias, row), up + load(a.bias, a.groups * LANES + row)
        power = exp(minus_magnitude(x))  # at most 1: nothing overflows
        sigmoid = where_negative(x, power, one) / (one + power)
        store(a.out, (token + i) * a.width + row, x * sigmoid * up)


KERNELS = {name: Kernel(multiply, ProductArguments, {Kind: types.Opaque(name)}) for name in FORMATS}


class Product:
    """Products with one matrix: interleaved weights `[groups, blocks, bytes]`, of which the last
    group may have rows more than `rows`.

    What is the same for all of them is worked out once: with one token, a product takes less time
    than the Python around it.
    """

    def __init__(
        self, kind: BlockType, weights: Tensor, rows: int, scales: Tensor | None = None
    ) -> None:
        """`scales`, of codes alone: float32 `[groups, scales of a row, 1 or 2, 16]`, with minima
        where there are two."""
        format_ = FORMATS[kind.name]
        groups, blocks, _ = weights.shape
        self.rows, self.groups = rows, groups
        self.is_whole = rows == groups * LANES
        self.gates = rows % (2 * LANES) == 0
        self._kernel = KERNELS[kind.name]
        self._weights, self._scales = weights, scales  # stay, as the kernel has their addresses
        self._token_bytes = blocks * kind.values // STEP * TOKEN_BYTES
        self._same = (
            blocks * kind.values,
            blocks,
            weights.data_ptr(),
            weights.stride(0),
            *_scales_apart(scales, blocks),
            format_.offset,
            format_.scales,
            format_.has_minimum,
            0,
        )

    def __call__(
        self, x: Tensor, bias: Tensor | None, gated: bool = False, into: Tensor | None = None
    ) -> Tensor:
        """`x` `[tokens, size]` times the matrix; `gated`, of the halves of its rows
        `silu(first) * second`. `into`: columns of a tensor for the result of a product that
        `is_whole`, in float32."""
        if x.dtype != torch.float32:  # for which alone there are kernels: they take long to compile
            wide_bias = None if bias is None else bias.float()
            return self(x.float(), wide_bias, gated).to(x.dtype)
        x = x.contiguous()
        tokens, size = x.shape
        groups = self.groups // 2 if gated else self.groups
        out = into
        if out is None:
            out = torch.empty((tokens, groups * LANES), dtype=torch.float32)
        threads = 1 if groups * LANES * size * tokens < SMALL else torch.get_num_threads()
        has_bias = bias is not None and self.is_whole
        if tokens:
            self._kernel(
                torch.float32,
                threads,
                0,
                0,
                0,
                tokens,
                groups,
                -(-groups // (ITEMS * threads)),
                x.data_ptr(),
                room.of(tokens * self._token_bytes),
                bias.data_ptr() if bias is not None else 0,
                has_bias,
                gated,
                out.data_ptr(),
                out.stride(0),
                *self._same,
            )
        if self.is_whole:
            return out
        out = out[:, : self.rows].contiguous()
        return out if bias is None else out.add_(bias)


def _scales_apart(scales: Tensor | None, blocks: int) -> tuple[int, int, int, int]:
    if scales is None:
        return 0, 0, 0, 1
    return scales.data_ptr(), scales.stride(0), scales.stride(1), blocks // scales.shape[1]


class _Room(threading.local):
    """For the codes of activations, which no product needs after its end: each thread's own."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.address = 0

    def of(self, num_bytes: int) -> int:
        if launches.noted is not None:  # a recorded pass has memory of its own, which stays
            return torch.empty(num_bytes, dtype=torch.uint8).data_ptr()
        if num_bytes > len(self.memory):
            self.memory = torch.empty(num_bytes, dtype=torch.uint8)
            self.address = self.memory.data_ptr()
        return self.address


room = _Room()
