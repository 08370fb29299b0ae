from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.kernels.linear import add_linear, linear, linear_in_float32, pack


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 32, 65, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(80, 48), (33, 7), (1, 1)])
def test_packed_and_plain_equal_torch(rows, dtype, has_bias, shape):
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, shape[1]).to(dtype), torch.randn(shape).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if has_bias else None
    expected = F.linear(x, weight, bias)
    for packed in (pack(weight), None):
        for each in (x, x.t().contiguous().t()):
            got = linear(each, weight, bias, packed)
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_packing_leaves_the_weight_alone():
    weight = torch.randn(64, 32)
    before = weight.clone()
    packed = pack(weight)
    weight[0] = 5.0
    assert torch.equal(before[1:], weight[1:])
    if packed is not None:  # a copy: what was packed does not follow the weight
        torch.testing.assert_close(
            linear(torch.eye(32), weight, None, packed), before.t(), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("rows", [1, 2, 5, 300])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_not_rounded(rows: int, device: str) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 512, device=device).bfloat16() for n in (rows, 48))
    out = linear_in_float32(x, weight)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 300])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_added_to_what_is_there(rows: int, device: str, has_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 64, device=device), torch.randn(48, 64, device=device)
    before = torch.randn(rows, 48, device=device)
    out = before.clone()
    bias = torch.randn(48, device=device) if has_bias else None
    add_linear(x, weight, bias, pack(weight), out)
    wanted = before + F.linear(x, weight, bias)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
