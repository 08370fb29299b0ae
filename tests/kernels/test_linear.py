from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.linear import linear


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 32, 64, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_torch(rows, dtype, has_bias):
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 48).to(dtype), torch.randn(80, 48).to(dtype)
    bias = torch.randn(80).to(dtype) if has_bias else None
    expected = F.linear(x, weight, bias)
    torch.testing.assert_close(linear(x, weight, bias), expected, rtol=1e-5, atol=1e-5)
    turned = x.t().contiguous().t()
    torch.testing.assert_close(linear(turned, weight, bias), expected, rtol=1e-5, atol=1e-5)


def test_more_than_two_dimensions():
    x, weight = torch.randn(2, 8, 16), torch.randn(24, 16)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
