"""As `few.py`, on Hopper GPUs: codes are on their way many steps ahead.

With few rows all that counts is how much of the matrix is asked for at any time. What a step needs
is copied to shared memory, and the first steps before the kernel ahead is done (`pdl.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mma_v2

from quire.kernels.activation import Activation
from quire.kernels.int4_tiles import Int4Tiles
from quire.kernels.triton.int4.ring import fetch, make_ring, numbers_of, take
from quire.kernels.triton.pdl import pdl_launch


def few_rows(
    x: Tensor,
    matrix: Int4Tiles,
    bias: Tensor | None,
    activation: Activation | None,
    warps: int = 8,
    steps: int = 4,
) -> Tensor:
    words, scale, zero, group = matrix
    rows, columns = x.shape
    gated = activation is not None
    features = words.shape[0] // 2 if gated else words.shape[0]
    out = torch.empty((rows, features), dtype=x.dtype, device=x.device)
    _few_rows[(features // 16,)](
        x,
        words,
        scale,
        words.view(torch.uint8) if zero is None else zero,
        scale if bias is None else bias,
        out,
        x.stride(0),
        rows,
        features,
        columns,
        GROUP=group,
        STEPS=steps,
        ZEROS=zero is not None,
        GATED=gated,
        GELU=activation is Activation.GELU_TANH,
        BIASED=bias is not None,
        num_warps=warps,
        **pdl_launch(x.device),
    )
    return out


@gluon.jit(do_not_specialize=["rows"])
def _few_rows(
    x,
    words,
    scale,
    zero,
    bias,
    out,
    x_stride,
    rows,
    features,
    columns,
    GROUP: gl.constexpr,
    STEPS: gl.constexpr,
    ZEROS: gl.constexpr,
    GATED: gl.constexpr,
    GELU: gl.constexpr,
    BIASED: gl.constexpr,
    PDL: gl.constexpr,
):
    warps: gl.constexpr = gl.num_warps()
    sums: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])
    dtype: gl.constexpr = out.dtype.element_ty
    block = gl.program_id(0)
    up_block = block + features // 16
    blocks = 2 * up_block
    tiles = columns // 128
    ring = make_ring(STEPS, warps, GROUP, dtype, zero.dtype.element_ty)
    if GATED:
        up_ring = make_ring(STEPS, warps, GROUP, dtype, zero.dtype.element_ty)
    for i in gl.static_range(STEPS):
        fetch(
            ring, words, scale, zero, i, block, i * warps, tiles, blocks, columns,
            GROUP, False, ZEROS,
        )  # fmt: skip
        if GATED:
            fetch(
                up_ring, words, scale, zero, i, up_block, i * warps, tiles, blocks, columns,
                GROUP, False, ZEROS,
            )  # fmt: skip
    if PDL:
        _control("griddepcontrol.launch_dependents; // $0")
        _control("griddepcontrol.wait; // $0")
    acc = gl.zeros([warps, 16, 8], gl.float32, sums)
    up_acc = acc
    v0, v1, v2, v3 = _load_rows(x, x_stride, rows, 0, columns, sums)
    for step in range(gl.cdiv(tiles, warps)):
        w0, w1, w2, w3 = v0, v1, v2, v3
        v0, v1, v2, v3 = _load_rows(x, x_stride, rows, (step + 1) * warps, columns, sums)
        async_copy.wait_group((2 if GATED else 1) * STEPS - (2 if GATED else 1))
        codes, scales, lows = take(ring, step, GROUP, ZEROS)
        if GATED:
            up_codes, up_scales, up_lows = take(up_ring, step, GROUP, ZEROS)
        ahead = step + STEPS
        fetch(
            ring, words, scale, zero, ahead, block, ahead * warps, tiles, blocks, columns,
            GROUP, False, ZEROS,
        )  # fmt: skip
        if GATED:
            fetch(
                up_ring, words, scale, zero, ahead, up_block, ahead * warps, tiles, blocks,
                columns, GROUP, False, ZEROS,
            )  # fmt: skip
        acc = _multiply(codes, scales, lows, w0, w1, w2, w3, acc, sums)
        if GATED:
            up_acc = _multiply(up_codes, up_scales, up_lows, w0, w1, w2, w3, up_acc, sums)
    async_copy.wait_group(0)

    across: gl.constexpr = gl.SliceLayout(0, sums)
    feature = block * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, across))
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, across))
    result = _finish(acc, bias, feature, BIASED, dtype)
    if GATED:
        up = _finish(up_acc, bias, features + feature, BIASED, dtype)
        # Rounded before it is multiplied, as models were trained.
        scaled = result
        if GELU:
            scaled = 1.5957691216057308 * result * (1 + 0.044715 * result * result)
        result = (result / (1 + gl.exp(-scaled))).to(dtype).to(gl.float32) * up
    target = out + row[None, :] * features + feature[:, None]
    gl.store(target, result.to(dtype), mask=(row < rows)[None, :])


@gluon.jit
def _control(ASM: gl.constexpr):
    gl.inline_asm_elementwise(ASM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _multiply(codes, scales, lows, v0, v1, v2, v3, acc, sums: gl.constexpr):
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    acc = mma_v2(gl.convert_layout(numbers_of(codes, scales, lows, 0), left), v0, acc)
    acc = mma_v2(gl.convert_layout(numbers_of(codes, scales, lows, 1), left), v1, acc)
    acc = mma_v2(gl.convert_layout(numbers_of(codes, scales, lows, 2), left), v2, acc)
    return mma_v2(gl.convert_layout(numbers_of(codes, scales, lows, 3), left), v3, acc)


@gluon.jit
def _load_rows(x, x_stride, rows, tile, columns, sums: gl.constexpr):
    """The four chunks of a step's tiles."""
    return (
        _load_chunk(x, x_stride, rows, tile, 0, columns, sums),
        _load_chunk(x, x_stride, rows, tile, 1, columns, sums),
        _load_chunk(x, x_stride, rows, tile, 2, columns, sums),
        _load_chunk(x, x_stride, rows, tile, 3, columns, sums),
    )


@gluon.jit
def _load_chunk(x, x_stride, rows, tile, CHUNK: gl.constexpr, columns, sums: gl.constexpr):
    warps: gl.constexpr = gl.num_warps()
    wide: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 2], [32, 1, 1, 1], [1, warps, 1, 1], [3, 0, 1, 2]
    )
    on_thread: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, wide)))
    on_warp: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, wide)))
    on_eight: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, wide)))
    on_pair: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, wide)))
    thread = gl.arange(0, 32, layout=on_thread)[:, None, None, None]
    first = ((tile + gl.arange(0, warps, layout=on_warp)) * 128 + CHUNK * 32)[None, :, None, None]
    eight = gl.arange(0, 4, layout=on_eight)[None, None, :, None] * 8
    pair = gl.arange(0, 2, layout=on_pair)[None, None, None, :]
    row = thread // 4
    live = (row < rows) & (first < columns)
    source = x + row * x_stride + (first + eight + thread % 4 * 2 + pair)
    found = gl.load(source, mask=live, other=0.0)
    found = gl.reshape(found, [8, 4, warps, 4, 2])
    found = gl.reshape(gl.permute(found, [2, 3, 1, 4, 0]), [warps, 32, 8])
    return gl.convert_layout(found, gl.DotOperandLayout(1, sums, 2))


@gluon.jit
def _finish(acc, bias, feature, BIASED: gl.constexpr, dtype: gl.constexpr):
    """The sums of all warps, rounded."""
    result = gl.sum(acc, 0)
    if BIASED:
        result += gl.load(bias + feature).to(gl.float32)[:, None]
    return result.to(dtype).to(gl.float32)
