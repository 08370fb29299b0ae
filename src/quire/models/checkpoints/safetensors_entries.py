"""The header of a safetensors file, held to what the format promises before anything uses it.

Every tensor has a type, a shape and two offsets; its bytes are as many as they say; the tensors lie
end to end, in any order, and fill the file.
"""

from __future__ import annotations

import json
import math
from typing import Any, TypeGuard

import torch

from quire.checks import shorten

MOST_HEADER_BYTES = 100_000_000  # the format's own limit
MOST_DIMENSIONS = 8
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

Entry = dict[str, Any]  # of one tensor: "dtype", "shape", "data_offsets"


def read_entries(header: bytes, data_bytes: int) -> dict[str, Entry]:
    """The tensors by name, of a file with so many bytes behind its header; or a ValueError."""
    try:
        entries = json.loads(header, object_pairs_hook=_without_doubles)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(entries, dict):
        raise ValueError("its header is no object")
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        if not _is_whole(entry):
            raise ValueError(f"it describes {shorten(name)} wrongly")
    end = 0
    for start, stop in sorted(entry["data_offsets"] for entry in entries.values()):
        if start != end:
            raise ValueError("its tensors overlap or leave gaps")
        end = stop
    if end != data_bytes or not entries:
        raise ValueError(f"{data_bytes:,} bytes are there and {end:,} are described")
    return entries


def _is_whole(entry: Any) -> bool:
    """Whether type, shape and offsets are what they must be, and agree."""
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not (_are_sizes(shape) and _are_sizes(offsets)):
        return False
    if len(offsets) != 2 or len(shape) > MOST_DIMENSIONS:
        return False
    size = offsets[1] - offsets[0]
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:  # which is refused later, with its name
        return size >= 0
    return size == math.prod(shape) * dtype.itemsize


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 2**63 for value in values
    )


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its header has a name twice")
    return found
