"""A linear layer, by whatever multiplies fastest on its device.

On a CPU that may be weights which were put in order beforehand, on a GPU a kernel for few rows.
"""

from __future__ import annotations

import logging
import platform
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:  # there may be no Numba
    from quire.kernels.numba.float_product import FloatProduct

IS_ARM = platform.machine() in ("aarch64", "arm64")

log = logging.getLogger("quire")


class PackedMatrix(Protocol):
    """A copy of a matrix in the order that some of the CPU's kernels read it."""

    @property
    def nbytes(self) -> int: ...

    def takes(self, x: Tensor) -> bool:
        """Whether it multiplies these rows faster than torch does without it."""
        ...

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor: ...


@dataclass(frozen=True)
class OneDnnMatrix:
    """Without it oneDNN reorders the whole weight at every call, which with few rows costs as much
    as the product. Measured: with 2 to 8 rows packed is twice as fast, with 32 a third, with
    hundreds level."""

    packed: Tensor

    @property
    def nbytes(self) -> int:
        return self.packed.numel() * self.packed.itemsize

    def takes(self, x: Tensor) -> bool:
        return not (IS_ARM and len(x) == 1)  # BLAS multiplies a single row faster

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        return out


def pack(weight: Tensor) -> PackedMatrix | None:
    """A copy of `weight` in the order the CPU's matrix kernels read it; None: it has no use."""
    if weight.device.type != "cpu":
        return None
    if weight.dtype == torch.float32 and _has_float_kernel():
        from quire.kernels.numba.float_product import FloatProduct, can_interleave

        if can_interleave(weight):
            return FloatProduct(weight.unsqueeze(0))
    dtype = torch.float32 if IS_ARM else torch.bfloat16  # the types oneDNN's kernels are made for
    if weight.dtype != dtype or not torch.backends.mkldnn.enabled:
        return None
    if not torch.backends.mkldnn.is_available():
        return None
    return OneDnnMatrix(torch.ops.mkldnn._reorder_linear_weight(weight, None))


def pack_experts(weights: Tensor) -> FloatProduct | None:
    """The same of the matrices of experts `[experts, outputs, inputs]`, for products of the tokens
    of each with its own."""
    if weights.device.type != "cpu" or weights.dtype != torch.float32 or not _has_float_kernel():
        return None
    from quire.kernels.numba.float_product import FloatProduct, can_interleave

    return FloatProduct(weights) if can_interleave(weights[0]) else None


@cache
def _has_float_kernel() -> bool:
    """Whether the kernel for float32 is there, and this is a machine that it is fast on."""
    if find_spec("numba") is None:
        return False
    try:
        from quire.kernels.numba.host import has_avx512
        from quire.kernels.numba.kernels import float_product_kernel

        if has_avx512():
            float_product_kernel.compile(torch.float32)
            return True
    except Exception as error:  # whatever it is, torch has a way of its own
        log.warning("The CPU's kernel for float32 is off, which costs speed: %s", error)
    return False


def is_few(x: Tensor, weight: Tensor) -> bool:
    """Whether a GPU has a kernel for so few rows."""
    if not x.is_cuda:
        return False
    from quire.kernels.triton.gemv import is_few

    return is_few(x, weight)


def linear_in_float32(x: Tensor, weight: Tensor) -> Tensor:
    """`F.linear` whose result is not rounded, whatever its inputs are in."""
    if x.is_cuda and x.dtype != torch.float32:
        from quire.kernels.triton.gemv import gemv, is_few

        if is_few(x, weight):
            return gemv(x, weight, None, dtype=torch.float32)
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def add_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    packed: PackedMatrix | None,
    out: Tensor,
) -> None:
    """Add `linear` to `out`: one pass less over it, where the product itself can do so."""
    if x.is_cuda:
        from quire.kernels.triton.gemv import gemv, is_few

        if not is_few(x, weight) and bias is None:
            out.addmm_(x, weight.T)
            return
        if is_few(x, weight) and out.is_contiguous():
            gemv(x, weight, bias, add_to=out)
            return
    out.add_(linear(x, weight, bias, packed))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: PackedMatrix | None) -> Tensor:
    """`F.linear(x, weight, bias)`; `packed` is what `pack` made of the weight."""
    if x.is_cuda:
        from quire.kernels.triton.gemv import gemv, is_few

        return gemv(x, weight, bias) if is_few(x, weight) else F.linear(x, weight, bias)
    if packed is None or not packed.takes(x):
        return F.linear(x, weight, bias)
    return packed(x, bias)
