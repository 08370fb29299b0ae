"""Blocks of GGUF's types that the `gguf` package can read and not make: random codes."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

SCALES = {  # where they are in a block, each in two bytes
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}


def random_codes(type_: Type, rows: int, size: int, seed: int = 0) -> np.ndarray:
    """Rows of a matrix in bytes, of numbers below 1 or not far above."""
    generator = np.random.default_rng(seed)
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    raw = generator.integers(0, 256, (rows, size // block_values, block_bytes), np.uint8)
    if type_ == Type.MXFP4:
        raw[..., 0] = generator.integers(118, 126, raw.shape[:2])  # exponents
    for start in SCALES[type_.name]:
        scales = generator.uniform(1e-4, 1e-3, raw.shape[:2]).astype(np.float16)
        raw[..., start : start + 2] = scales[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def stored_rows(type_: str, rows: int, columns: int) -> np.ndarray:
    """Of random numbers, or random codes where `gguf` has no way to make them."""
    if type_ in SCALES:
        return random_codes(Type[type_], rows, columns)
    numbers = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
    return gguf.quantize(numbers, Type[type_])
