"""Hopper's kernel for decodes over KV in fp8, by a model of Gluon and without a GPU.

Where which thread holds what is wrong, Triton refuses to compile: a conversion between layouts that
is said to move nothing then would. `test_gpu.py` has it compile.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from gluon_model import run_program
from torch import Tensor

from quire.kernels.fp8 import FP8, quantise, scales_of
from quire.kernels.reference import ReferenceBackend
from quire.kv.layout import KVLayout
from quire.kv.pool import PagedKVCache

KERNEL = "quire.kernels.triton.attention.hopper_fp8_decode"
LOG2_E = 1.4426950408889634
LENGTHS = [(1, 1), (1, 16), (1, 0), (1, 70), (1, 64)]


def in_fp8(cache: Tensor) -> Tensor:
    """A pool with the same content, as far as fp8 can hold it; what is NaN stays so."""
    blocks, layers, _, kv_heads, block_size, head_dim = cache.shape
    layout = KVLayout.plain(layers, kv_heads, head_dim, block_size, FP8)
    pool = PagedKVCache(layout, blocks, torch.device("cpu"), ReferenceBackend())
    values, scales = quantise(cache)
    pool.tensor.copy_(values)
    scales_of(pool.tensor).copy_(scales)
    return pool.tensor


def attend(made, split: int, pieces: int) -> Tensor:
    """By all programs of the kernel, and with splits of so many tokens combined."""
    q, pages, batch = made.q, made.pages, made.batch
    heads, kv_heads = q.shape[1], pages.kv_heads
    items: list[list[int]] = []
    for row, context in enumerate(batch.contexts):
        firsts = range(0, context, split) if context else [0]
        for first in firsts:
            end = min(first + split, context)
            items.append([row, row, first, end, len(firsts), 1, context - 1, 0])
    table = torch.tensor([*items, [-1] * 8], dtype=torch.int32)  # the last of no sequence
    values = torch.full((len(table), heads, pages.v_width), torch.nan)
    lse = values[..., 0].clone()
    out = torch.full_like(q, torch.nan)
    words, scales = pages.k.view(torch.int32), pages.k_scales
    for program in product(range(kv_heads), range(len(table))):
        run_program(
            KERNEL, "_attend", program, 0,
            q=q, out=out, splits_table=table, values=values, lse=lse,
            block_tables=batch.block_tables, scale=made.scale * LOG2_E,
            cap=(made.softcap or 0.0) * LOG2_E, sinks=q if made.sinks is None else made.sinks,
            q_row_stride=q.stride(0), q_head_stride=q.stride(1),
            pages=words, block_stride=words.stride(0), kv_stride=pages.k_to_v // 4,
            head_stride=words.stride(1), scales=scales, scale_kv_stride=pages.k_to_v_scales,
            scale_head_stride=scales.stride(1),
            out_row_stride=out.stride(0), out_head_stride=out.stride(1),
            table_stride=batch.block_tables.stride(0), just_split=True, group=heads // kv_heads,
            HEADS=heads, GROUP=heads // kv_heads, BLOCK_SIZE=pages.block_size, PIECES=pieces,
            CAPPED=made.softcap is not None, SINKS=made.sinks is not None, PDL=False,
        )  # fmt: skip
    for row in range(len(q)):
        own = [i for i, item in enumerate(items) if item[0] == row]
        if len(own) > 1:
            logs = lse[own]
            if made.sinks is not None:
                logs = torch.cat((logs, made.sinks[None] * LOG2_E))
            weights = torch.softmax(logs * torch.tensor(2.0).log(), 0)[: len(own)]
            out[row] = (weights[..., None] * values[own]).sum(0).to(out.dtype)
    return out.float()


def check(made, split: int = 1 << 20, pieces: int = 1, atol: float = 4e-3) -> None:
    made = replace(made, cache=in_fp8(made.cache))
    wanted = replace(made, q=made.q.float()).attend(ReferenceBackend())
    torch.testing.assert_close(attend(made, split, pieces), wanted, rtol=0, atol=atol)


@pytest.mark.parametrize(("group", "kv_heads", "pieces"), [(1, 1, 4), (4, 2, 2), (8, 1, 1)])
def test_any_length(step, group, kv_heads, pieces):
    made = step(
        LENGTHS, group=group, kv_heads=kv_heads, head_dim=128, block_size=16, dtype=torch.float16
    )
    check(made, pieces=pieces)


@pytest.mark.parametrize("block_size", [32, 64])
def test_block_sizes(step, block_size):
    made = step(
        LENGTHS, group=2, kv_heads=1, head_dim=128, block_size=block_size, dtype=torch.float16
    )
    check(made, pieces=2)


def test_bfloat16(step):
    made = step([(1, 70), (1, 33)], kv_heads=1, head_dim=128, block_size=16, dtype=torch.bfloat16)
    check(made, split=32, atol=3e-2)


@pytest.mark.parametrize(
    ("split", "softcap", "has_sinks"), [(16, None, True), (48, 2.0, False), (1 << 20, 2.0, True)]
)
def test_splits_and_scoring(step, split, softcap, has_sinks):
    lengths = [(1, 130), (1, 33)]
    made = step(lengths, group=2, kv_heads=1, head_dim=128, block_size=16, dtype=torch.float16)
    sinks = 2 * torch.randn(2) if has_sinks else None
    check(replace(made, softcap=softcap, sinks=sinks), split)


@pytest.mark.parametrize("largest", [1, 4])
def test_scales_far_apart(step, largest):
    """Tokens whose V is tiny, huge or nothing beside the others': none of them is lost."""
    made = step([(1, 70), (1, 140)], kv_heads=1, head_dim=128, block_size=16, seed=largest)
    sizes = torch.tensor([1e-25, 1e-4, 1.0, 1e4, 0.0])[:largest]
    cache = made.cache.clone()
    slots = torch.arange(cache[:, :, 1, 0, :, 0].numel()).view(cache[:, :, 1, 0, :, 0].shape)
    cache[:, :, 1] *= sizes[slots % largest][:, :, None, :, None]
    made = replace(made, cache=in_fp8(cache))
    wanted = replace(made, q=made.q.float()).attend(ReferenceBackend())
    found = attend(replace(made, q=made.q.half()), 1 << 20, 1).float()
    close = 4e-3 * wanted.abs().max()
    if largest == 1:  # float16 has no room for such results
        found = attend(made, 1 << 20, 1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=float(close))
