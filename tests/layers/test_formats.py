"""Formats: matrices of different ones are stacked, and multiply as one; models store by name."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.reference import ReferenceBackend
from quire.layers.formats import Dense, MatrixFormat, StackedMatrix, stacked
from quire.layers.linear import ColumnLinear, Output
from quire.layers.matrix import DenseMatrix, Matrix
from quire.layers.tp import SINGLE
from quire.layers.weights import make_room, room_needed


@dataclass(frozen=True)
class Named:
    """A dense format that is equal only to those of the same name."""

    name: str

    def matrix(self, out_features: int, in_features: int) -> Matrix:
        return DenseMatrix(out_features, in_features)


@dataclass(frozen=True)
class ByName:
    """Every layer in a format of its own name, or in that of a fused tensor."""

    fused: bool

    def of(self, *names: str) -> MatrixFormat:
        return Named(names[-1] if self.fused else names[0])


def qkv(formats: ByName) -> tuple[ColumnLinear, dict[str, Tensor]]:
    outputs = [Output("q_proj", 8), Output("k_proj", 4), Output("v_proj", 4)]
    layer = ColumnLinear(16, outputs, bias=True, tp=SINGLE, fused="qkv_proj")
    layer.store_in(formats, "layers.0.qkv")
    make_room(layer, torch.float32, torch.device("cpu"))
    given = {}
    for weight in layer.weights("layers.0.qkv"):
        given[weight.name] = torch.randn(weight.shape)
        weight.fill(given[weight.name])
    return layer, given


@pytest.mark.parametrize("fused", [False, True])
def test_parts_of_different_formats_multiply_as_one(fused: bool) -> None:
    layer, given = qkv(ByName(fused))
    assert isinstance(layer.matrix, DenseMatrix if fused else StackedMatrix)
    names = [f"layers.0.{part}_proj" for part in "qkv"]
    whole = torch.cat([given[f"{name}.weight"] for name in names])
    bias = torch.cat([given[f"{name}.bias"] for name in names])
    x = torch.randn(3, 16)
    torch.testing.assert_close(layer(x), F.linear(x, whole, bias))


def test_a_stack_is_gated() -> None:
    matrix = stacked([Named("gate"), Named("up")], [8, 8], 16)
    assert isinstance(matrix, StackedMatrix)
    for part in matrix.parts:
        part.make_room(torch.float32, torch.device("cpu"))
        part.weight.normal_()
    x = torch.randn(2, 16)
    for activation in Activation:
        gate, up = (part.multiply(x, None) for part in matrix.parts)
        found = matrix.gated(x, None, ReferenceBackend(), activation)
        torch.testing.assert_close(found, activation(gate) * up)


def test_equal_formats_are_one_matrix() -> None:
    assert isinstance(stacked([Dense(), Dense()], [8, 4], 16), DenseMatrix)
    mixed = stacked([Named("qk"), Named("qk"), Named("v")], [8, 4, 4], 16)  # as Q4_K_M has them
    assert isinstance(mixed, StackedMatrix)
    assert [part.out_features for part in mixed.parts] == [12, 4]


def test_room_is_counted_before_it_is_taken() -> None:
    layer, _ = qkv(ByName(fused=True))
    assert room_needed(layer, torch.bfloat16) == 2 * (16 * 16 + 16)
