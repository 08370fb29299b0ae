from dataclasses import replace

import pytest
import torch

from quire.kernels.batch import AttentionBatch
from quire.kernels.fp8 import FP8, scales_of
from quire.kernels.reference import ReferenceBackend
from quire.kv.layout import KVLayout
from quire.kv.pool import PagedKVCache
from quire.kv_groups import KVGroup, KVStream

LAYOUT = KVLayout.plain(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.float32)


@pytest.fixture
def pool(request):
    return PagedKVCache(LAYOUT, 10, torch.device("cpu"), ReferenceBackend())


def batch_of(slots):
    slots = torch.tensor(slots)
    count = len(slots)
    return AttentionBatch(
        slots,
        torch.zeros((1, 1), dtype=torch.int32),
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([count], dtype=torch.int32),
        [count],
        [count],
    )


def test_layout_sizes():
    assert LAYOUT.token_bytes == 3 * 2 * 2 * 8 * 4
    assert LAYOUT.block_bytes == 4 * LAYOUT.token_bytes
    assert LAYOUT.blocks_for(9) == 3


def test_images_are_contiguous_over_layers(pool):
    assert pool.tensor[4].is_contiguous()
    assert pool.tensor[4].nbytes == LAYOUT.block_bytes


def test_what_is_written_by_slot_is_gathered_by_block(pool):
    k, v = torch.randn(2, 6, 2, 8)
    blocks = [7, 2]
    pool.write(1, k, v, batch_of([blocks[p // 4] * 4 + p % 4 for p in range(6)]))
    got_k, got_v = pool.gather(1, torch.tensor(blocks), 6)
    assert torch.equal(got_k, k) and torch.equal(got_v, v)
    assert pool.tensor[:, [0, 2]].eq(0).all()


def test_copies_behave_as_if_made_one_after_the_other(pool):
    pool.tensor.copy_(torch.arange(10.0).view(-1, 1, 1, 1, 1, 1).expand_as(pool.tensor))
    pool.copy_blocks([(1, 2), (3, 1), (2, 5), (4, 2), (6, 2), (7, 7)])
    assert pool.tensor[:, 0, 0, 0, 0, 0].tolist() == [0, 3, 6, 3, 4, 1, 6, 7, 8, 9]


def test_images_travel_to_the_host_and_back(pool):
    pool.tensor.normal_()
    before = pool.tensor.clone()
    images = torch.empty((3, LAYOUT.block_bytes), dtype=torch.uint8)
    transfer = pool.to_host([4, 0, 9], images, [0, 1, 2])
    transfer.wait()
    assert transfer.done()
    assert torch.equal(images.view(torch.float32), before[[4, 0, 9]].flatten(1))
    pool.tensor.zero_()
    pool.from_host(images, [0, 1, 2], [1, 2, 3]).wait()
    assert torch.equal(pool.tensor[[1, 2, 3]], before[[4, 0, 9]])
    assert pool.tensor[4:].eq(0).all()


@pytest.mark.gpu
def test_images_travel_between_gpu_and_pinned_memory_behind_the_kernels_that_write_them():
    device = torch.device("cuda")
    layout = KVLayout.plain(
        num_layers=8, num_kv_heads=8, head_dim=128, block_size=16, dtype=torch.bfloat16
    )
    pool = PagedKVCache(layout, 256, device, ReferenceBackend())
    images = torch.empty((200, layout.block_bytes), dtype=torch.uint8, pin_memory=True)
    ids = torch.randperm(256)[:200]
    torch.cuda._sleep(50_000_000)  # the writer is late: the copy must still see what it writes
    pool.tensor.normal_()
    transfer = pool.to_host(ids.tolist(), images, range(200), after=pool.mark())
    expected = pool.images[ids.to(device)].cpu()
    transfer.wait()
    assert torch.equal(images, expected)
    torch.cuda.synchronize()
    pool.tensor.zero_()
    torch.cuda.synchronize()
    pool.from_host(images, range(200), ids.tolist()).wait()
    assert torch.equal(pool.images[ids.to(device)].cpu(), expected)


class TestFp8:
    LAYOUT = KVLayout.plain(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=FP8)

    @pytest.fixture
    def pool(self):
        return PagedKVCache(self.LAYOUT, 10, torch.device("cpu"), ReferenceBackend())

    def test_an_image_has_its_scales_behind_its_values(self, pool):
        assert self.LAYOUT.token_bytes == 3 * 2 * 2 * (8 + 4)
        scales_of(pool.tensor)[4, 2, 1, 1, 3] = 2.5  # the very last of block 4
        assert pool.images[4, -4:].view(torch.float32).item() == 2.5
        pool.tensor[4, 0, 0, 0, 0, 0] = 1.0
        assert pool.images[4, 0] == 0x38 and pool.images[[3, 5]].eq(0).all()

    def test_what_is_written_is_read_to_a_sixteenth(self, pool):
        torch.manual_seed(0)
        k, v = torch.randn(2, 6, 2, 8) * torch.tensor([1e-3, 1, 50, 1e4, 0, 1]).view(6, 1, 1)
        blocks = [7, 2]
        pool.write(1, k, v, batch_of([blocks[p // 4] * 4 + p % 4 for p in range(6)]))
        got_k, got_v = pool.gather(1, torch.tensor(blocks), 6)
        for got, wanted in ((got_k, k), (got_v, v)):
            smallest = wanted.abs().amax(-1, keepdim=True) / 448 / 512  # half of e4m3's last step
            assert ((got - wanted).abs() <= wanted.abs() / 16 + smallest).all()

    def test_copies_and_transfers_take_the_scales_along(self, pool):
        k, v = torch.randn(2, 4, 2, 8)
        pool.write(0, k, v, batch_of([4 * 4 + i for i in range(4)]))
        before = pool.gather(0, torch.tensor([4]), 4)
        pool.copy_blocks([(4, 6)])
        images = torch.empty((1, self.LAYOUT.block_bytes), dtype=torch.uint8)
        pool.to_host([6], images, [0]).wait()
        pool.from_host(images, [0], [1]).wait()
        for block in (6, 1):
            for got, wanted in zip(pool.gather(0, torch.tensor([block]), 4), before, strict=True):
                assert torch.equal(got, wanted)


class TestGroups:
    """Two groups in one pool; a block of the second fills half a row."""

    LAYOUT = KVLayout(
        (
            KVGroup.keys_and_values([1, 2], 2, 8),
            KVGroup((0,), (KVStream(2, 8), KVStream(2, 4)), window=6),
        ),
        4,
        torch.float32,
    )

    @pytest.fixture(params=[torch.float32, FP8], ids=str)
    def pool(self, request):
        layout = replace(self.LAYOUT, dtype=request.param)
        return PagedKVCache(layout, 6, torch.device("cpu"), ReferenceBackend())

    def test_streams_are_views_of_the_bytes_that_the_layout_says(self, pool):
        layout = pool.layout
        for layer, places in enumerate(layout.places):
            for number, place in enumerate(places):
                pool.images.zero_()
                values, scales = pool.stream(layer, number)
                assert values.shape == (6, 2, 4, place.stream.width)
                values[3] = 1.0
                size = values[3].numel() * layout.dtype.itemsize
                written = pool.images[3, place.values : place.values + size]
                assert written.view(layout.dtype).float().eq(1).all()
                if place.scales is not None:
                    scales[3] = 2.0
                    ends = pool.images[3, place.scales : place.scales + 32]
                    assert ends.view(torch.float32).eq(2).all()
                    size += 32
                assert pool.images.ne(0).sum() <= size and pool.images[[0, 1, 2, 4, 5]].eq(0).all()

    def test_a_transfer_leaves_padding_alone(self, pool):
        sizes = pool.image_bytes
        assert sizes == pool.layout.image_bytes and sizes[1] < sizes[0] == pool.block_bytes
        pool.images.copy_(torch.randint(0, 255, pool.images.shape, dtype=torch.uint8))
        before = pool.images.clone()
        for group, size in enumerate(sizes):
            host = torch.full((2, pool.block_bytes), 7, dtype=torch.uint8)
            pool.to_host([4, 1], host, [0, 1], group=group).wait()
            assert torch.equal(host[:, :size], before[[4, 1], :size])
            assert host[:, size:].eq(7).all()
            pool.images.fill_(9)
            pool.from_host(host, [1, 0], [2, 5], group=group).wait()
            assert torch.equal(pool.images[[5, 2], :size], before[[4, 1], :size])
            assert pool.images[[2, 5], size:].eq(9).all()
            pool.images.copy_(before)
