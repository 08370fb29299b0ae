"""RMS norms against the formula, and against transformers' rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from quire.kernels.plain import rms_norm
from quire.kernels.reference import ReferenceBackend
from quire.layers.norm import HeadNorm, RMSNorm

PLAIN = ReferenceBackend()


def transformers_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    norm = LlamaRMSNorm(len(weight), eps).to(x.dtype)
    with torch.no_grad():
        norm.weight.copy_(weight)
        out: Tensor = norm(x)
        return out


def make(size: int, dtype: torch.dtype, eps: float = 1e-5) -> RMSNorm:
    norm = RMSNorm(size, eps).to(dtype)
    norm.weight.normal_()
    return norm


@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("rows", [1, 33])
def test_float32_equals_transformers(rows: int, scale: float) -> None:
    x = torch.randn(rows, 96) * scale
    norm = make(96, torch.float32)
    wanted = transformers_norm(x, norm.weight, norm.eps)
    torch.testing.assert_close(norm(x, None, PLAIN), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_as_transformers_does(dtype: torch.dtype) -> None:
    x = torch.randn(64, 96, dtype=dtype)
    norm = make(96, dtype)
    wanted = transformers_norm(x, norm.weight, norm.eps)
    same = norm(x, None, PLAIN) == wanted
    assert same.float().mean() > 0.999
    torch.testing.assert_close(norm(x, None, PLAIN), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_unit_offset_loses_nothing(dtype: torch.dtype) -> None:
    """Of `1 + w` in the model's own type, a bfloat16 would keep two digits."""
    theirs = Gemma2RMSNorm(96, 1e-6).to(dtype)
    with torch.no_grad():
        theirs.weight.normal_(std=0.01)
    norm = RMSNorm(96, 1e-6, unit_offset=True)
    norm.make_room(dtype, torch.device("cpu"))
    (weight,) = norm.weights("norm")
    weight.fill(theirs.weight)
    x = torch.randn(64, 96).to(dtype)
    wanted = theirs(x)
    assert (norm(x, None, PLAIN) == wanted).float().mean() > 0.999 or dtype == torch.float32
    torch.testing.assert_close(norm(x, None, PLAIN), wanted)


def test_delta_is_added_to_the_stream_in_place() -> None:
    stream, delta = torch.randn(3, 96), torch.randn(3, 96)
    total = stream + delta
    norm = make(96, torch.float32)
    out = norm(stream, delta, PLAIN)
    torch.testing.assert_close(stream, total, rtol=0, atol=0)
    torch.testing.assert_close(out, norm(total, None, PLAIN))


def test_no_row_is_divided_by_zero() -> None:
    assert torch.equal(make(96, torch.float32)(torch.zeros(2, 96), None, PLAIN), torch.zeros(2, 96))


def test_head_norm_weighs_q_and_k_apart() -> None:
    norm = HeadNorm(4, 2, 16, 1e-6)
    q_weight, k_weight = torch.randn(16), torch.randn(16)
    for weight in norm.weights("attn.qk_norm"):
        given = {"attn.q_norm.weight": q_weight, "attn.k_norm.weight": k_weight}[weight.name]
        weight.fill(given)
    qkv = torch.randn(5, 8, 16)
    out = rms_norm(qkv[:, :6], *norm.scale)
    torch.testing.assert_close(out[:, :4], transformers_norm(qkv[:, :4], q_weight, 1e-6))
    torch.testing.assert_close(out[:, 4:], transformers_norm(qkv[:, 4:6], k_weight, 1e-6))
