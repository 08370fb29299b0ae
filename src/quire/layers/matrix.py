"""How a matrix of a model is stored, filled from a checkpoint, and multiplied.

A `Linear` says which part of the checkpoint's matrices this rank holds; its `Matrix` says what the
tensors of those are called, what lies in memory, and what multiplies it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.backend import Backend
from quire.kernels.codes import Codes
from quire.kernels.experts import PackedExperts
from quire.kernels.gguf_product import ACTIVATION_BITS
from quire.kernels.linear import PackedMatrix, add_linear, is_few, linear, pack, pack_experts
from quire.layers.weights import Block, TensorPlace, Weight, parameter, span, view

if TYPE_CHECKING:  # there may be no Numba
    from quire.kernels.numba.float_product import FloatProduct


class Matrix(Block):
    """`[out_features, in_features]`, this rank's part of one or several checkpoint matrices.

    `make_room` gives it the memory that its format takes.
    """

    out_features: int
    in_features: int
    multiplies_codes = False  # on a CPU: by activations of so many bits, told before `make_room`
    activation_bits = ACTIVATION_BITS
    own_tokens = False  # an expert's: it may be given no tokens of others
    fills_columns = False  # on a GPU: `multiply_into` is no copy

    @property
    def format_name(self) -> str:
        """How its numbers are stored, in words."""
        raise NotImplementedError

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[tokens, in_features]` to `[tokens, out_features]`."""
        raise NotImplementedError

    def multiply_into(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """The same into columns of a tensor."""
        out.copy_(self.multiply(x, bias))

    def add_product(self, x: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """Add the product to `out`."""
        out.add_(self.multiply(x, bias))

    def adds_at_once(self, x: Tensor, out: Tensor) -> bool:
        """Whether that is one launch, which rounds the product before it adds it."""
        return False

    def multiply_codes(self, x: Codes, bias: Tensor | None) -> Tensor:
        """The same of codes, which a matrix only gets if it `takes` them."""
        raise NotImplementedError

    def gated(
        self, x: Tensor, bias: Tensor | None, backend: Backend, activation: Activation
    ) -> Tensor:
        """`activation(first) * second` of a product whose two halves are alike."""
        raise NotImplementedError

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the matrix, as an embedding reads them."""
        raise NotImplementedError

    def weights(self, whole: Weight, rows: slice) -> Iterator[Weight]:
        """The tensors that fill `rows` of this matrix.

        `whole` describes the checkpoint's matrix without a place: its name (to which a format adds
        its endings), its shape, and this rank's part of it.
        """
        raise NotImplementedError

    def part(self, rows: range) -> Matrix:
        """Some rows as a matrix of their own, in this one's memory; after `make_room`."""
        part = copy(self)
        part.out_features = len(rows)
        part._parameters = {
            name: whole if whole is None else view(whole[self.stored_rows(name, rows)])
            for name, whole in self._parameters.items()
        }
        part.__dict__.update(part._parameters)  # where those of a frozen matrix are
        return part

    def stored_rows(self, name: str, rows: range) -> slice:
        """Where the parameter `name` has what belongs to these rows."""
        return span(rows)

    def lay_out(self) -> None:
        """Put what was loaded in the order that the device's kernels read, if that is another."""

    def lay_out_experts(self, experts: Sequence[Matrix]) -> bool:
        """The same of the matrices of experts, which are parts of this one, in the order that
        grouped products read; whether the format has one."""
        return False

    def as_experts(self, count: int) -> PackedExperts | None:
        """This matrix as grouped products take those of `count` experts, if they do."""
        return None

    def pack(self) -> None:
        """Keep a second copy in the order that a CPU's kernels read, if the format has a use."""

    def pack_experts(self, count: int) -> bool:
        """The same of the matrices of `count` experts, which are parts of this one; whether it has
        a use."""
        return False

    @property
    def interleaved_experts(self) -> FloatProduct | None:
        """That copy, where grouped products of a CPU read it."""
        return None

    @property
    def packed_bytes(self) -> int:
        """What the copy takes."""
        return 0


class DenseMatrix(Matrix):
    """One number a weight, in the type that the model computes in."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        self.weight = parameter(out_features, in_features)
        self._packed: PackedMatrix | None = None
        self._packed_experts: FloatProduct | None = None

    @property
    def format_name(self) -> str:
        return "dense"

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, self.weight, bias, self._packed)

    def add_product(self, x: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        add_linear(x, self.weight, bias, self._packed, out)

    def adds_at_once(self, x: Tensor, out: Tensor) -> bool:
        return is_few(x, self.weight) and out.is_contiguous()

    def gated(
        self, x: Tensor, bias: Tensor | None, backend: Backend, activation: Activation
    ) -> Tensor:
        return backend.gated_linear(x, self.weight, bias, self._packed, activation)

    def rows(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.weight)

    def weights(self, whole: Weight, rows: slice) -> Iterator[Weight]:
        yield whole.placed(TensorPlace(self.weight[rows]), ".weight")

    def pack(self) -> None:
        self._packed = pack(self.weight)

    def pack_experts(self, count: int) -> bool:
        self._packed_experts = pack_experts(self.weight.view(count, -1, self.in_features))
        return self._packed_experts is not None

    @property
    def interleaved_experts(self) -> FloatProduct | None:
        return self._packed_experts

    @property
    def packed_bytes(self) -> int:
        copies = (self._packed, self._packed_experts)
        return sum(copy.nbytes for copy in copies if copy is not None)
