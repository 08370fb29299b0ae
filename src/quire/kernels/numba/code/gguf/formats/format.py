"""What the kernel of a product asks of a type."""

from __future__ import annotations

from typing import Any

from quire.kernels.gguf_blocks import CODES, TYPES
from quire.kernels.numba.code.gguf.reader import Reader, Step
from quire.kernels.numba.sizes import DIGITS, token_bytes


class Format:
    """One of GGUF's types, for the kernel that multiplies with it."""

    digits = DIGITS  # of an activation's code
    chunks = 1  # of a block
    scales = 1  # of a step
    minima = 0  # of a step: as many as scales, or one, or none

    def __init__(self, name: str) -> None:
        self.name = name
        self.block = TYPES.get(name) or CODES[name]

    @property
    def offset(self) -> int:
        return 0

    @property
    def token_bytes(self) -> int:
        return token_bytes(self.digits)

    @property
    def largest_code(self) -> int:
        """Of an activation: each digit at its largest."""
        return sum(127 << (8 * digit) for digit in range(self.digits))

    def prepare(self, reader: Reader) -> Any:
        """What all chunks of a block need, of all sixteen rows."""
        return None

    def steps(self, reader: Reader, prepared: Any, chunk: Any) -> list[Step]:
        raise NotImplementedError
