"""What happens to each token by itself: every backend against the formula, in float64."""

from __future__ import annotations

import pytest
import torch
from activations import EXACT
from torch import Tensor

from quire.kernels.plain import HeadScale, Rotation, rotate

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROWS = [1, 2, 33, 300]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Two roundings of the dtype, for a fused kernel may round once where torch does twice."""
    eps = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    return {"rtol": eps, "atol": eps}


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def exact_rotation(x: Tensor, rotation: Rotation) -> Tensor:
    return rotate(x.double(), Rotation(rotation.cos.double(), rotation.sin.double()))


def check(out: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(out.cpu().double(), wanted, **tolerance(out.dtype))


def check_one_rounding(subject, out: Tensor, wanted: Tensor) -> None:
    """Closer than two roundings would be; interpreted, bfloat16 is cut off, not rounded."""
    eps = torch.finfo(out.dtype).eps
    cut_off = subject.is_interpreted and out.dtype == torch.bfloat16
    rtol = 1e-5 if out.dtype == torch.float32 else eps if cut_off else 0.501 * eps
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestNorm:
    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize("hidden", [96, 576, 4096])
    def test_adds_and_normalises(self, subject, rows, hidden, dtype):
        if subject.is_interpreted and rows * hidden > 100_000:
            pytest.skip("too slow interpreted")
        torch.manual_seed(rows)
        stream, delta = torch.randn(2, rows, hidden).to(dtype)
        weight = torch.randn(hidden).to(dtype)
        total = stream + delta
        on_device = stream.to(subject.device, copy=True)
        out = subject.backend.add_rms_norm(
            on_device, delta.to(subject.device), weight.to(subject.device), 1e-5
        )
        if subject.is_interpreted and dtype == torch.bfloat16:  # which it cuts off, not rounds
            check(on_device, total.double())
            total = on_device
        assert torch.equal(on_device.cpu(), total)
        check(out, exact_norm(total, weight, 1e-5))

    @pytest.mark.parametrize("rows", [1, 33])
    def test_with_a_weight_in_float32_rounds_once(self, subject, rows, dtype):
        stream = torch.randn(rows, 576).to(dtype)
        weight = 1 + torch.randn(576) * 0.1
        on_device = stream.to(subject.device, copy=True)
        out = subject.backend.add_rms_norm(on_device, None, weight.to(subject.device), 1e-5)
        check_one_rounding(subject, out, exact_norm(stream, weight, 1e-5))

    @pytest.mark.parametrize("scale", [1e-4, 300.0])
    def test_without_a_delta_the_stream_stays(self, subject, scale, dtype):
        stream = (torch.randn(5, 96) * scale).to(dtype).to(subject.device)
        before = stream.clone()
        weight = torch.ones(96, dtype=dtype, device=subject.device)
        out = subject.backend.add_rms_norm(stream, None, weight, 1e-6)
        assert torch.equal(stream, before)
        check(out, exact_norm(before.cpu(), weight.cpu(), 1e-6))

    def test_no_row_is_divided_by_zero(self, subject, dtype):
        zeros = torch.zeros(2, 96, dtype=dtype, device=subject.device)
        weight = torch.ones(96, dtype=dtype, device=subject.device)
        assert torch.equal(subject.backend.add_rms_norm(zeros, None, weight, 1e-5), zeros)

    def test_no_rows(self, subject, dtype):
        empty = torch.empty(0, 96, dtype=dtype, device=subject.device)
        weight = torch.ones(96, dtype=dtype, device=subject.device)
        assert subject.backend.add_rms_norm(empty, empty, weight, 1e-5).shape == (0, 96)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestGate:
    @pytest.mark.parametrize("rows", [0, *ROWS])
    @pytest.mark.parametrize("features", [24, 1536])
    def test_every_activation(self, subject, rows, features, dtype):
        if subject.is_interpreted and rows > 33:
            pytest.skip("too slow interpreted")
        gate_up = (torch.randn(rows, 2 * features) * 4).to(dtype)
        gate, up = gate_up.double().chunk(2, dim=-1)
        for activation, exact in EXACT.items():
            out = subject.backend.act_and_mul(gate_up.to(subject.device), activation)
            check(out, exact(gate) * up)

    def test_large_numbers_do_not_overflow(self, subject, dtype):
        gate_up = torch.tensor([[-200.0, 200.0, 0.0, 2.0, 2.0, 2.0]], dtype=dtype)
        for activation in EXACT:
            out = subject.backend.act_and_mul(gate_up.to(subject.device), activation).cpu()
            assert out.tolist() == [[0.0, 400.0, 0.0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
class TestRotation:
    @pytest.mark.parametrize(
        ("group", "head_dim", "v_dim"),
        [
            (1, 16, None),
            (3, 64, None),
            (1, 80, None),
            (3, 96, None),
            (3, 128, None),
            (1, 192, 128),
            (2, 256, None),
        ],
    )
    def test_turns_and_writes(self, subject, step, normed, head_dim, v_dim, group, dtype):
        lengths = [(1, 9), (6, 6), (1, 0), (3, 19)]
        made = step(lengths, group=group, head_dim=head_dim, v_dim=v_dim, dtype=dtype)
        features = torch.cat([part.flatten(1) for part in (made.q, made.k, made.v)], dim=1)
        tokens, heads, kv_heads = len(features), made.q.shape[1], made.k.shape[1]
        angles = torch.rand(tokens, 1, head_dim // 2) * 6
        cos, sin = angles.cos(), angles.sin()
        rotation = Rotation(
            torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)
        )
        scale = None
        qk = torch.cat((made.q, made.k), dim=1).double()
        if normed:
            scale = HeadScale(torch.randn(heads + kv_heads, head_dim).to(dtype), 1e-6)
            qk = exact_norm(qk, scale.weight, scale.eps).to(dtype)
        wanted_q, wanted_k = exact_rotation(qk, rotation).split((heads, kv_heads), dim=1)

        here = made.on(subject.device)
        if scale is not None:
            scale = scale._replace(weight=scale.weight.to(subject.device))
        subject.backend.begin(here.batch)
        q = subject.backend.rotate_and_write(
            features.to(subject.device),
            scale,
            Rotation(*(part.to(subject.device) for part in rotation)),
            here.pages,
            here.batch,
        )
        close = {name: 2 * value for name, value in tolerance(dtype).items()}
        torch.testing.assert_close(q.cpu().double(), wanted_q, **close)
        self.check_cache(here.on("cpu"), made, wanted_k, close)

    def check_cache(self, after, made, wanted_k, close):
        """Each slot has its token, and no other slot has changed."""
        wanted = made.on("cpu")
        for token, slot in enumerate(made.batch.slot_mapping.tolist()):
            if slot >= 0:
                block, offset = divmod(slot, made.block_size)
                wanted.pages.k[block, :, offset] = wanted_k[token].to(made.k.dtype)
                wanted.pages.v[block, :, offset] = made.v[token]
        torch.testing.assert_close(after.cache, wanted.cache, equal_nan=True, **close)
        assert torch.equal(after.pages.v.nan_to_num(7.0), wanted.pages.v.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_norms_in_float32_round_once(subject, step, dtype):
    made = step([(3, 4), (1, 9)], group=2, head_dim=64, dtype=dtype)
    features = torch.cat([part.flatten(1) for part in (made.q, made.k, made.v)], dim=1)
    heads = made.q.shape[1]
    weight = 1 + torch.randn(heads + made.k.shape[1], 64) * 0.1
    cos = torch.ones(len(features), 1, 64, dtype=dtype, device=subject.device)
    here = made.on(subject.device)
    subject.backend.begin(here.batch)
    q = subject.backend.rotate_and_write(
        features.to(subject.device),
        HeadScale(weight.to(subject.device), 1e-6),
        Rotation(cos, torch.zeros_like(cos)),
        here.pages,
        here.batch,
    )
    check_one_rounding(subject, q, exact_norm(made.q, weight[:heads], 1e-6))
