"""Products with float32 matrices, of which a copy has sixteen rows interleaved:

    matrix   row 0 [ 0 │ 1 │ 2 │ … ]   row 1 [ 0 │ 1 │ 2 │ … ]   …
    copy     [ 0 of rows 0 … 15 │ 1 of rows 0 … 15 │ 2 of rows 0 … 15 │ … ]

It is read from end to end, which with few tokens is most of what a product takes. BLAS is made for
many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.lent_memory import empty
from quire.kernels.numba.kernels import float_product_kernel
from quire.kernels.numba.results import is_large
from quire.kernels.numba.sizes import FLOAT_COLUMNS, LANES

FEW = 384  # tokens, above which BLAS multiplies as fast
ITEMS = 8  # of work for each thread, where there are so many
SMALL = 1 << 17  # weights times tokens, below which other threads are awake too late


def can_interleave(weight: Tensor) -> bool:
    rows, size = weight.shape
    return rows % LANES == 0 and size % FLOAT_COLUMNS == 0 and weight.numel() > 0


class FloatProduct:
    """Products with some matrices `[matrices, rows, size]`, or with one."""

    def __init__(self, weights: Tensor) -> None:
        count, self.rows, self.size = weights.shape
        self.groups = self.rows // LANES
        by_group = weights.view(count, self.groups, LANES, self.size)
        self._weights = by_group.transpose(2, 3).contiguous()
        self._same = self._weights.data_ptr(), self.rows * self.size, self.size

    @property
    def nbytes(self) -> int:
        return self._weights.nbytes

    @property
    def gates(self) -> bool:
        """Whether it can give `silu(first) * second` of the halves of the rows, too."""
        return self.groups % 2 == 0

    def takes(self, x: Tensor) -> bool:
        return len(x) <= FEW and x.dtype == torch.float32

    def __call__(
        self,
        x: Tensor,
        bias: Tensor | None = None,
        gated: bool = False,
        runs: Tensor | None = None,
    ) -> Tensor:
        """`x` `[tokens, size]` times the only matrix, or in `runs` of tokens that have one matrix
        each: int64, how many runs, then of each the matrix, its first token and its end."""
        x = x.contiguous()
        tokens = len(x)
        groups = self.groups // 2 if gated else self.groups
        steps = groups if gated else (groups + 1) // 2
        out = empty((tokens, groups * LANES), torch.float32)
        products = tokens * self.rows * self.size
        threads = 1 if products < SMALL else torch.get_num_threads()
        if tokens:
            float_product_kernel(
                torch.float32,
                threads,
                0,
                0 if runs is None else runs.data_ptr(),
                runs is not None,
                tokens,
                groups,
                -(-steps // (ITEMS * threads)),
                x.data_ptr(),
                *self._same,
                0 if bias is None else bias.data_ptr(),
                bias is not None,
                gated,
                is_large(out),
                out.data_ptr(),
                out.stride(0),
            )
        return out
