import pytest
import torch

from quire.kernels.batch import AttentionBatch
from quire.kernels.reference import ReferenceBackend
from quire.kv.layout import KVLayout
from quire.kv.pool import PagedKVCache

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.float32)


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
    images = torch.empty((3, *LAYOUT.block_shape))
    transfer = pool.to_host(torch.tensor([4, 0, 9]), images)
    transfer.wait()
    assert transfer.done() and torch.equal(images, before[[4, 0, 9]])
    pool.tensor.zero_()
    pool.from_host(images, torch.tensor([1, 2, 3])).wait()
    assert torch.equal(pool.tensor[[1, 2, 3]], before[[4, 0, 9]])
    assert pool.tensor[4:].eq(0).all()


@pytest.mark.gpu
def test_images_travel_between_gpu_and_pinned_memory_behind_the_kernels_that_write_them():
    device = torch.device("cuda")
    layout = KVLayout(
        num_layers=8, num_kv_heads=8, head_dim=128, block_size=16, dtype=torch.bfloat16
    )
    pool = PagedKVCache(layout, 256, device, ReferenceBackend())
    images = torch.empty((200, *layout.block_shape), dtype=torch.bfloat16, pin_memory=True)
    ids = torch.randperm(256)[:200]
    torch.cuda._sleep(50_000_000)  # the writer is late: the copy must still see what it writes
    pool.tensor.normal_()
    transfer = pool.to_host(ids, images)
    expected = pool.tensor[ids.to(device)].cpu()
    transfer.wait()
    assert torch.equal(images, expected)
    torch.cuda.synchronize()
    pool.tensor.zero_()
    torch.cuda.synchronize()
    pool.from_host(images, ids).wait()
    assert torch.equal(pool.tensor[ids.to(device)].cpu(), expected)
