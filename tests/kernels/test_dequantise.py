"""Codes and scales to numbers in one kernel: the very numbers of the reference."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.dequantise import from_codes, from_fp4, spread, unpack_nibbles

COLUMNS, GROUP = 1088, 32  # more than one program has, and not a multiple of that


def numbers(bits: int, device: str) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(bits)
    codes = torch.randint(0, 256, (5, COLUMNS * bits // 8), dtype=torch.uint8, device=device)
    scales = torch.rand(5, COLUMNS // GROUP, device=device)
    zeros = torch.randint(0, 1 << bits, scales.shape, dtype=torch.uint8, device=device)
    return codes, scales, zeros


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("has_index", [False, True])
def test_unsigned_codes(triton_device, bits, has_zeros, has_index):
    from quire.kernels.triton.dequantise import dequantise

    codes, scales, zeros = numbers(bits, triton_device)
    index = torch.arange(COLUMNS, device=triton_device, dtype=torch.int32) // GROUP
    if has_index:
        index = index[torch.randperm(COLUMNS, device=triton_device)]
    given = unpack_nibbles(codes) if bits == 4 else codes
    wide_zeros = zeros[:, index] if has_zeros else None
    wanted = from_codes(given, scales[:, index], wide_zeros, middle=1 << (bits - 1))
    found = dequantise(
        codes,
        scales,
        zeros if has_zeros else None,
        index if has_index else None,
        COLUMNS,
        GROUP,
        bits,
        False,
        torch.float16,
    )
    assert torch.equal(found, wanted.half())


def test_four_bit_floats(triton_device):
    from quire.kernels.triton.dequantise import dequantise

    codes, scales, _ = numbers(4, triton_device)
    wanted = from_fp4(unpack_nibbles(codes), spread(scales, GROUP, COLUMNS))
    found = dequantise(codes, scales, None, None, COLUMNS, GROUP, 4, True, torch.float32)
    assert torch.equal(found, wanted)
