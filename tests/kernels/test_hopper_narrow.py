"""Kernels for experts in MXFP4 on Hopper GPUs, by a model of Gluon and without a GPU.

On a GPU `test_triton_experts.py` and `test_gpu_experts.py` run it.
"""

from __future__ import annotations

import pytest
import torch
from gluon_model import Descriptor, run_program
from torch import Tensor

from quire.kernels.dequantise import from_e8m0, from_fp4, spread, unpack_nibbles
from quire.kernels.four_bits import GROUP, exponent_words, quarter_of, to_quarters
from quire.kernels.quantise import to_mxfp4

pytest.importorskip("triton")

ALPHA, LIMIT = 1.702, 7.0
# Of each expert; the blocks behind the last are none's.
PAIRS = {"some": [3, 0, 21, 16, 0], "many": [0, 70, 33], "one": [5], "none": [0, 0]}


@pytest.mark.diagonal
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("pairs", "block", "columns", "features", "programs", "stages"),
    [
        ("some", 16, 576, 16, 1, 2),  # one program has all tiles, and three steps of each
        ("some", 16, 320, 272, 3, 5),  # a quarter ends in the middle of a step
        ("some", 32, 320, 144, 2, 3),
        ("many", 32, 96, 288, 2, 3),
        ("many", 64, 320, 128, 1, 1),
        ("many", 64, 320, 272, 2, 2),
        ("one", 16, 1088, 16, 1, 2),
        ("one", 64, 128, 128, 2, 3),
        ("none", 16, 128, 128, 2, 2),
        ("many", 128, 576, 272, 2, 2),  # another kernel, for more tokens
        ("many", 128, 96, 144, 1, 3),
        ("none", 128, 128, 128, 2, 2),
    ],
)
def test_any_order(
    gated: bool,
    pairs: str,
    block: int,
    columns: int,
    features: int,
    programs: int,
    stages: int,
) -> None:
    torch.manual_seed(columns)
    counts = PAIRS[pairs]
    order, table = blocks_of(counts, block)
    rows = 2 * features if gated else features
    codes, words, weights = random_experts(len(counts), rows, columns)
    bias = torch.randn(len(counts), rows).bfloat16()
    x = torch.randn(len(order), columns).bfloat16()
    is_narrow = block <= 64
    few = max(16, block // 2) if is_narrow else block  # pairs for which there is a loop of its own
    tokens = by_block(x, table, block, block, behind=torch.inf)  # of which no number may leak
    out = torch.full((len(tokens if gated else order), features), torch.nan, dtype=torch.bfloat16)
    height, width = (64, 64) if is_narrow else (64, 32)
    rows_of_tile = (64 if gated else 128) if is_narrow else (128 if gated else 256)
    tiles = -(-features // rows_of_tile)
    for program in range(programs):
        run_program(
            f"quire.kernels.triton.experts.{'hopper_narrow' if is_narrow else 'hopper_fours'}",
            "_multiply",
            (program,),
            seed=columns + program,
            programs=programs,
            inputs=Descriptor(tokens, block, width),
            codes=Descriptor(codes, height, width),
            words=words,
            bias=bias,
            out=out,
            order=order,
            table=table,
            most=table.shape[1],
            **{"units" if is_narrow else "across": tiles},
            **({"few_inputs": Descriptor(tokens, few, width), "FEW": few} if is_narrow else {}),
            features=features,
            quarter=quarter_of(columns),
            GATED=gated,
            BIASED=True,
            GELU=False,
            CLAMPED=gated,
            ALPHA=ALPHA,
            LIMIT=LIMIT,
            BLOCK=block,
            STAGES=stages,
            REGISTERS=112,
            PDL=False,
        )
    right = torch.empty(len(order), features)
    begin = 0
    for expert, count in enumerate(counts):
        found = x[begin : begin + count].float() @ weights[expert].T + bias[expert].float()
        if gated:
            found = joined(*found.bfloat16().float().chunk(2, 1))
        right[begin : begin + count] = found
        begin += count
    if gated:  # a block of no expert is left as it was
        right = by_block(right, table, block, few, behind=0.0)
    else:
        out = out[order.long()]
    torch.testing.assert_close(out.float(), right, atol=2e-2, rtol=2e-2, equal_nan=True)
    if gated:
        assert not out[right == 0].any()


def by_block(x: Tensor, table: Tensor, size: int, few: int, behind: float) -> Tensor:
    """As `gather.py` makes it, with what is asked for behind the pairs of a block; a block of few
    has but so many rows."""
    found = torch.full((table.shape[1], size, x.shape[1]), torch.nan, dtype=x.dtype)
    for block, (expert, begin, end) in zip(found, table.t().tolist(), strict=True):
        if expert >= 0:
            block[: end - begin] = x[begin:end]
            block[end - begin : few if end - begin <= few else size] = behind
    return found.flatten(0, 1)


def blocks_of(counts: list[int], size: int) -> tuple[Tensor, Tensor]:
    """As `order.py` makes them, of pairs in some order."""
    total = sum(counts)
    table = torch.full((3, total // size + len(counts)), -1, dtype=torch.int32)
    begin = 0
    for expert, count in enumerate(counts):
        for i, place in enumerate(range(begin, begin + count, size)):
            block = begin // size + expert + i
            end = min(place + size, begin + count)
            table[:, block] = torch.tensor([expert, place, end])
        begin += count
    return torch.randperm(total).to(torch.int32), table


def random_experts(count: int, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, words of exponents, and what they stand for."""
    packed, exponents = to_mxfp4(torch.randn(count * rows, columns) * columns**-0.5, GROUP)
    scales = spread(from_e8m0(exponents), GROUP, columns)
    weights = from_fp4(unpack_nibbles(packed), scales).view(count, rows, columns)
    words = exponent_words(exponents.view(count, rows, -1), columns)
    return to_quarters(packed, is_whole=False), words, weights


def joined(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * (gate * ALPHA).sigmoid() * (up + 1.0)
