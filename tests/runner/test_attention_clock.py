"""Attention is timed now and then, and never in between."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.backend import backend_for
from quire.runner.attention_clock import AttentionClock


class Sleeper:
    """Stands for a backend whose attention is one matrix product."""

    name = "sleeper"

    def paged_attention(self, q, pages, batch, scoring):
        return q @ q


def attend(backend, device):
    return backend.paged_attention(torch.ones(64, 64, device=device), None, None, None)


def test_one_step_of_many():
    noted = []
    clock, plain = AttentionClock(torch.device("cpu"), noted.append, every=3600), Sleeper()
    first = clock.over(plain)
    assert first is not plain and first.name == "sleeper"
    for _ in range(3):  # the layers of the step
        assert attend(first, "cpu")[0, 0] == 64
    assert len(noted) == 3 and all(seconds > 0 for seconds in noted)
    assert clock.over(plain) is plain


def test_attention_with_its_rotation_is_timed_where_it_is_computed():
    class Both(Sleeper):
        def rotate_and_attend(self, qkv, rotation, pages, batch, scoring):
            return qkv

    noted = []
    clock = AttentionClock(torch.device("cpu"), noted.append, every=0.0)
    for qkv, times in ((None, 0), (torch.ones(1), 1)):
        assert clock.over(Both()).rotate_and_attend(qkv, None, None, None, None) is qkv
        assert len(noted) == times


def test_a_timed_backend_is_one_in_all_other_respects():
    backend = backend_for(torch.device("cpu"))
    timed = AttentionClock(torch.device("cpu"), lambda _: None).over(backend)
    names = [name for name in dir(backend) if not name.startswith("_")]
    assert all(hasattr(timed, name) for name in names)


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits():
    noted = []
    device = torch.device("cuda")
    clock, plain = AttentionClock(device, noted.append, every=0.0), Sleeper()
    attend(clock.over(plain), device)
    torch.cuda.synchronize()
    clock.over(plain)  # the next step reads what the last one took
    assert len(noted) == 1 and 0 < noted[0] < 60
