"""A matrix with adapters beside it: the product, then what the adapter of each row adds.

With some rows a launch costs a GPU more than the small product in it. The slots' `a` therefore
follow the matrix's own rows in memory, and one product is that of both:

    weight  [features, inputs]          what the matrix makes of x
    a       [slots * ranks, inputs]     what each slot makes of x; a row needs one of them

All slots are multiplied, which costs little while they are few rows beside the matrix's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.adapter_slots import AdapterBatch, AdapterSlots, SlotRun
from quire.kernels.backend import Backend
from quire.kernels.codes import CodeFormat, Codes
from quire.layers.adapters.matrix_adapters import MatrixAdapters
from quire.layers.matrix import DenseMatrix, Matrix
from quire.layers.weights import Weight, view

_ALIGNMENT = 8  # of rows of the product: with others, it takes far longer
_LEAST_SHARE = 4  # slots are multiplied with a matrix that has so many times their rows
_MOST_ROWS = 1024  # of x: with more, it is faster to multiply each by its own slot alone


class AdaptedMatrix(Matrix):
    """Any matrix, dense or quantised. A pass without adapters is the matrix's own, to the bit."""

    def __init__(self, base: Matrix, adapters: MatrixAdapters) -> None:
        super().__init__()
        self.base, self.adapters = base, adapters
        self.out_features, self.in_features = base.out_features, base.in_features
        self._joint: Tensor | None = None  # the matrix, then `a` of all slots
        self.reader: MatrixAdapters | None = None  # of the matrix that reads what is gated here

    def join(self) -> None:
        """Put the slots' `a` behind a dense matrix; once there are slots, before they are used."""
        base, slots = self.base, self.adapters.slots
        rows = slots.a.shape[0] * slots.a.shape[1]
        if not isinstance(base, DenseMatrix) or base.weight.dtype != slots.a.dtype:
            return
        if rows * _LEAST_SHARE <= self.out_features and rows % _ALIGNMENT == 0:
            self._joint = torch.cat((base.weight, slots.a.flatten(0, 1)))
            base.weight = view(self._joint[: self.out_features])
            self.adapters.slots = replace(
                slots, a=self._joint[self.out_features :].view(slots.a.shape)
            )

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
        if runs := self._long_runs(x):
            return self._multiply_runs(x, bias, runs)
        if x.is_cuda:
            from quire.kernels.triton.adapters.expand import expand, expanded

            product, hidden = self._product_and_hidden(x, bias, batch)
            if not product.is_contiguous():  # but columns of a joint product
                return expanded(hidden, self.adapters.slots, batch, product)
            expand(hidden, self.adapters.slots, batch, product)
            return product
        out = self.base.multiply(x, bias)
        self.adapters.add(x, out)
        return out

    def add_product(self, x: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        self.base.add_product(x, out, bias)
        if runs := self._long_runs(x):
            from quire.kernels.triton.adapters.runs import add_runs

            add_runs(self._run_hidden(x, runs), self.adapters.slots, runs, out)
        else:
            self.adapters.add(x, out)

    def _long_runs(self, x: Tensor) -> tuple[SlotRun, ...]:
        """On a GPU, where they have kernels of their own."""
        batch = self._batch
        if batch is None or not x.is_cuda or self.adapters.have_bias(batch.long_runs):
            return ()
        return batch.long_runs

    def _run_hidden(self, x: Tensor, runs: tuple[SlotRun, ...]) -> Tensor:
        from quire.kernels.triton.adapters.runs import shrink_runs

        known = self.adapters.active.take_shrunk(x)
        return shrink_runs(x, self.adapters.slots, runs) if known is None else known

    def _multiply_runs(self, x: Tensor, bias: Tensor | None, runs: tuple[SlotRun, ...]) -> Tensor:
        from quire.kernels.triton.adapters.runs import add_runs, multiply_runs

        base, slots, hidden = self.base, self.adapters.slots, self._run_hidden(x, runs)
        if isinstance(base, DenseMatrix) and bias is None:
            return multiply_runs(x, base.weight, hidden, slots, runs)
        product = base.multiply(x, bias)
        add_runs(hidden, slots, runs, product)
        return product

    def multiply_codes(self, x: Codes, bias: Tensor | None) -> Tensor:
        return self.base.multiply_codes(x, bias)

    def gated(
        self, x: Tensor, bias: Tensor | None, backend: Backend, activation: Activation
    ) -> Tensor:
        batch = self._batch
        if batch is None:
            return self.base.gated(x, bias, backend, activation)
        if runs := self._long_runs(x):
            from quire.kernels.triton.adapters.gated_runs import gated_runs

            slots, hidden = self.adapters.slots, self._run_hidden(x, runs)
            product, reader = self.base.multiply(x, bias), self._shrinking_reader(runs)
            out, shrunk = gated_runs(hidden, slots, runs, product, activation, reader)
            if shrunk is not None:
                self.adapters.active.put_shrunk(out, shrunk)
            return out
        if x.is_cuda:
            from quire.kernels.triton.adapters.expand_gated import expand_gated

            product, hidden = self._product_and_hidden(x, bias, batch)
            return expand_gated(hidden, self.adapters.slots, batch, product, activation)
        return backend.act_and_mul(self.multiply(x, bias), activation)

    def _shrinking_reader(self, runs: tuple[SlotRun, ...]) -> AdapterSlots | None:
        """The slots of the matrix that reads what is gated here, if the gate can do their `a x`."""
        from quire.kernels.triton.adapters.gated_runs import can_shrink

        reader = self.reader
        if reader is None or reader.have_bias(runs) or not can_shrink(reader.slots):
            return None
        return reader.slots

    def _product_and_hidden(
        self, x: Tensor, bias: Tensor | None, batch: AdapterBatch
    ) -> tuple[Tensor, Tensor]:
        """On a GPU: the matrix's product, and `a x` of its adapters, in one launch if possible."""
        from quire.kernels.triton.adapters.few import gemv_and_shrink
        from quire.kernels.triton.adapters.shrink import shrink
        from quire.kernels.triton.gemv import is_few

        base = self.base
        if isinstance(base, DenseMatrix) and is_few(x, base.weight):
            return gemv_and_shrink(x, base.weight, bias, self.adapters.slots, batch)
        if self._joint is not None and bias is None and len(x) <= _MOST_ROWS:
            both = F.linear(x, self._joint)
            return both[:, : self.out_features], both[None, :, self.out_features :]
        hidden = shrink(x, self.adapters.slots, batch)
        return base.multiply(x, bias), hidden

    def rows(self, indices: Tensor) -> Tensor:
        return self.base.rows(indices)

    def weights(self, whole: Weight, rows: slice) -> Iterator[Weight]:
        return self.base.weights(whole, rows)

    def pack(self) -> None:
        self.base.pack()
