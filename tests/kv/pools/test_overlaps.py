"""Streams at the place of others are found, and interleaved ones are not taken for such."""

from __future__ import annotations

import time
from itertools import combinations, product

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.errors import ConfigError
from quire.kv import LayerPool, SlotPool, streams_of
from quire.kv.pools.overlaps import find_overlap

MEMORY = torch.zeros(4096, dtype=torch.uint8)


@st.composite
def views(draw: st.DrawFn, dtype: torch.dtype = torch.int16) -> Tensor:
    """Any strides, also of views that are at several places twice."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=4))
    strides = draw(st.lists(st.integers(0, 30), min_size=len(sizes), max_size=len(sizes)))
    start = draw(st.integers(0, 60))
    # An odd number of bytes in front: tensors over a buffer may begin anywhere.
    offset = draw(st.integers(0, 3))
    values = torch.frombuffer(MEMORY.numpy().data, dtype=dtype, offset=offset, count=1000)
    return values.as_strided(sizes, strides, start)


def bytes_of(view: Tensor) -> set[int]:
    """One by one."""
    places = product(*(range(size) for size in view.shape))
    firsts = [sum(i * s for i, s in zip(at, view.stride(), strict=True)) for at in places]
    size, start = view.itemsize, view.data_ptr()
    return {start + first * size + byte for first in firsts for byte in range(size)}


@settings(max_examples=examples(2000))
@given(st.lists(views(), max_size=4))
def test_as_byte_by_byte(given_views: list[Tensor]) -> None:
    places = [bytes_of(view) for view in given_views]
    shared = [
        pair for pair in combinations(range(len(places)), 2) if places[pair[0]] & places[pair[1]]
    ]
    found = find_overlap(given_views)
    assert found in shared if shared else found is None


@settings(max_examples=examples(500))
@given(st.permutations(range(5)), st.integers(2, 4), st.integers(0, 200))
def test_alike_and_one_behind_the_other(order: list[int], heads: int, behind: int) -> None:
    """Where all are of one kind, as in a pool, in any order of dimensions."""
    tensor = torch.zeros(1024, dtype=torch.int16)
    sizes = [3, 2, 2, heads, 2]
    strides = [0] * 5
    step = 1
    for dim in order:
        strides[dim], step = step, step * sizes[dim]
    several = tensor.as_strided(sizes, strides, 0).unbind(1)
    assert find_overlap(several) is None
    other = tensor.as_strided(several[0].shape, several[0].stride(), behind)
    shared = bool(bytes_of(several[0]) & bytes_of(other))
    assert find_overlap([several[0], other]) == ((0, 1) if shared else None)


@pytest.mark.parametrize(
    "dims", ["block layer kv token head width", "block token layer kv head width"]
)
def test_hundreds_of_interleaved_streams_take_no_time(dims: str) -> None:
    sizes = {"layer": 100, "kv": 2, "block": 3000, "token": 16, "head": 8, "width": 128}
    names = dims.split()
    # As large as on a GPU, and no byte of it is touched.
    values = torch.empty([sizes[name] for name in names], device="meta")
    layers = values.permute([names.index(name) for name in sizes]).flatten(0, 1)
    memory = torch.zeros(1)
    views = [_Placed(view, memory.data_ptr() + 4 * view.storage_offset()) for view in layers]
    began = time.process_time()
    assert find_overlap(views) is None
    assert time.process_time() - began < 0.1
    views[150] = _Placed(layers[150], views[150].data_ptr() + 4)
    assert find_overlap(views) == (150, 151)


class _Placed:
    """A view as if it were somewhere."""

    def __init__(self, view: Tensor, address: int) -> None:
        self.shape, self.stride, self.itemsize = view.shape, view.stride, view.itemsize
        self.data_ptr = lambda: address


class TestPools:
    def test_values_that_begin_within_keys(self) -> None:
        memory = torch.arange(13824.0)
        keys, values = memory[:9216].view(24, 16, 3, 8), memory[4608:].view(24, 16, 3, 8)
        with pytest.raises(ConfigError, match=r"Streams of layers 0 and 0 .* the same place"):
            LayerPool([(keys, values)])

    def test_slots_of_two_layers(self) -> None:
        memory = torch.zeros(2, 64, 2, 8).view(-1)
        layers = [[memory[at : at + 1024].view(64, 2, 8)] for at in (0, 1023)]
        with pytest.raises(ConfigError, match=r"Streams of layers 0 and 1 .* the same place"):
            SlotPool(layers, block_size=16)

    def test_layers_of_other_shapes(self) -> None:
        memory = torch.zeros(7, 100)
        wide, narrow = memory[:, :64].view(7, 4, 2, 8), memory[:, 64:96].unflatten(1, (4, 1, 8))
        LayerPool([[wide], [narrow]])
        narrow = memory[:, 63:95].unflatten(1, (4, 1, 8))
        with pytest.raises(ConfigError, match=r"Streams of layers 0 and 1 .* the same place"):
            LayerPool([[wide], [narrow]])

    @pytest.mark.parametrize("dims", ["block kv token head width", "block token head kv width"])
    def test_interleaved_ones_are_apart(self, dims: str) -> None:
        LayerPool([streams_of(torch.zeros(2, 3, 4, 5, 6), dims)])

    def test_groups_may_share_memory(self) -> None:
        """Their blocks have other numbers: so layers of vLLM's hybrid models do."""
        layer = [torch.zeros(7, 4, 2, 8)]
        LayerPool([layer, layer], groups=[[0], [1]])
        with pytest.raises(ConfigError, match="Streams of layers 1 and 2 "):
            LayerPool([layer, layer, layer], groups=[[0], [1, 2]])
