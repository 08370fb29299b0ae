"""A matrix with adapters beside it: the product, then what the adapter of each row adds."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.adapter_slots import AdapterBatch
from quire.kernels.backend import Backend
from quire.kernels.codes import CodeFormat, Codes
from quire.layers.adapters.matrix_adapters import MatrixAdapters
from quire.layers.matrix import DenseMatrix, Matrix
from quire.layers.weights import Weight


class AdaptedMatrix(Matrix):
    """Any matrix, dense or quantised. A pass without adapters is the matrix's own, to the bit."""

    def __init__(self, base: Matrix, adapters: MatrixAdapters) -> None:
        super().__init__()
        self.base, self.adapters = base, adapters
        self.out_features, self.in_features = base.out_features, base.in_features

    @property
    def _batch(self) -> AdapterBatch | None:
        return self.adapters.active.batch

    @property
    def format_name(self) -> str:
        return self.base.format_name

    def takes(self, rows: int, dtype: torch.dtype) -> CodeFormat | None:
        """Numbers, while a row has an adapter: that multiplies them too."""
        return self.base.takes(rows, dtype) if self._batch is None else None

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        batch = self._batch
        if batch is None:
            return self.base.multiply(x, bias)
        if x.is_cuda:
            from quire.kernels.triton.adapters.expand import expand

            out, hidden = self._product_and_hidden(x, bias, batch)
            expand(hidden, self.adapters.slots, batch, out)
            return out
        out = self.base.multiply(x, bias)
        self.adapters.add(x, out)
        return out

    def add_product(self, x: Tensor, out: Tensor) -> None:
        self.base.add_product(x, out)
        self.adapters.add(x, out)

    def multiply_codes(self, x: Codes, bias: Tensor | None) -> Tensor:
        return self.base.multiply_codes(x, bias)

    def gated(
        self, x: Tensor, bias: Tensor | None, backend: Backend, activation: Activation
    ) -> Tensor:
        batch = self._batch
        if batch is None:
            return self.base.gated(x, bias, backend, activation)
        if x.is_cuda:
            from quire.kernels.triton.adapters.expand import expand_gated

            product, hidden = self._product_and_hidden(x, bias, batch)
            return expand_gated(hidden, self.adapters.slots, batch, product, activation)
        return backend.act_and_mul(self.multiply(x, bias), activation)

    def _product_and_hidden(
        self, x: Tensor, bias: Tensor | None, batch: AdapterBatch
    ) -> tuple[Tensor, Tensor]:
        """On a GPU: the matrix's product, and `a x` of its adapters; of few rows, in one launch."""
        from quire.kernels.triton.adapters.few import gemv_and_shrink
        from quire.kernels.triton.adapters.shrink import shrink
        from quire.kernels.triton.gemv import is_few

        base = self.base
        if isinstance(base, DenseMatrix) and is_few(x, base.weight):
            return gemv_and_shrink(x, base.weight, bias, self.adapters.slots, batch)
        hidden = shrink(x, self.adapters.slots, batch)
        return base.multiply(x, bias), hidden

    def rows(self, indices: Tensor) -> Tensor:
        return self.base.rows(indices)

    def weights(self, whole: Weight, rows: slice) -> Iterator[Weight]:
        return self.base.weights(whole, rows)

    def pack(self) -> None:
        self.base.pack()
