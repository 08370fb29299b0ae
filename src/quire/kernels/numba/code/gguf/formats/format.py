"""What the kernel of a product asks of a type."""

from __future__ import annotations

from typing import Any

from quire.kernels.gguf_blocks import CODES, TYPES
from quire.kernels.numba.code.gguf.reader import Reader, Step


class Format:
    """One of GGUF's types, for the kernel that multiplies with it."""

    chunks = 1  # of a block
    scales = 1  # of a step
    minima = 0  # of a step: as many as scales, or one, or none

    def __init__(self, name: str) -> None:
        self.name = name
        self.block = TYPES.get(name) or CODES[name]

    @property
    def offset(self) -> int:
        return 0

    def prepare(self, reader: Reader) -> Any:
        """What all chunks of a block need, of all sixteen rows."""
        return None

    def steps(self, reader: Reader, prepared: Any, chunk: Any) -> list[Step]:
        raise NotImplementedError
