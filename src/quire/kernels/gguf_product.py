"""Products with weights as GGUF files have them: the plain reference, and the choice of a kernel.

The reference dequantises (`gguf_numbers.py`) and multiplies. The CPU's kernels round
activations to 16 bits first, 32 with a scale, which leaves nothing of that rounding to see. With 8
bits, which are for who asks for them, a near tie may become another answer (docs/models.md has by
how much).
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.gguf_blocks import BlockType, rows_of

log = logging.getLogger("quire")

ACTIVATION_BITS, FEW_ACTIVATION_BITS = 16, 8  # and those of who asks for them


def dequantised(kind: BlockType, weights: Tensor, rows: Tensor) -> Tensor:
    """Some rows of interleaved weights `[groups, blocks, bytes]`, in float32."""
    from gguf.constants import GGMLQuantizationType  # which other models need not wait for

    from quire.kernels.gguf_numbers import numbers_of

    if not len(rows):
        return torch.empty((0, weights.shape[1] * kind.values), device=weights.device)
    stored = rows_of(kind, weights.cpu().numpy(), rows.cpu().numpy().astype(np.int64, copy=False))
    return numbers_of(GGMLQuantizationType[kind.name], stored).to(weights.device)


def reference(
    kind: BlockType, weights: Tensor, rows: int, x: Tensor, bias: Tensor | None
) -> Tensor:
    dense = dequantised(kind, weights, torch.arange(rows)).to(x.dtype)
    return F.linear(x, dense, bias)


class Product(Protocol):
    """Multiplies with one matrix."""

    @property
    def gates(self) -> bool:
        """Whether it can give `silu(first) * second` of the halves of the rows, too."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether it can put the result into columns of another tensor."""
        ...

    def __call__(
        self, x: Tensor, bias: Tensor | None, gated: bool = False, into: Tensor | None = None
    ) -> Tensor:
        """`x` `[tokens, size]` times the matrix."""
        ...


@dataclass(frozen=True)
class ReferenceProduct:
    kind: BlockType
    weights: Tensor
    rows: int
    gates: bool = False
    is_whole: bool = False

    def __call__(
        self, x: Tensor, bias: Tensor | None, gated: bool = False, into: Tensor | None = None
    ) -> Tensor:
        return reference(self.kind, self.weights, self.rows, x, bias)


def product_with(
    kind: BlockType, weights: Tensor, rows: int, activation_bits: int = ACTIVATION_BITS
) -> Product:
    """That of the first `rows` of interleaved weights: a kernel's, where there is one."""
    name = kernel_name(kind, activation_bits)
    if weights.device.type != "cpu" or not kernels.compile(name):
        return ReferenceProduct(kind, weights, rows)
    from quire.kernels.numba.product import Product as KernelProduct

    return KernelProduct(name, kind, weights, rows)


def product_with_codes(
    kind: BlockType, weights: Tensor, rows: int, scales: Tensor, activation_bits: int
) -> Product | None:
    """That of codes whose scales lie apart (`numba/product.py`), if there is a kernel."""
    name = kernel_name(kind, activation_bits)
    if not kernels.compile(name):
        return None
    from quire.kernels.numba.product import Product as KernelProduct

    return KernelProduct(name, kind, weights, rows, scales)


def kernel_name(kind: BlockType, activation_bits: int) -> str:
    """That of the CPU's kernel for this type."""
    is_coarse = activation_bits == FEW_ACTIVATION_BITS and kind.has_codes
    return kind.coarse_name if is_coarse else kind.name


def multiplies_bytes() -> bool:
    """Whether this CPU has instructions with which fewer bits of an activation are faster."""
    if find_spec("numba") is None:
        return False
    from quire.kernels.numba.code.gguf.dot import takes_words

    return not takes_words()


class Kernels:
    """Which of them could be compiled here."""

    def __init__(self) -> None:
        self._ready: dict[str, bool] = {}
        self._asked_for: set[str] = set()
        self._compiling = threading.Lock()

    def prepare(self, kind: str) -> None:
        """Begin to have the kernel of this type; do not wait."""
        if kind not in self._asked_for:
            self._asked_for.add(kind)
            threading.Thread(target=self.compile, args=(kind,), daemon=True).start()

    def compile(self, kind: str) -> bool:
        """Have the kernel of this type, if there can be one; whether there is."""
        with self._compiling:
            if kind not in self._ready:
                self._ready[kind] = _compiles(kind)
            return self._ready[kind]


def _compiles(kind: str) -> bool:
    try:
        from quire.kernels.numba.kernels import product_kernels

        product_kernels[kind].compile(torch.float32)
    except Exception as error:  # whatever it is, the reference is right, too
        log.warning("The kernel of %s is off, which costs much speed: %s", kind, error)
        return False
    return True


kernels = Kernels()
