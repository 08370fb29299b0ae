"""The kernel for few tokens an expert on Hopper GPUs, followed in plain torch: its barriers under
any order of its warps, and the places from which it takes numbers and to which it puts results.

On a GPU `test_triton_experts.py` and `test_gpu_experts.py` run it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quire.kernels.dequantise import E2M1, from_e8m0, from_fp4, spread, unpack_nibbles
from quire.kernels.four_bits import GROUP, exponent_words, from_quarters, quarter_of, to_quarters
from quire.kernels.quantise import to_mxfp4

PART, STEP, WARPGROUPS = 128, 64, 4


def tiles_of(experts: list[int], across: int, program: int, programs: int) -> list[tuple[int, int]]:
    """The blocks and tiles that a program has, in order: every warp of it walks so."""
    found, mine = [], program
    for block, expert in enumerate(experts):
        if expert >= 0:
            found += [(block, tile) for tile in range(mine, across, programs)]
            mine = (mine + programs - across % programs) % programs
    return found


@pytest.mark.parametrize(("across", "programs"), [(23, 132), (12, 132), (5, 3), (1, 7), (132, 132)])
def test_programs_share_all_tiles_evenly(across: int, programs: int) -> None:
    experts = [0, -1, 1, 1, -1, -1, 2, 5, 7, 7, 9, -1]
    shares = [tiles_of(experts, across, program, programs) for program in range(programs)]
    live = [block for block, expert in enumerate(experts) if expert >= 0]
    everything = sorted(tile for share in shares for tile in share)
    assert everything == [(block, tile) for block in live for tile in range(across)]
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


class Barrier:
    """As the hardware's: a phase is over when so many have arrived, and may be waited for by its
    parity. Before the first, the phase of parity 1 is over."""

    def __init__(self, count: int) -> None:
        self.count = self.left = count
        self.phase = 0

    def arrive(self, number: int = 1) -> None:
        assert number <= self.left, "more have arrived than the phase has room for"
        self.left -= number
        if self.left == 0:
            self.left, self.phase = self.count, self.phase + 1

    def is_over(self, parity: int) -> bool:
        return (self.phase - 1) & 1 == parity


class Ring:
    """The stages in shared memory: what lies in each, and who still reads it."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.has = [Barrier(33) for _ in range(stages)]
        self.free = [Barrier(WARPGROUPS) for _ in range(stages)]
        self.holds: list[int | None] = [None] * stages
        self.readers = [0] * stages


Wait = tuple[Barrier, int]


def loading(ring: Ring, steps: int) -> Iterator[Wait | None]:
    for step in range(steps):
        at, parity = step % ring.stages, (step // ring.stages) & 1
        yield ring.free[at], parity ^ 1
        assert ring.readers[at] == 0, "a stage is overwritten that is still read"
        ring.holds[at] = None
        yield None  # copies are under way
        ring.holds[at] = step
        ring.has[at].arrive(32)  # each thread's copies of words
        yield None
        ring.has[at].arrive()  # the tiles


def computing(ring: Ring, steps: int, read: list[int]) -> Iterator[Wait | None]:
    for step in range(steps):
        at, parity = step % ring.stages, (step // ring.stages) & 1
        yield ring.has[at], parity
        assert ring.holds[at] == step, "a stage is read that holds another step"
        ring.readers[at] += 1
        yield None
        assert ring.holds[at] == step
        ring.readers[at] -= 1
        read.append(step)
        ring.free[at].arrive()


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("steps", [0, 1, 4, 37])
def test_barriers_under_any_order_of_warps(stages: int, steps: int) -> None:
    for seed in range(20):
        chance, ring = random.Random(seed), Ring(stages)
        read: list[list[int]] = [[] for _ in range(WARPGROUPS)]
        actors = [loading(ring, steps), *(computing(ring, steps, each) for each in read)]
        waits: dict[int, Wait | None] = dict.fromkeys(range(len(actors)))
        speeds = [chance.random() ** 3 + 0.01 for _ in actors]
        while waits:
            able = [i for i, wait in waits.items() if wait is None or wait[0].is_over(wait[1])]
            assert able, "all warps wait"
            [i] = chance.choices(able, [speeds[i] for i in able])
            try:
                waits[i] = next(actors[i])
            except StopIteration:
                del waits[i]
        assert read == [list(range(steps))] * WARPGROUPS


def box(rows: Tensor, row: int, column: int, height: int, width: int) -> Tensor:
    """What the hardware copies of a matrix: zeros beyond its ends."""
    found = rows.new_zeros(height, width)
    part = rows[row : row + height, column : column + width]
    found[: part.shape[0], : part.shape[1]] = part
    return found


def quarters(codes: Tensor, words: Tensor) -> list[Tensor]:
    """The numbers of `[rows, 32]` elements, of each quarter, with the exponents in each row's
    word."""
    numbers = torch.tensor([*E2M1, *(-size for size in E2M1)])
    found = unpack_nibbles(from_quarters(codes, 4 * GROUP, False)).chunk(4, 1)
    scales = [torch.exp2(((words >> (8 * i)) & 255).float() - 127) for i in range(4)]
    return [
        numbers[each.long()] * scale[:, None] for each, scale in zip(found, scales, strict=True)
    ]


def interleaved(first: Tensor, second: Tensor) -> Tensor:
    """A warp's 16 rows are eight of each."""
    both = torch.stack([first.view(4, 8, -1), second.view(4, 8, -1)], -1)
    return both.permute(0, 3, 1, 2).reshape(64, -1)


def halves(total: Tensor) -> tuple[Tensor, Tensor]:
    one, other = total.view(4, 2, 8, -1).permute(0, 2, 3, 1).unbind(-1)
    return one.reshape(32, -1), other.reshape(32, -1)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("columns", [96, 160, 256, 320])  # quarters of 1, 2, 2 and 3 groups
def test_places(columns: int, gated: bool) -> None:
    torch.manual_seed(columns)
    count, features, block = 2, 176, 16
    height = 2 * features if gated else features
    packed, exponents = to_mxfp4(torch.randn(count * height, columns), GROUP)
    scales = spread(from_e8m0(exponents), GROUP, columns)
    weights = from_fp4(unpack_nibbles(packed), scales).view(count, height, columns)
    codes = to_quarters(packed, is_whole=False)
    words = exponent_words(exponents.view(count, height, -1), columns).flatten(0, 1)
    bias = torch.randn(count, height)
    x = torch.randn(29, columns)

    quarter = quarter_of(columns)
    groups, between = quarter // GROUP, features if gated else PART
    of_tile = PART if gated else 2 * PART
    for expert, begin, end in ((0, 0, 11), (1, 16, 29)):
        found = torch.full((end - begin, features), torch.nan)
        second = found.clone()
        for tile in range(-(-features // of_tile)):
            first = tile * of_tile
            totals = torch.zeros(WARPGROUPS, 64, block)
            for k in range(-(-quarter // STEP)):
                parts = [
                    box(codes, expert * height + first + part * between, k * STEP, PART, STEP)
                    for part in range(2)
                ]
                tokens = [box(x, begin, i * quarter + k * STEP, block, STEP) for i in range(4)]
                for sub in range(2):
                    group = min(2 * k + sub, groups - 1)
                    of_group = words[expert * groups + group]
                    lanes = slice(GROUP * sub, GROUP * (sub + 1))
                    for warpgroup in range(WARPGROUPS):
                        its = slice(32 * warpgroup, 32 * (warpgroup + 1))
                        left = []
                        for part in range(2):
                            row = first + part * between
                            its_words = box(of_group[None], 0, row, 1, PART)[0][its]
                            left.append(quarters(parts[part][its, lanes], its_words))
                        for one, other, y in zip(*left, tokens, strict=True):
                            totals[warpgroup] += interleaved(one, other) @ y[:, lanes].T
            for warpgroup in range(WARPGROUPS):
                row = first + 32 * warpgroup
                for half, out, offset in zip(
                    halves(totals[warpgroup]),
                    (found, second if gated else found),
                    (0, between),
                    strict=True,
                ):
                    at = row if gated else row + offset
                    kept = max(0, min(32, features - at))
                    added = box(bias[expert][None], 0, row + offset, 1, 32)[0]
                    result = (half + added[:, None])[:kept, : end - begin].T
                    out[:, at : at + kept] = result
        right = x[begin:end] @ weights[expert].T + bias[expert]
        got = torch.cat([found, second], 1) if gated else found
        torch.testing.assert_close(got, right, atol=1e-4, rtol=1e-4)
