"""Activations written as codes by every backend, held against its own numbers, then quantised."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.activation import Activation
from quire.kernels.codes import CodeFormat, Codes, quantise

FORMS = {
    "by-token": CodeFormat(),
    "in-groups": CodeFormat(128),
    "int8": CodeFormat(dtype=torch.int8),
}
DTYPES = [torch.float16, torch.bfloat16]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> CodeFormat:
    return FORMS[request.param]


def check(subject, got: Codes, wanted: Codes) -> None:
    """The same scales, and codes that differ by a rounding at most."""
    assert got.dtype == wanted.dtype and got.values.dtype == wanted.values.dtype
    assert got.scales.t().is_contiguous() and wanted.scales.t().is_contiguous()
    slack = torch.finfo(got.dtype).eps  # a kernel may round once where torch does twice
    torch.testing.assert_close(got.scales.cpu(), wanted.scales, rtol=slack, atol=1e-7)
    found, right = got.values.cpu().float(), wanted.values.float()
    if got.values.dtype == torch.int8:
        torch.testing.assert_close(found, right, rtol=0, atol=1)
        return
    if subject.is_interpreted:
        # The interpreter forgets the carry where a number is rounded up to a power of two.
        found = torch.where((2 * found - right).abs() <= 0.13 * right.abs(), right, found)
    torch.testing.assert_close(found, right, rtol=0.13, atol=0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5])
class TestEveryBackend:
    @pytest.mark.parametrize("hidden", [384, 1024])
    @pytest.mark.parametrize("has_delta", [False, True])
    def test_the_norm(self, subject, form, rows, hidden, has_delta, dtype):
        torch.manual_seed(rows + hidden)
        stream, weight = torch.randn(rows, hidden).to(dtype), torch.randn(hidden).to(dtype)
        stream[3:4] = 0
        delta = torch.randn(rows, hidden).to(dtype) if has_delta else None
        here, there = (stream.to(subject.device, copy=True) for _ in range(2))
        moved = (None if delta is None else delta.to(subject.device), weight.to(subject.device))
        normed = subject.backend.add_rms_norm(there, *moved, 1e-5)
        got = subject.backend.quantised_norm(here, *moved, 1e-5, form)
        check(subject, got, quantise(normed.cpu(), form))
        assert torch.equal(here, there)

    @pytest.mark.parametrize("features", [256, 1536])
    def test_the_gate(self, subject, form, rows, features, dtype):
        torch.manual_seed(rows + features)
        gate_up = torch.randn(rows, 2 * features).to(dtype).to(subject.device)
        for activation in Activation:
            gated = subject.backend.act_and_mul(gate_up, activation)
            got = subject.backend.quantised_gate(gate_up, activation, form)
            check(subject, got, quantise(gated.cpu(), form))


@pytest.mark.parametrize("columns", [128, 640, 4096])
def test_by_themselves(subject, form, columns):
    if subject.backend.name != "triton":
        pytest.skip("a kernel of Triton's")
    from quire.kernels.triton.codes.quantise import quantise as by_kernel

    x = torch.randn(3, columns + 16).half()[:, :columns]
    x[1] = 0
    check(subject, by_kernel(x.to(subject.device), form), quantise(x, form))


def test_codes_stand_for_numbers_near_those_that_they_were_made_of(form):
    x = torch.randn(7, 512) * torch.logspace(-6, 6, 7)[:, None]
    codes = quantise(x.bfloat16(), form)
    assert len(codes) == 7 and codes.dtype == torch.bfloat16
    assert ((codes.dense() - x).norm(dim=1) < 0.04 * x.norm(dim=1)).all()
