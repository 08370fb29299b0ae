"""Small copies by a kernel: every byte of every size, in both directions, in order with kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.runner import transfer
from quire.runner.transfer import Fetch, all_to_device, to_device

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True, params=["engines", "kernels"])
def way(request, monkeypatch):
    monkeypatch.setattr(transfer, "_engines_are_busy", request.param == "kernels")


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.uint8, np.bool_])
@pytest.mark.parametrize("count", [0, 1, 3, 1024, 8191, 100_003])
def test_there_and_back(dtype, count):
    values = np.random.default_rng(0).integers(0, 2, count).astype(dtype)
    there = to_device(values, DEVICE)
    assert there.is_cuda and there.shape == (count,)
    assert np.array_equal(Fetch(there).wait(), values)


def test_parts_of_tensors():
    there = to_device(np.arange(40).reshape(4, 10), DEVICE)
    assert Fetch(there[:, 3]).wait().tolist() == [3, 13, 23, 33]


def test_several_at_once():
    arrays = [np.arange(5, dtype=np.int32), np.arange(12, dtype=np.int64).reshape(3, 4)]
    for array, there in zip(arrays, all_to_device(arrays, DEVICE), strict=True):
        assert np.array_equal(there.cpu().numpy(), array)


def test_memory_that_is_dropped_is_not_given_to_others_while_a_copy_may_use_it():
    torch.cuda._sleep(200_000_000)  # all that follows is queued behind this
    fetches = [Fetch(torch.full((1000,), i, device=DEVICE)) for i in range(50)]
    kept = fetches[::2]
    del fetches
    for _ in range(50):  # would take dropped memory, if it could
        to_device(np.full(1000, -1, dtype=np.int64), DEVICE)
    for i, fetch in enumerate(kept):
        assert (fetch.wait() == 2 * i).all()
