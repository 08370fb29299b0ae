"""Hopper's kernels over latents, by a model of Gluon and without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from gluon_model import run_program
from latent_steps import LatentStep, make_step
from torch import Tensor

RANK, ROPE = 512, 64
LOG2_E = 1.4426950408889634
LATENT = "quire.kernels.triton.latent."
KERNELS = {  # its module, rows of a program, and what else it is made for
    "pairs": ("hopper_pairs", 64, {"REGISTERS": 216, "REGISTERS_TO_COPY": 72}),
    "few": ("hopper_few", 32, {"ROWS": 32}),
}
MIXES = [
    (64, [(1, 1), (1, 0), (1, 128)]),  # the second of no sequence
    (64, [(1, 700)]),
    (96, [(3, 200), (2, 65)]),
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("heads", "lengths"), MIXES, ids=str)
def test_any_order(batch_of, kernel, heads, lengths):
    step = make_step(batch_of, lengths, heads, RANK, ROPE, block_size=16, seed=heads)
    step = replace(step, scale=(RANK + ROPE) ** -0.5).on("cpu", torch.bfloat16)
    out = attend(kernel, step, split=256, seed=heads)
    torch.testing.assert_close(out, step.expected(), rtol=0, atol=2e-2)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("block_size", [1, 24, 64])
def test_block_sizes(batch_of, kernel, block_size):
    step = make_step(batch_of, [(1, 150), (1, 33)], 64, RANK, ROPE, block_size)
    step = replace(step, scale=(RANK + ROPE) ** -0.5).on("cpu", torch.float16)
    out = attend(kernel, step, split=128, seed=0)
    torch.testing.assert_close(out, step.expected(), rtol=0, atol=2e-2)


def test_top_rises_and_falls(batch_of):
    """Scores of hundreds, in a tile of either warpgroup: what was added before fades to nothing."""
    step = make_step(batch_of, [(1, 512)], 64, RANK, ROPE, block_size=16)
    tokens = step.pool[step.batch.block_tables[0, :32].long(), 1].view(512, -1)
    for position, size in ((70, 3.0), (130, 9.0), (200, 20.0), (450, 1.0)):
        tokens[position] = step.q[0, position % 64] * size
    step.pool[step.batch.block_tables[0, :32].long(), 1] = tokens.view(32, 16, -1)
    step = step.on("cpu", torch.bfloat16)
    for kernel in KERNELS:
        out = attend(kernel, step, split=512, seed=1)
        torch.testing.assert_close(out, step.expected(), rtol=1e-2, atol=3e-2)


@dataclass
class Splits:
    """As `kv_splits.py` has them, with as many tokens each as are given."""

    table: Tensor
    values: Tensor
    lse: Tensor

    @classmethod
    def of(cls, step: LatentStep, split: int) -> Splits:
        rows, span, row = [], max(step.batch.query_lens), 0
        for i, (new, context) in enumerate(
            zip(step.batch.query_lens, step.batch.contexts, strict=True)
        ):
            firsts = range(0, context, split) if context else [0]
            for first in firsts:
                end = min(first + split, context)
                rows.append([i, row, first, end, len(firsts), new, context - new, 0])
            row += new
        rows.append([-1] * 8)  # one that is not taken
        values = torch.full((len(rows), span, step.q.shape[1], RANK), torch.nan)
        return cls(torch.tensor(rows, dtype=torch.int32), values, values[..., 0].clone())

    def combine(self, out: Tensor) -> None:
        """Fill the rows of sequences that have several."""
        split = [(*row[:2], row[5], i) for i, row in enumerate(self.table.tolist()) if row[4] > 1]
        for sequence, row, new in {each[:3] for each in split}:
            items = [item for *of, item in split if of[0] == sequence]
            lse = self.lse[items, :new]
            weights = (lse / LOG2_E).softmax(0).unsqueeze(-1)  # they are in units of log 2
            out[row : row + new] = (weights * self.values[items, :new]).sum(0).to(out.dtype)


def attend(kernel: str, step: LatentStep, split: int, seed: int) -> Tensor:
    module, rows, constants = KERNELS[kernel]
    # The new tokens' latents are written by another kernel.
    for latent, slot in zip(step.latents, step.batch.slot_mapping.tolist(), strict=True):
        if slot >= 0:
            size = step.pages.block_size
            step.pages.values[slot // size, slot % size] = latent
    splits, heads = Splits.of(step, split), step.q.shape[1]
    out = torch.full_like(step.q[..., :RANK], torch.nan).contiguous()
    programs = -(-splits.values.shape[1] * heads // rows)
    for program in product(range(programs), range(len(splits.table))):
        run_program(
            LATENT + module,
            "_attend",
            program,
            seed + 1000 * sum(program),
            q=step.q,
            out=out,
            splits_table=splits.table,
            values=splits.values,
            lse=splits.lse,
            block_tables=step.batch.block_tables,
            latents=step.pages.values,
            scale=step.scale * LOG2_E,
            q_row_stride=step.q.stride(0),
            q_head_stride=step.q.stride(1),
            out_row_stride=out.stride(0),
            out_head_stride=out.stride(1),
            block_stride=step.pages.values.stride(0),
            table_stride=step.batch.block_tables.stride(0),
            HEADS=heads,
            SPAN=splits.values.shape[1],
            RANK=RANK,
            ROPE=ROPE,
            BLOCK_SIZE=step.pages.block_size,
            PDL=False,
            **constants,
        )
    splits.combine(out)
    return out.float()
