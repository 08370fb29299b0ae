"""Long prompts over gathered KV: the lists and the gathering here, the kernel itself on a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

MIXES = [
    pytest.param([(6, 6)], id="one"),
    pytest.param([(9, 150), (1, 7), (5, 5), (2, 3), (131, 131)], id="among-others"),
    pytest.param([(0, 0), (40, 300), (1, 0), (7, 128), (8, 129)], id="edges"),
]


@pytest.fixture
def dense(monkeypatch):
    """Prompts of five tokens are long, and the GPU's kernel is a loop."""
    from quire.kernels.triton import backend
    from quire.kernels.triton.attention import dense

    hopper = type("hopper", (), {"attend": staticmethod(slow_attend)})
    monkeypatch.setitem(sys.modules, "quire.kernels.triton.attention.hopper", hopper)
    monkeypatch.setattr(dense, "is_supported", lambda *_: True)
    for module in (dense, backend):
        monkeypatch.setattr(module, "LEAST", 5)
    return dense


def slow_attend(q, k, v, jobs, group, first_head, scoring, out):
    for row, count, position, start in jobs.tolist():
        for token in range(count):
            seen = slice(start, start + position + token + 1)
            for number in range(len(k) * group):
                head = first_head * group + number
                keys, values = k[number // group, seen].float(), v[number // group, seen].float()
                scores = keys @ q[row + token, head].float() * scoring.scale
                if scoring.sinks is not None:
                    scores = torch.cat((scores, scoring.sinks[head : head + 1]))
                out[row + token, head] = scores.softmax(0)[: len(values)] @ values


def with_sinks(made, has_sinks):
    """Some so high that they outweigh much of what a row sees."""
    return replace(made, sinks=3 * torch.randn(made.q.shape[1])) if has_sinks else made


def backend_here():
    from quire.kernels.triton import TritonBackend

    return TritonBackend()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel itself is tested there")
class TestLists:
    @pytest.mark.diagonal
    @pytest.mark.parametrize("lengths", MIXES)
    @pytest.mark.parametrize("group", [1, 3])
    @pytest.mark.parametrize("has_sinks", [False, True])
    def test_every_row_is_computed_from_its_own_kv(self, dense, step, lengths, group, has_sinks):
        made = with_sinks(step(lengths, group=group, head_dim=64, block_size=16), has_sinks)
        out = made.on("cpu").run(backend_here())
        torch.testing.assert_close(out, made.expected(), rtol=0, atol=1e-5)

    def test_heads_take_turns_where_room_is_short(self, dense, step, monkeypatch):
        monkeypatch.setattr(dense, "ROOM_BYTES", 1)
        made = step([(6, 140), (7, 9)], kv_heads=3)
        out = made.on("cpu").run(backend_here())
        torch.testing.assert_close(out, made.expected(), rtol=0, atol=1e-5)

    def test_behind_the_context_there_are_zeros(self, dense, step):
        """What lies there meets a weight of 0, and would be NaN if it were not a number."""
        made = step([(6, 140)])
        plan = dense.gather_plan(made.batch, made.q, made.pages)
        k, v = torch.full((2, 2, plan.rows, 16), torch.nan)
        batch = made.batch
        dense.gather(made.pages, batch.block_tables, batch.context_lens, plan.pieces, 0, k, v)
        assert plan.rows == 256
        assert not k[:, 140:].any() and not v[:, 140:].any()

    def test_the_longest_walk_comes_first(self, dense, step):
        made = step([(300, 300), (200, 900)], group=4, kv_heads=1)
        positions = dense.gather_plan(made.batch, made.q, made.pages).jobs[:, 2].tolist()
        assert positions == sorted(positions, reverse=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("group", "head_dim", "has_sinks"), [(4, 128, False), (3, 64, False), (8, 64, True)]
)
def test_the_same_as_over_pages(step, monkeypatch, dtype, group, head_dim, has_sinks):
    from quire.kernels.triton import backend

    lengths = [(4096, 4096), (1, 700), (4500, 7001), (300, 900), (4097, 4200)]
    made = step(lengths, group=group, head_dim=head_dim, block_size=16, dtype=dtype)
    made = with_sinks(made, has_sinks).on("cuda")
    out = made.run(backend_here())
    monkeypatch.setattr(backend, "LEAST", 10**6)
    paged = made.run(backend_here())
    torch.testing.assert_close(out, paged, rtol=1e-2, atol=1e-2)
