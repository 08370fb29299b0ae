"""Attention that looks both ways, over whole texts laid end to end: nothing is padded or kept.

    rows   ├── text 0 ──┤├── text 1 ──┤├──── text 2 ────┤        a token sees its own text alone

A CPU takes neighbours of one length together, so texts should come sorted by length. A GPU takes
all of them in one launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNED = 8  # features of a head that a GPU's kernels read at once


@cache
def _varlen_attention() -> Any:
    """Torch's own, which imports much; None before torch 2.10."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


class Run(NamedTuple):
    """Neighbours of one length."""

    rows: slice
    texts: int
    length: int


@dataclass(frozen=True, eq=False)
class PackedTexts:
    lengths: list[int]
    starts: Tensor  # int32 [texts + 1], on the device: the first row of each, and the end

    @cached_property
    def runs(self) -> list[Run]:
        return list(_runs(self.lengths))

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def is_padding(self) -> Tensor:
        """`[texts, longest]`: which places are behind the end, if each text had a row of its own"""
        lengths = self.starts.diff()
        places = torch.arange(self.longest, device=lengths.device)
        return places >= lengths[:, None]


def _runs(lengths: list[int]) -> Iterator[Run]:
    start = 0
    for length, alike in groupby(lengths):
        count = len(list(alike))
        rows = slice(start, start + count * length)
        yield Run(rows, count, length)
        start = rows.stop


def packed_attention(qkv: Tensor, texts: PackedTexts, heads: int) -> Tensor:
    """From `[tokens, 3 * features]`, the heads of q, of k and of v, to `[tokens, features]`."""
    if not qkv.is_cuda:
        return _by_runs(qkv, texts, heads)
    q, k, v = qkv.unflatten(1, (3, heads, -1)).unbind(1)
    if q.shape[2] % ALIGNED:
        return _padded(qkv, texts, heads)
    starts, longest = texts.starts, texts.longest
    attend = _varlen_attention() if qkv.dtype in (torch.float16, torch.bfloat16) else None
    if attend is not None:
        out: Tensor = attend(q, k, v, starts, starts, longest, longest)
    else:
        # What `scaled_dot_product_attention` calls for float32. It takes texts laid end to end only
        # under this name.
        out = torch.ops.aten._efficient_attention_forward(
            q[None], k[None], v[None], None, starts, starts, longest, longest, 0.0, 0
        )[0][0]
    return out.flatten(1)


def plain_packed_attention(qkv: Tensor, texts: PackedTexts, heads: int) -> Tensor:
    """The same text by text, by the formula and in float64: what the others are held to."""
    found = []
    for part in qkv.split(texts.lengths):
        q, k, v = part.double().unflatten(1, (3, heads, -1)).permute(1, 2, 0, 3)
        weights = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1)
        found.append((weights @ v).transpose(0, 1).flatten(1))
    return torch.cat(found).to(qkv.dtype)


def _by_runs(qkv: Tensor, texts: PackedTexts, heads: int) -> Tensor:
    out = qkv.new_empty(len(qkv), qkv.shape[1] // 3)
    for run in texts.runs:
        parts = qkv[run.rows].view(run.texts, run.length, 3, heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        out[run.rows].view(seen.shape).copy_(seen)
    return out


def _padded(qkv: Tensor, texts: PackedTexts, heads: int) -> Tensor:
    is_text = ~texts.is_padding
    rows = qkv.new_zeros(*is_text.shape, qkv.shape[1])
    rows[is_text] = qkv
    q, k, v = rows.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    seen = F.scaled_dot_product_attention(q, k, v, attn_mask=is_text[:, None, None])
    return seen.transpose(1, 2).flatten(2)[is_text]
