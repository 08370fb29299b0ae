"""A linear layer, by whatever multiplies fastest on its device.

On a CPU that may be weights which were put in order beforehand, on a GPU a kernel for few rows.
"""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from torch import Tensor

IS_ARM = platform.machine() in ("aarch64", "arm64")


def pack(weight: Tensor) -> Tensor | None:
    """A copy of `weight` in the order the CPU's matrix kernels read it; None: it has no use.

    Without it oneDNN reorders the whole weight at every call, which with few rows costs as much
    as the product. Measured: with 2 to 8 rows packed is twice as fast, with 32 a third, with
    hundreds level.
    """
    dtype = torch.float32 if IS_ARM else torch.bfloat16  # the types those kernels are made for
    if weight.device.type != "cpu" or weight.dtype != dtype or not torch.backends.mkldnn.enabled:
        return None
    if not torch.backends.mkldnn.is_available():
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def linear_in_float32(x: Tensor, weight: Tensor) -> Tensor:
    """`F.linear` whose result is not rounded, whatever its inputs are in."""
    if x.is_cuda and x.dtype != torch.float32:
        from quire.kernels.triton.gemv import gemv, is_few

        if is_few(x, weight):
            return gemv(x, weight, None, dtype=torch.float32)
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


def add_linear(x: Tensor, weight: Tensor, packed: Tensor | None, out: Tensor) -> None:
    """Add `linear` to `out`: one pass less over it, where the product itself can do so."""
    if x.is_cuda:
        from quire.kernels.triton.gemv import gemv, is_few

        if not is_few(x, weight):
            out.addmm_(x, weight.T)
            return
        if out.is_contiguous():
            gemv(x, weight, None, add_to=out)
            return
    out.add_(linear(x, weight, None, packed))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    """`F.linear(x, weight, bias)`; `packed` is what `pack` made of the weight."""
    if x.is_cuda:
        from quire.kernels.triton.gemv import gemv, is_few

        return gemv(x, weight, bias) if is_few(x, weight) else F.linear(x, weight, bias)
    if packed is None or (IS_ARM and len(x) == 1):  # BLAS multiplies a single row faster
        return F.linear(x, weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out
