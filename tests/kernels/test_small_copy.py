"""Small copies by a kernel: every byte of every size, in both directions, in order with kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.runner.transfer import HostLink

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


@pytest.fixture(params=["engines", "kernels"])
def link(request):
    return HostLink(by_kernels=request.param == "kernels")


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.uint8, np.bool_])
@pytest.mark.parametrize("count", [0, 1, 3, 1024, 8191, 100_003])
def test_there_and_back(link, dtype, count):
    values = np.random.default_rng(0).integers(0, 2, count).astype(dtype)
    there = link.to_device(values, DEVICE)
    assert there.is_cuda and there.shape == (count,)
    assert np.array_equal(link.fetch(there).wait(), values)


def test_parts_of_tensors(link):
    there = link.to_device(np.arange(40).reshape(4, 10), DEVICE)
    assert link.fetch(there[:, 3]).wait().tolist() == [3, 13, 23, 33]


def test_several_at_once(link):
    arrays = [np.arange(5, dtype=np.int32), np.arange(12, dtype=np.int64).reshape(3, 4)]
    for array, there in zip(arrays, link.all_to_device(arrays, DEVICE), strict=True):
        assert np.array_equal(there.cpu().numpy(), array)


def test_memory_that_is_dropped_is_not_given_to_others_while_a_copy_may_use_it(link):
    torch.cuda._sleep(200_000_000)  # all that follows is queued behind this
    fetches = [link.fetch(torch.full((1000,), i, device=DEVICE)) for i in range(50)]
    kept = fetches[::2]
    del fetches
    for _ in range(50):  # would take dropped memory, if it could
        link.to_device(np.full(1000, -1, dtype=np.int64), DEVICE)
    for i, fetch in enumerate(kept):
        assert (fetch.wait() == 2 * i).all()
