"""A norm with a small product in one launch, against both of them by themselves."""

from __future__ import annotations

import pytest
import torch

HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("is_float32", [False, True])  # the norm's weight, and the products
@pytest.mark.parametrize("hidden", [96, 2880])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_it_is_both(triton_device, rows, is_float32, hidden, dtype):
    from quire.kernels.triton.norm import add_rms_norm
    from quire.kernels.triton.norm_products import norm_products

    torch.manual_seed(rows)
    features, wide = 5, torch.float32 if is_float32 else dtype
    stream = torch.randn(rows, hidden).to(triton_device, dtype)
    weight = (1 + torch.randn(hidden) / 10).to(triton_device, wide)
    matrix = (torch.randn(features, hidden) * hidden**-0.5).to(triton_device, dtype)
    bias = None if is_float32 else torch.randn(features).to(triton_device, dtype)
    before = stream.clone()
    found = norm_products(stream, weight, 1e-5, matrix, bias, wide)
    assert found is not None
    x, products = found
    assert torch.equal(stream, before)
    assert torch.equal(x, add_rms_norm(stream, None, weight, 1e-5))
    right = x.double() @ matrix.double().T + (0 if bias is None else bias.double())
    assert products.dtype == wide
    close = 1e-5 if is_float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(products.double(), right, atol=close, rtol=close)


@pytest.mark.parametrize(("rows", "features"), [(3, 5), (1, 300), (0, 5)])
def test_what_two_launches_do(triton_device, rows, features):
    from quire.kernels.triton.norm_products import norm_products

    stream = torch.zeros(rows, 32, dtype=torch.float16, device=triton_device)
    matrix = torch.zeros(features, 32, dtype=torch.float16, device=triton_device)
    assert norm_products(stream, stream.new_ones(32), 1e-5, matrix, None, stream.dtype) is None
