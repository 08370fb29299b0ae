"""Block images between the device and host memory, against one large copy of as many bytes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch

from quire.bench.report.progress import runs_bar
from quire.bench.report.sample import Sample
from quire.bench.report.stopwatch import synchronise
from quire.bench.report.table import Row
from quire.kv.images import ImagePool
from quire.kv.layout import KVLayout
from quire.kv.pools.block_pool import BlockPool
from quire.kv.pools.stream_pool import LayerPool
from quire.kv.tiers.memory import HostMemory

WARM_UPS = 2


def pool_of_images(layout: KVLayout, num_blocks: int, device: torch.device) -> ImagePool:
    """Quire's own pool."""
    size = (num_blocks, max(layout.image_bytes))
    return ImagePool(torch.zeros(size, dtype=torch.uint8, device=device))


def pool_of_layers(layout: KVLayout, num_blocks: int, device: torch.device) -> LayerPool:
    """A tensor for each stream of each layer, as other engines have them."""
    (group,) = layout.groups
    shapes = [(num_blocks, layout.block_size, each.heads, each.width) for each in group.streams]
    return LayerPool(
        [
            [torch.zeros(shape, dtype=layout.dtype, device=device) for shape in shapes]
            for _ in group.layers
        ]
    )


def bandwidth(pool: BlockPool[int], *, repeat: int = 9) -> list[Row]:
    """Half of a pool's blocks, scattered, to scattered slots, both ways.

    Each is beside the plain copy of as many bytes in every round.
    """
    device, image_bytes, blocks = pool.device, pool.block_bytes, pool.num_blocks // 2
    cuda = device.type == "cuda"
    memory = HostMemory(image_bytes, 2 * blocks, pinned=cuda)
    _wait_until_ready(memory)
    where = random.Random(0)
    here, there = (where.sample(range(2 * blocks), blocks) for _ in range(2))
    plain_host = torch.zeros(blocks * image_bytes, dtype=torch.uint8, pin_memory=cuda)
    plain_device = torch.zeros(blocks * image_bytes, dtype=torch.uint8, device=device)
    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "to host": (
            lambda: pool.to_host(here, memory.images, there),
            lambda: plain_host.copy_(plain_device, non_blocking=True),
        ),
        "from host": (
            lambda: pool.from_host(memory.images, there, here),
            lambda: plain_device.copy_(plain_host, non_blocking=True),
        ),
    }
    rows = []
    for way, (tier, plain) in ways.items():
        rates = []
        with runs_bar(way, repeat) as bar:
            for number in range(WARM_UPS + repeat):
                seconds = [_seconds(each, device) for each in (tier, plain)]
                rates.append([blocks * image_bytes / each / 1e9 for each in seconds])
                bar.update(number >= WARM_UPS)
        rows.append(
            {
                "way": way,
                "MB": image_bytes / 1e6,
                "GB/s": Sample(mine for mine, _ in rates[WARM_UPS:]),
                "plain GB/s": Sample(other for _, other in rates[WARM_UPS:]),
                "share of plain": Sample(mine / other for mine, other in rates[WARM_UPS:]),
            }
        )
    memory.close()
    return rows


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    synchronise(device)
    started = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - started


def _wait_until_ready(memory: HostMemory) -> None:
    memory.make_ready(lambda slots: None)
    while not memory.is_ready:
        time.sleep(0.01)
