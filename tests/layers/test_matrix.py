"""Matrices alone: products, gates and rows against torch, packed for a CPU or not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.activation import Activation
from quire.kernels.backend import Backend, backend_for
from quire.kernels.reference import ReferenceBackend
from quire.layers.matrix import DenseMatrix

BACKENDS = [ReferenceBackend(), backend_for(torch.device("cpu"))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_products_and_gates_equal_torch(backend: Backend, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    matrix = DenseMatrix(64, 32)
    matrix.make_room(dtype, torch.device("cpu"))
    matrix.weight.normal_()
    x, bias = torch.randn(rows, 32, dtype=dtype), torch.randn(64, dtype=dtype)
    product = F.linear(x.float(), matrix.weight.float(), bias.float())
    gate, up = product.chunk(2, dim=-1)
    wanted = {
        Activation.SILU: F.silu(gate) * up,
        Activation.GELU_TANH: F.gelu(gate, approximate="tanh") * up,
    }
    near = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.5}
    for is_packed in (False, True):
        if is_packed:
            matrix.pack()
        torch.testing.assert_close(matrix.multiply(x, bias).float(), product, **near)
        for activation, gated in wanted.items():
            found = matrix.gated(x, bias, backend, activation)
            torch.testing.assert_close(found.float(), gated, **near)
    assert torch.equal(matrix.rows(torch.tensor([3, 60])), matrix.weight[[3, 60]])
