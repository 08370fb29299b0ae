"""Pools of different layouts: images are the same bytes, however they lie on the device."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S
from pool_layouts import ALL_PAIRS, DTYPES, LAYOUTS, LaidOut, Shape, lay_out

from quire.errors import ConfigError, KVError
from quire.kv import LayerPool, Namespace, SlotPool, open_store, streams_of

NUM_BLOCKS = 7
TOKENS = list(range(16))
SHAPES = st.builds(
    Shape,
    num_layers=st.integers(1, 3),
    num_streams=st.integers(1, 2),
    heads=st.sampled_from([1, 2, 3, 8]),
    width=st.sampled_from([1, 4, 6, 16]),
    block_size=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from(DTYPES),
)


def namespace(shape: Shape, **changes: object) -> Namespace:
    fields = {"layout": "layout", "rope": "rope", "block_size": shape.block_size} | changes
    return Namespace(model="model", dtype="dtype", kv_dtype=str(shape.dtype), **fields)


def host_images(pool, count: int) -> torch.Tensor:
    stride = pool.block_bytes + 5
    return torch.zeros(count, stride, dtype=torch.uint8, pin_memory=pool.device.type == "cuda")


def carry(source: LaidOut, blocks: list[int], target: LaidOut, places: list[int]) -> torch.Tensor:
    """Move blocks over host memory; returns their images there."""
    images = host_images(source.pool, len(blocks))
    slots = list(reversed(range(len(blocks))))
    source.pool.to_host(source.blocks(blocks), images, slots).wait()
    target.pool.from_host(images, slots, target.blocks(places)).wait()
    return images[slots, : source.pool.block_bytes]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@settings(max_examples=examples(60))
@given(SHAPES, st.sampled_from(ALL_PAIRS), st.randoms(use_true_random=False))
def test_what_comes_back_is_what_was_put(
    device: str, shape: Shape, kinds: tuple[str, str], random: Random
) -> None:
    source, target = (lay_out(kind, shape, NUM_BLOCKS, random, device) for kind in kinds)
    count = random.randint(1, NUM_BLOCKS)
    blocks = random.sample(range(NUM_BLOCKS), count)
    places = random.sample(range(NUM_BLOCKS), count)
    others = [block for block in range(NUM_BLOCKS) if block not in places]
    wanted, before = source.values(blocks), target.values(others)
    images = carry(source, blocks, target, places)
    assert torch.equal(images, wanted)
    assert torch.equal(target.values(places), wanted)
    assert torch.equal(target.values(others), before)


@pytest.mark.parametrize("kinds", ALL_PAIRS)
def test_engines_of_different_layouts_share_a_folder(kinds: tuple[str, str], tmp_path) -> None:
    shape, random = Shape(), Random(0)
    source, target = (lay_out(kind, shape, NUM_BLOCKS, random) for kind in kinds)
    wanted = source.values([3, 1, 4, 0])
    folder = {"ssd_cache_dir": str(tmp_path), "ssd_cache_bytes": "8MiB"}
    store = open_store(source.pool, namespace(shape), **folder)
    put = store.put(TOKENS, source.blocks([3, 1, 4, 0]))
    assert put.wait_until_kept(PATIENCE_S) and put.num_kept == 4
    store.close()
    store = open_store(target.pool, namespace(shape), **folder)
    load = store.match(TOKENS).load(target.blocks([6, 2, 5, 1]))
    assert load.wait(PATIENCE_S) and load.num_loaded == 4
    assert torch.equal(target.values([6, 2, 5, 1]), wanted)
    store.close()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_other_namespaces_find_nothing(kind: str, tmp_path) -> None:
    shape = Shape()
    pool = lay_out(kind, shape, NUM_BLOCKS, Random(0))
    folder = {"ssd_cache_dir": str(tmp_path), "ssd_cache_bytes": "8MiB"}
    store = open_store(pool.pool, namespace(shape), **folder)
    assert store.put(TOKENS, pool.blocks([0, 1, 2, 3])).wait_until_kept(PATIENCE_S)
    store.close()
    for changes in ({"layout": "other"}, {"rope": "other"}, {"adapter": "other"}):
        store = open_store(pool.pool, namespace(shape, **changes), **folder)
        assert len(store.match(TOKENS)) == 0
        store.close()


class TestGroups:
    def test_each_has_its_layers(self) -> None:
        shape, random = Shape(num_layers=3), Random(1)
        layers = lay_out("layers", shape, NUM_BLOCKS, random).streams
        pool = LayerPool(layers, groups=[[0, 2], [1]])
        whole = LaidOut(pool, layers, list(range(NUM_BLOCKS)))
        assert pool.image_bytes == (2 * pool.image_bytes[1], pool.image_bytes[1])
        wanted, size = whole.values([1]), pool.image_bytes[1]
        images = host_images(pool, 2)
        pool.to_host([1], images, [0], group=0).wait()
        pool.to_host([1], images, [1], group=1).wait()
        assert torch.equal(images[0, : 2 * size], wanted[0].view(3, size)[[0, 2]].flatten())
        assert torch.equal(images[1, :size], wanted[0].view(3, size)[1])
        pool.from_host(images, [1], [4], group=1).wait()
        assert torch.equal(whole.values([4])[0].view(3, size)[1], wanted[0].view(3, size)[1])


class TestDimensions:
    def test_a_shape_that_two_layouts_have_is_read_as_it_is_named(self) -> None:
        kv = torch.arange(2 * 2 * 4 * 2 * 4, dtype=torch.int16).view(2, 2, 4, 2, 4)
        keys_first = streams_of(kv, "kv block token head width")
        blocks_first = streams_of(kv, "block kv token head width")
        assert torch.equal(keys_first[1], kv[1])
        assert torch.equal(blocks_first[1], kv[:, 1])

    def test_latents_are_one_stream_of_one_head(self) -> None:
        (latents,) = streams_of(torch.zeros(7, 4, 6), "block token width")
        assert latents.shape == (7, 4, 1, 6)

    @pytest.mark.parametrize(
        "dims", ["", "block token", "kv block token head width width", "block token heads width"]
    )
    def test_that_are_none(self, dims: str) -> None:
        with pytest.raises(ConfigError, match="does not name the dimensions"):
            streams_of(torch.zeros(2, 7, 4, 2, 6), dims)

    def test_that_are_no_text(self) -> None:
        with pytest.raises(ConfigError, match="does not name the dimensions"):
            streams_of(torch.zeros(2, 7, 4, 2, 6), 5)  # type: ignore[arg-type]

    def test_of_what_is_no_tensor(self) -> None:
        with pytest.raises(ConfigError, match="are those of a tensor, not of a list"):
            streams_of([torch.zeros(7, 4, 6)], "block token width")  # type: ignore[arg-type]

    def test_of_another_number(self) -> None:
        with pytest.raises(ConfigError, match="names 4 dimensions of a tensor of shape"):
            streams_of(torch.zeros(2, 7, 4, 2, 6), "block token head width")


class TestChecks:
    def test_no_layers(self) -> None:
        with pytest.raises(ConfigError, match="needs a layer"):
            LayerPool([])

    def test_layers_without_streams(self) -> None:
        layer = [torch.zeros(7, 4, 2, 8)]
        for layers in ([[], layer], [layer, []]):
            with pytest.raises(ConfigError, match="each layer a stream"):
                LayerPool(layers)

    @pytest.mark.parametrize(
        "layers",
        [[torch.zeros(2, 7, 4, 2, 8)], torch.zeros(3, 2, 7, 4, 2, 8), [["kv"]], [None], None],
        ids=["tensors", "tensor", "text", "nothing", "none"],
    )
    def test_layers_that_are_no_lists_of_streams(self, layers: Any) -> None:
        with pytest.raises(ConfigError, match=r"each a list of its streams; give streams_of\("):
            LayerPool(layers)

    def test_without_memory(self) -> None:
        with pytest.raises(ConfigError, match="Blocks on meta cannot be copied"):
            LayerPool([[torch.zeros(7, 4, 2, 8, device="meta")]])

    def test_a_layer_of_no_group(self) -> None:
        layers = [[torch.zeros(7, 4, 2, 8)] for _ in range(3)]
        with pytest.raises(ConfigError, match="Layer 1 is in no KV group"):
            LayerPool(layers, groups=[[0], [2]])

    def test_no_groups(self) -> None:
        with pytest.raises(ConfigError, match="needs a KV group"):
            LayerPool([[torch.zeros(7, 4, 2, 8)]], groups=[])

    @pytest.mark.parametrize("block_size", [0, -4, 3])
    def test_slots_of_no_block_size(self, block_size: int) -> None:
        with pytest.raises(ConfigError, match="power of two"):
            SlotPool([[torch.zeros(64, 2, 8)]], block_size)

    def test_too_few_slots(self) -> None:
        with pytest.raises(ConfigError, match="give more slots"):
            SlotPool([[torch.zeros(15, 2, 8)]], 16)

    @pytest.mark.parametrize("kind", ["layers", "slots"])
    def test_names_of_other_blocks(self, kind: str) -> None:
        """A put of eight tokens would keep the KV of four."""
        shape = Shape(block_size=4)
        pool = lay_out(kind, shape, NUM_BLOCKS, Random(0)).pool
        with pytest.raises(ConfigError, match="blocks of 4 tokens"):
            open_store(pool, namespace(shape, block_size=8))

    def test_other_dimensions(self) -> None:
        with pytest.raises(ConfigError, match="give views of that shape"):
            LayerPool([[torch.zeros(7, 4, 2)]])

    def test_other_dtypes(self) -> None:
        half, single = torch.zeros(7, 4, 2, 8).half(), torch.zeros(7, 4, 2, 8)
        with pytest.raises(ConfigError, match="of one dtype"):
            LayerPool([[half], [single]])

    def test_other_numbers_of_blocks(self) -> None:
        with pytest.raises(ConfigError, match="differ in more than heads and width"):
            LayerPool([[torch.zeros(7, 4, 2, 8)], [torch.zeros(8, 4, 2, 8)]])

    def test_values_at_one_place(self) -> None:
        with pytest.raises(ConfigError, match="several values at one place"):
            LayerPool([[torch.zeros(7, 4, 1, 8).expand(7, 4, 2, 8)]])

    def test_streams_at_one_place(self) -> None:
        layer = torch.zeros(7, 4, 2, 8)
        with pytest.raises(ConfigError, match="have values at the same place"):
            LayerPool([[layer], [layer]])

    def test_groups_of_no_layers(self) -> None:
        for groups in ([[0], []], [[0, 1]], [0], [["0"]]):
            with pytest.raises(ConfigError, match="cannot be"):
                LayerPool([[torch.zeros(7, 4, 2, 8)]], groups)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("slots", "message"),
        [
            ([[0, 1, 2, 28]] * 1, "There is no slot 28"),
            ([[0, 1, 2, -1]], "There is no slot -1"),
            ([[0, 1, 2, 2]], "A slot is given twice"),
            ([0, 1, 2, 3], "is a row of 4 slots"),
            ([[0, 1, 2]], "is a row of 4 slots"),
            ([[0.0, 1.0, 2.0, 3.0]], "is a row of 4 slots"),
        ],
    )
    def test_slots(self, slots: list, message: str) -> None:
        store = open_store(
            SlotPool([[torch.zeros(28, 2, 8)]], block_size=4),
            namespace(Shape()),
            host_cache_bytes="1MiB",
        )
        with pytest.raises(KVError, match=message):
            store.put(TOKENS[:4], slots)
        assert len(store.match(TOKENS)) == 0
        store.close()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["layers", "slots"])
def test_copies_are_behind_the_kernels_that_write_their_blocks(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Many pieces, which have the halves of the staging buffer by turns.
    monkeypatch.setattr("quire.kv.pools.staging.HALF_BYTES", 1 << 20)
    shape = Shape(num_layers=4, heads=8, width=128, block_size=16, dtype=torch.bfloat16)
    made = lay_out(kind, shape, 64, Random(0), "cuda")
    blocks = Random(1).sample(range(64), 50)
    streams = [stream.view for run, _ in made.pool._layers[0] for stream in run.streams]
    images = host_images(made.pool, 50)
    torch.cuda._sleep(50_000_000)  # the writer is late: the copy must still see what it writes
    for stream in streams:
        stream.random_(1000)
    transfer = made.pool.to_host(made.blocks(blocks), images, range(50), made.pool.mark())
    transfer.wait()
    wanted = made.values(blocks)
    assert torch.equal(images[:, : made.pool.block_bytes], wanted)
    torch.cuda._sleep(50_000_000)  # and what is loaded must not be overwritten by it
    for stream in streams:
        stream.zero_()
    places = made.blocks(blocks)
    for each in made.pool.from_host_by_layer(images, range(50), places, made.pool.mark()):
        each.wait()
    assert torch.equal(made.values(blocks), wanted)


@pytest.mark.gpu
def test_what_follows_the_last_blocks_of_a_load_sees_them() -> None:
    shape = Shape(num_layers=4, heads=8, width=128, block_size=16, dtype=torch.bfloat16)
    made = lay_out("layers", shape, 4096, Random(0), "cuda")
    blocks, places = list(range(2000)), list(range(2000, 4000))
    for stream in (stream.view for run, _ in made.pool._layers[0] for stream in run.streams):
        stream.random_(1000)
    tokens = list(range(2000 * 16))
    store = open_store(made.pool, namespace(shape), host_cache_bytes="1GiB")
    put = store.put(tokens, blocks)
    assert put.wait(PATIENCE_S)
    wanted = made.values(blocks)
    load = store.match(tokens).load(places)
    end = time.monotonic() + PATIENCE_S
    while not (load.done() or store.follow_last(load, 2000)):
        assert time.monotonic() < end
        time.sleep(0.0005)  # it takes 10 ms
    was_done = load.done()
    assert torch.equal(made.values(places), wanted)  # without a wait of this thread
    assert load.wait(PATIENCE_S) and load.num_loaded == 2000
    assert not was_done  # else nothing was shown
    store.close()
