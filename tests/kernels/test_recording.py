"""Passes of the CPU's kernels that are recorded and run again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from quire.kernels.numba import NumbaBackend
from quire.kernels.numba.recording import Recording

ROWS, SIZE = 70, 256  # enough for several threads
WEIGHT = torch.linspace(0.5, 1.5, SIZE)


@pytest.fixture
def backend() -> NumbaBackend:
    return NumbaBackend()


def norms(backend: NumbaBackend, stream: Tensor) -> Tensor:
    """Each needs all of the one before it."""
    delta = None
    for _ in range(20):
        delta = backend.add_rms_norm(stream, delta, WEIGHT, 1e-5)
    return backend.add_rms_norm(stream, delta, WEIGHT, 1e-5)


def recorded(
    run: Callable[[NumbaBackend, Tensor], Tensor], stream: Tensor, backend: NumbaBackend
) -> tuple[Recording, Tensor]:
    recording = Recording()
    with recording.record():
        out = run(backend, stream)
    return recording, out


def test_a_replay_computes_from_what_is_there_now(backend: NumbaBackend, threads: int) -> None:
    stream = torch.randn(ROWS, SIZE)
    first = stream.clone()
    recording, out = recorded(norms, stream, backend)
    assert recording.is_whole
    assert torch.equal(out, norms(backend, first))
    for seed in range(5):
        other = torch.randn(ROWS, SIZE, generator=torch.Generator().manual_seed(seed))
        stream.copy_(other)
        recording.replay()
        assert torch.equal(out, norms(backend, other))


def test_its_tensors_take_the_memory_of_those_that_are_gone(backend: NumbaBackend) -> None:
    recording, out = recorded(norms, torch.randn(ROWS, SIZE), backend)
    held = sum(len(piece) for piece in recording.memory.pieces)
    assert held == 2 * out.nbytes  # what a norm reads and what it writes
    del out
    assert len(recording.memory.empty(torch.Size((ROWS, SIZE)), torch.float32)) == ROWS
    assert sum(len(piece) for piece in recording.memory.pieces) == held


def test_what_torch_computes_is_missed(backend: NumbaBackend) -> None:
    def with_sum(backend: NumbaBackend, stream: Tensor) -> Tensor:
        return norms(backend, stream) + 1

    def with_views(backend: NumbaBackend, stream: Tensor) -> Tensor:
        return norms(backend, stream.view(-1).view(ROWS, SIZE))[2:]

    def with_a_type(backend: NumbaBackend, stream: Tensor) -> Tensor:
        return norms(backend, stream).bfloat16()

    def with_an_order(backend: NumbaBackend, stream: Tensor) -> Tensor:
        return norms(backend, stream).t().contiguous()

    for inference in (False, True):
        with torch.inference_mode(inference):
            for run in (with_a_type, with_an_order):
                assert not recorded(run, torch.randn(ROWS, SIZE), backend)[0].is_whole
    assert not recorded(with_sum, torch.randn(ROWS, SIZE), backend)[0].is_whole
    assert recorded(with_views, torch.randn(ROWS, SIZE), backend)[0].is_whole


def test_recording_does_not_import_the_compiler_of_torch() -> None:
    script = """
import sys, torch
from quire.kernels.numba.recording import Recording
recording = Recording()
with torch.inference_mode(), recording.record():
    torch.empty(3, 4).view(12)
assert recording.is_whole
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
