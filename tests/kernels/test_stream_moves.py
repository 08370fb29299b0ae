"""The kernel that gathers and scatters streams, beside the same in torch."""

from __future__ import annotations

from random import Random

import pytest
import torch
from pool_layouts import DTYPES, Shape, lay_out

from quire.kernels.triton.streams import move_streams
from quire.kv import LayerPool
from quire.kv.pools.staging import kinds_of

NUM_BLOCKS = 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["layers", "slots"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_ways(kind: str, dtype: torch.dtype, seed: int) -> None:
    random = Random(seed)
    shape = Shape(
        num_layers=random.randint(1, 3),
        heads=random.choice([1, 3, 8]),
        width=random.choice([2, 6, 64]),
        block_size=random.choice([1, 4]),
        dtype=dtype,
    )
    made = lay_out(kind, shape, NUM_BLOCKS, random, DEVICE)
    (run,) = made.pool._groups
    blocks = random.sample(range(NUM_BLOCKS), 3)
    rows = torch.zeros(3, -(-run.nbytes // 16) * 16, dtype=torch.uint8, device=DEVICE)
    _move(run, made.blocks(blocks), rows, to_images=True)
    assert torch.equal(rows[:, : run.nbytes].cpu(), made.values(blocks))

    others = random.sample(range(NUM_BLOCKS), 3)
    untouched = [block for block in range(NUM_BLOCKS) if block not in others]
    before = made.values(untouched)
    _move(run, made.blocks(others), rows, to_images=False)
    assert torch.equal(made.values(others), rows[:, : run.nbytes].cpu())
    assert torch.equal(made.values(untouched), before)


def _move(run, blocks: list, rows: torch.Tensor, to_images: bool) -> None:
    kinds = kinds_of(run)
    assert sum(len(kind.pointers) for kind in kinds) == len(run.streams)
    for kind in kinds:
        offsets = torch.from_numpy(kind.token_offsets(torch.tensor(blocks).numpy()))
        move_streams(kind, offsets.to(DEVICE), rows, to_images)


def test_equal_layers_are_one_launch() -> None:
    layers = [tuple(torch.zeros(2, 5, 4, 2, 8).unbind(0)) for _ in range(3)]
    (run,) = LayerPool(layers)._groups
    (kind,) = kinds_of(run)
    assert len(kind.pointers) == 6
    assert kind.word == torch.int64 and kind.width == 4
