"""Memory of large tensors, which is kept for the next ones."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from torch import Tensor

from quire.kernels import lent_memory
from quire.kernels.lent_memory import LARGE, empty
from quire.runner.device import free_cached_memory

ROWS = LARGE // 1024  # of 1 KiB


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[int, Tensor]:
    fresh = lent_memory._OfThread()
    monkeypatch.setattr(lent_memory, "_of_thread", fresh)
    return fresh.pieces.free


def of(rows: int, value: float = 0.0) -> Tensor:
    return empty((rows, 256), torch.float32).fill_(value)


def test_memory_is_that_of_the_last_tensor_once_all_views_are_gone() -> None:
    first = of(ROWS, 1.0)
    place, view = first.data_ptr(), first[5:, ::2]
    del first
    other = of(ROWS, 2.0)
    assert other.data_ptr() != place and (view == 1.0).all()
    del view
    assert of(ROWS - 3).data_ptr() != place  # too small to be lent
    smaller = empty((ROWS, 2, 256), torch.bfloat16)
    assert smaller.data_ptr() == place and smaller.shape == (ROWS, 2, 256)


def test_small_tensors_are_those_of_torch(kept: dict[int, Tensor]) -> None:
    small = of(ROWS - 1)
    del small
    assert not kept
    assert empty((0, 7), torch.int64).shape == (0, 7)


def test_no_two_tensors_have_the_same_memory() -> None:
    r, live = random.Random(0), {}
    for number in range(400):
        if len(live) == 4 or (live and r.random() < 0.5):
            value = r.choice(list(live))
            assert (live.pop(value) == value).all()
        else:
            live[number] = of(ROWS + r.randrange(40), float(number))
    assert all((tensor == value).all() for value, tensor in live.items())


@pytest.mark.parametrize("largest", [2, 64])
def test_little_more_is_held_than_was_needed_at_once(kept: dict[int, Tensor], largest: int) -> None:
    r, most = random.Random(0), 0
    live: list[Tensor] = []
    for _ in range(1000):
        if len(live) == 6 or (live and r.random() < 0.5):
            del live[r.randrange(len(live))]
        else:
            live.append(empty((r.randint(LARGE, largest * LARGE),), torch.uint8))
        held = sum(tensor.nbytes for tensor in live)
        most = max(most, held)
        assert held + sum(piece.nbytes for piece in kept.values()) <= 4 * most


def test_a_prompt_needs_no_memory_that_the_one_before_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def pass_() -> None:
        hidden = of(2 * ROWS)
        for _ in range(3):
            gate, up = of(6 * ROWS), of(3 * ROWS)
            hidden = of(2 * ROWS)
            del gate, up
        assert hidden.shape

    pass_()
    monkeypatch.setattr(torch, "empty", None)
    pass_()


def test_what_is_free_is_given_back_whoever_had_it(kept: dict[int, Tensor]) -> None:
    held, elsewhere = of(ROWS, 1.0), []

    def use() -> None:
        of(ROWS)
        elsewhere.append(lent_memory._of_thread.pieces)

    thread = threading.Thread(target=use)
    thread.start()
    of(3 * ROWS)
    thread.join()
    assert kept and elsewhere[0].free
    free_cached_memory()
    assert not kept and not elsewhere[0].free and (held == 1.0).all()


def test_another_thread_may_be_the_last_to_hold_a_tensor(kept: dict[int, Tensor]) -> None:
    held = [of(ROWS)]
    place = held[0].data_ptr()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert of(ROWS).data_ptr() == place


def test_each_thread_has_its_own() -> None:
    place, found = of(ROWS).data_ptr(), []
    thread = threading.Thread(target=lambda: found.append(of(ROWS)))
    thread.start()
    thread.join()
    assert found[0].data_ptr() != place
