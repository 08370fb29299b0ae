"""A matrix with adapters beside it: the product, then what the adapter of each row adds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.adapter_slots import AdapterBatch, AdapterSlots
from quire.kernels.adapters import add_adapters
from quire.kernels.backend import Backend
from quire.kernels.codes import CodeFormat, Codes
from quire.layers.adapters.active import ActiveAdapters
from quire.layers.adapters.image import MatrixImage, Outputs, matrix_image
from quire.layers.matrix import DenseMatrix, Matrix
from quire.layers.weights import Weight


class AdaptedMatrix(Matrix):
    """Any matrix, dense or quantised. A pass without adapters is the matrix's own, to the bit."""

    def __init__(self, base: Matrix, sizes: Sequence[int], active: ActiveAdapters) -> None:
        super().__init__()
        self.base = base
        self.out_features, self.in_features = base.out_features, base.in_features
        self.sizes = tuple(sizes)
        self.active = active
        self.slots: AdapterSlots

    @property
    def table_width(self) -> int:
        """The numbers that say what a slot holds: where each output begins and ends, and whether
        there is a bias."""
        return len(self.sizes) + 2

    def make_slots(self, rank: int, dtype: torch.dtype, table: Tensor) -> None:
        """Memory for adapters of up to this rank; `table` is int32 `[slots, table_width]`."""
        count, device = len(table), table.device
        outputs, features = len(self.sizes), self.out_features
        columns = list(accumulate(self.sizes, initial=0))
        self.slots = AdapterSlots(
            a=torch.empty(count, outputs * rank, self.in_features, dtype=dtype, device=device),
            b=torch.empty(count, rank, features, dtype=dtype, device=device),
            bias=torch.empty(count, features, dtype=dtype, device=device),
            starts=table[:, : outputs + 1],
            is_biased=table[:, outputs + 1],
            columns=torch.tensor(columns, dtype=torch.int32, device=device),
            sizes=self.sizes,
            ranks=[(0,) * outputs] * count,
            biased=[False] * count,
        )

    @property
    def slot_bytes(self) -> int:
        """What all slots take."""
        return self.slots.a.nbytes + self.slots.b.nbytes + self.slots.bias.nbytes

    def image(self, outputs: Outputs) -> MatrixImage:
        """What a slot will hold of an adapter."""
        slots = self.slots
        return matrix_image(outputs, self.sizes, self.in_features, slots.a.dtype)

    def store(self, slot: int, image: MatrixImage | None) -> list[int]:
        """Put an adapter, or none, into a slot, and return its row of the table. What lies in
        pinned memory is copied later, on the current stream."""
        slots = self.slots
        if image is None:
            slots.ranks[slot], slots.biased[slot] = (0,) * len(self.sizes), False
            return [0] * self.table_width
        slots.a[slot, : len(image.a)].copy_(image.a, non_blocking=True)
        slots.b[slot, : len(image.b)].copy_(image.b, non_blocking=True)
        if image.bias is not None:
            slots.bias[slot].copy_(image.bias, non_blocking=True)
        slots.ranks[slot] = image.ranks
        slots.biased[slot] = image.bias is not None
        return [*accumulate(image.ranks, initial=0), int(image.bias is not None)]

    @property
    def format_name(self) -> str:
        return self.base.format_name

    def takes(self, rows: int, dtype: torch.dtype) -> CodeFormat | None:
        """Numbers, while a row has an adapter: that multiplies them too."""
        return self.base.takes(rows, dtype) if self.active.batch is None else None

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        batch = self.active.batch
        if batch is None:
            return self.base.multiply(x, bias)
        if x.is_cuda:
            from quire.kernels.triton.adapters.expand import expand

            out, hidden = self._product_and_hidden(x, bias, batch)
            expand(hidden, self.slots, batch, out)
            return out
        out = self.base.multiply(x, bias)
        add_adapters(x, self.slots, batch, out)
        return out

    def add_product(self, x: Tensor, out: Tensor) -> None:
        self.base.add_product(x, out)
        if self.active.batch is not None:
            add_adapters(x, self.slots, self.active.batch, out)

    def multiply_codes(self, x: Codes, bias: Tensor | None) -> Tensor:
        return self.base.multiply_codes(x, bias)

    def gated(
        self, x: Tensor, bias: Tensor | None, backend: Backend, activation: Activation
    ) -> Tensor:
        batch = self.active.batch
        if batch is None:
            return self.base.gated(x, bias, backend, activation)
        if x.is_cuda:
            from quire.kernels.triton.adapters.expand import expand_gated

            product, hidden = self._product_and_hidden(x, bias, batch)
            return expand_gated(hidden, self.slots, batch, product, activation)
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
            return gemv_and_shrink(x, base.weight, bias, self.slots, batch)
        hidden = shrink(x, self.slots, batch)
        return base.multiply(x, bias), hidden

    def rows(self, indices: Tensor) -> Tensor:
        return self.base.rows(indices)

    def weights(self, whole: Weight, rows: slice) -> Iterator[Weight]:
        return self.base.weights(whole, rows)

    def pack(self) -> None:
        self.base.pack()
