"""The numbers of GGUF's blocks, against the `gguf` package: to the bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES

from quire.kernels.gguf_numbers import numbers_of

SCALES = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 1, "Q5_0": 1, "Q5_1": 2, "IQ4_NL": 1}


@pytest.mark.parametrize("type_", SCALES)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (3, 5), (40, 18)])
def test_every_bit_is_that_of_the_package(type_: str, rows: int, blocks: int) -> None:
    _, block_bytes = GGML_QUANT_SIZES[Type[type_]]
    generator = np.random.default_rng(0)
    raw = generator.integers(0, 256, (rows, blocks, block_bytes), np.uint8)
    scales = raw[..., : 2 * SCALES[type_]].view(np.uint16)
    scales[(scales & 0x7C00) == 0x7C00] ^= 0x0400  # finite: all else may be, subnormals too
    raw = raw.reshape(rows, -1)
    wanted = torch.from_numpy(gguf.quants.dequantize(raw, Type[type_]))
    found = numbers_of(Type[type_], raw)
    assert found.shape == wanted.shape
    assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))
