"""The host memory of images: a GPU's engine goes on while it is pinned."""

from __future__ import annotations

import threading

import pytest
import torch

from quire.kv.tiers.memory import PIECE_BYTES, HostMemory

IMAGE = 1 << 20


def test_all_slots_are_ready_at_once_where_nothing_is_pinned() -> None:
    memory, ready = HostMemory(IMAGE, 5, pinned=False), []
    memory.make_ready(ready.extend)
    assert ready == [0, 1, 2, 3, 4] and memory.is_ready
    memory.close()


def test_pinning_stops_where_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr("quire.kv.tiers.memory.ThreadPoolExecutor.submit", submit)
    assert not HostMemory(IMAGE, 5, pinned=False)._register(range(5))


@pytest.mark.gpu
def test_graphs_are_recorded_while_memory_is_pinned() -> None:
    """vLLM records its steps right behind `register_kv_caches`, and gave up: CUDA ends a recording
    when another thread pins memory, unless that thread says that it may."""
    torch.zeros(8, device="cuda").add_(1)  # what recording needs is there
    memory, pieces, graphs = HostMemory(IMAGE, 4 * PIECE_BYTES // IMAGE, pinned=True), [], 0
    has_begun = threading.Event()

    def ready(piece: range) -> None:
        pieces.append(piece)
        has_begun.set()

    memory.make_ready(ready)
    assert has_begun.wait(60)
    while not memory.is_ready or graphs == 0:
        graph, numbers = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
        with torch.cuda.graph(graph, capture_error_mode="global"):
            for _ in range(500):
                numbers.add_(1)
        graph.replay()
        assert numbers.tolist() == [500.0] * 8
        graphs += 1
    assert sum(map(len, pieces)) == memory.num_slots
    memory.close()
