"""Attention both ways over packed texts, against the formula, text by text."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.kernels.packed import PackedTexts, _padded, packed_attention, plain_packed_attention

HEADS = 3


def packed(lengths: list[int], device: str = "cpu") -> PackedTexts:
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return PackedTexts(lengths, starts.to(device))


def numbers(texts: PackedTexts, dtype: torch.dtype = torch.float32, width: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(texts.lengths))
    qkv = torch.randn(sum(texts.lengths), 3 * HEADS * width, generator=generator)
    return qkv.to(dtype).to(texts.starts.device)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_each_text_sees_itself_alone(lengths: list[int]) -> None:
    texts = packed(lengths)
    qkv = numbers(texts)
    expected = plain_packed_attention(qkv, texts, HEADS)
    torch.testing.assert_close(packed_attention(qkv, texts, HEADS), expected)
    torch.testing.assert_close(_padded(qkv, texts, HEADS), expected)


def test_neighbours_of_one_length_are_one_run() -> None:
    runs = packed([3, 3, 5, 3]).runs
    assert [(run.rows.start, run.rows.stop, run.texts) for run in runs] == [
        (0, 6, 2),
        (6, 11, 1),
        (11, 14, 1),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8, 64, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype, width: int) -> None:
    texts = packed([1, 7, 7, 40, 300], "cuda")
    qkv = numbers(texts, dtype, width)
    expected = plain_packed_attention(qkv, texts, HEADS)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    found = packed_attention(qkv, texts, HEADS)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
