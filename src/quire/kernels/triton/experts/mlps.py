"""The experts of a layer: which kernels compute them, for how many tokens, and in what tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.codes import CodeFormat
from quire.kernels.experts import (
    CodedExperts,
    ExpertMLPs,
    RouterProducts,
    Routing,
    SharedExperts,
)
from quire.kernels.four_bits import FourBitExperts
from quire.kernels.fp8 import FP8
from quire.kernels.triton.codes.quantise import quantise
from quire.kernels.triton.experts import (
    few,
    few_codes,
    few_fours,
    grouped,
    grouped_fours,
    hopper_few_fours,
)
from quire.kernels.triton.experts.choose import can_choose
from quire.kernels.triton.experts.combine import sum_of_chosen
from quire.kernels.triton.experts.gather import by_block
from quire.kernels.triton.experts.order import Blocks, sort_by_expert
from quire.kernels.triton.experts.tiles import (
    Problem,
    Tiles,
    block_on_hopper,
    few_shapes,
    tiles_for,
)
from quire.kernels.triton.sizes import next_power_of_2
from quire.kernels.triton.tried import is_hopper, tried

_FEW = 2  # tokens, each of which reads its experts for itself
GROUP = 128  # rows and columns of the only blocks that codes are multiplied in
_ALIGNED = 16  # bytes that rows begin at, for the hardware to copy tiles of them
HALVES = (torch.float16, torch.bfloat16)


def experts(x: Tensor, routing: Routing, mlps: ExpertMLPs) -> Tensor | None:
    """What a backend's `experts` returns; None: there is no kernel for these."""
    if len(x) == 0:
        return None
    gate_up, down = mlps.gate_up, mlps.down
    if gate_up.dense is not None and down.dense is not None:
        return _of_numbers(x, routing, mlps, gate_up.dense, down.dense)
    if isinstance(gate_up.packed, CodedExperts) and isinstance(down.packed, CodedExperts):
        return _of_codes(x, routing, mlps, gate_up.packed, down.packed)
    if isinstance(gate_up.packed, FourBitExperts) and isinstance(down.packed, FourBitExperts):
        return _of_four_bits(x, routing, mlps, gate_up.packed, down.packed)
    return None


def choosing_experts(x: Tensor, products: RouterProducts, mlps: ExpertMLPs) -> Tensor | None:
    """The same, by kernels that choose; None: there are none for these."""
    gate_up, down = mlps.gate_up.packed, mlps.down.packed
    if not (isinstance(gate_up, FourBitExperts) and isinstance(down, FourBitExperts)):
        return None
    is_few = 0 < len(x) <= _FEW
    if not (is_few and can_choose(products) and hopper_few_fours.fits(x, gate_up, down)):
        return None
    return _of_mxfp4_by_tensor_cores(x.contiguous(), products, mlps, gate_up, down)


def experts_and_shared(
    x: Tensor, routing: Routing, mlps: ExpertMLPs, shared: SharedExperts
) -> Tensor | None:
    """The same with what shared experts find, in the launches of the others; None: these do not
    take them."""
    gate_up, down = mlps.gate_up.dense, mlps.down.dense
    if gate_up is None or down is None or not 0 < len(x) <= _FEW or x.dtype not in HALVES:
        return None
    weights = (gate_up, down, *shared)
    if mlps.adapters is not None or any(each.dtype != x.dtype for each in weights):
        return None
    features, top_k = down.shape[2], routing.experts.shape[1]
    as_many, rest = divmod(shared.down.shape[1], features)
    choices = next_power_of_2(top_k)
    if rest or next_power_of_2(top_k + as_many) > choices:  # a tile has room for no more
        return None
    is_biased = mlps.gate_up.bias is not None or mlps.down.bias is not None
    if is_biased or not (is_aligned(gate_up) and is_aligned(down)):
        return None
    first, second = few_shapes("numbers", x.shape[1], features)
    hidden = few.few_gated(x, gate_up, routing, mlps.activation, None, first, shared.gate_up)
    return few.few_summed(hidden, down, routing, None, second, shared.down)


def _of_numbers(
    x: Tensor, routing: Routing, mlps: ExpertMLPs, gate_up: Tensor, down: Tensor
) -> Tensor | None:
    if x.dtype != gate_up.dtype or not (is_aligned(gate_up) and is_aligned(down)):
        return None
    bias, down_bias = mlps.gate_up.bias, mlps.down.bias
    if len(x) <= _FEW and x.dtype in HALVES:
        first, second = few_shapes("numbers", x.shape[1], down.shape[2])
        hidden = few.few_gated(x, gate_up, routing, mlps.activation, bias, first)
        return few.few_summed(hidden, down, routing, down_bias, second)
    tiles = tiles_of("numbers", x.shape[1], down.shape[2], x.itemsize, routing, mlps)
    blocks, top_k = sorted_pairs(routing, mlps, tiles), routing.experts.shape[1]
    hidden = grouped.gated_product(
        x.contiguous(), gate_up, blocks, top_k, mlps.activation, bias, tiles.gate_up
    )
    found = grouped.product(hidden, down, blocks, down_bias, tiles.down)
    return sum_of_chosen(found, routing, mlps.count)


def _of_codes(
    x: Tensor, routing: Routing, mlps: ExpertMLPs, gate_up: CodedExperts, down: CodedExperts
) -> Tensor | None:
    """As products of single matrices are: few tokens stay as they are, more become codes too."""
    if x.dtype not in HALVES or not (has_kernel(gate_up) and has_kernel(down)):
        return None
    bias, down_bias = mlps.gate_up.bias, mlps.down.bias
    if len(x) <= _FEW:
        first, second = few_shapes("codes", x.shape[1], down.codes.shape[2])
        hidden = few_codes.few_gated(x, gate_up, routing, mlps.activation, bias, first)
        return few_codes.few_summed(hidden, down, routing, down_bias, second)
    tiles = tiles_of("codes", x.shape[1], down.codes.shape[2], 1, routing, mlps)
    blocks, top_k = sorted_pairs(routing, mlps, tiles), routing.experts.shape[1]
    form = CodeFormat(None if gate_up.scales.is_by_rows else GROUP)
    codes = quantise(x.contiguous(), form)
    hidden = grouped.gated_product(
        codes, gate_up, blocks, top_k, mlps.activation, bias, tiles.gate_up
    )
    found = grouped.product(quantise(hidden, form), down, blocks, down_bias, tiles.down)
    return sum_of_chosen(found, routing, mlps.count)


def _of_four_bits(
    x: Tensor, routing: Routing, mlps: ExpertMLPs, gate_up: FourBitExperts, down: FourBitExperts
) -> Tensor | None:
    if x.dtype not in HALVES:
        return None
    if len(x) <= _FEW:
        return _of_four_bits_for_few(x.contiguous(), routing, mlps, gate_up, down)
    if _is_for_hopper(x, gate_up) and _is_for_hopper(x, down):
        return _of_mxfp4_on_hopper(x, routing, mlps, gate_up, down)
    tiles = tiles_of("four bits", x.shape[1], 4 * down.codes.shape[2], 2, routing, mlps)
    blocks, top_k = sorted_pairs(routing, mlps, tiles), routing.experts.shape[1]
    hidden = grouped_fours.gated_product(
        x.contiguous(), gate_up, blocks, top_k, mlps.activation, mlps.gate_up.bias, tiles.gate_up
    )
    found = grouped_fours.product(hidden, down, blocks, mlps.down.bias, tiles.down)
    return sum_of_chosen(found, routing, mlps.count)


def _of_four_bits_for_few(
    x: Tensor, routing: Routing, mlps: ExpertMLPs, gate_up: FourBitExperts, down: FourBitExperts
) -> Tensor:
    if hopper_few_fours.fits(x, gate_up, down):
        return _of_mxfp4_by_tensor_cores(x, routing, mlps, gate_up, down)
    bias, down_bias = mlps.gate_up.bias, mlps.down.bias
    first, second = few_shapes("four bits", x.shape[1], 4 * down.codes.shape[2])
    hidden = few_fours.few_gated(x, gate_up, routing, mlps.activation, bias, first)
    return few_fours.few_summed(hidden, down, routing, down_bias, second)


def _of_mxfp4_by_tensor_cores(
    x: Tensor,
    choice: hopper_few_fours.Choice,
    mlps: ExpertMLPs,
    gate_up: FourBitExperts,
    down: FourBitExperts,
) -> Tensor:
    bias, down_bias = mlps.gate_up.bias, mlps.down.bias
    hidden = hopper_few_fours.few_gated(x, gate_up, choice, mlps.activation, bias)
    return hopper_few_fours.few_summed(hidden, down, choice, down_bias)


def _of_mxfp4_on_hopper(
    x: Tensor,
    routing: Routing,
    mlps: ExpertMLPs,
    gate_up: FourBitExperts,
    down: FourBitExperts,
) -> Tensor:
    from quire.kernels.triton.experts import hopper_fours, hopper_narrow  # Gluon's

    block = block_on_hopper(routing.experts.numel() / mlps.count)
    product = hopper_narrow.product if block <= hopper_narrow.MOST else hopper_fours.product
    top_k = routing.experts.shape[1]
    blocks = sort_by_expert(routing.experts, mlps.count, block)
    tokens = by_block(x.contiguous(), blocks, top_k)
    hidden = product(tokens, gate_up, blocks, mlps.activation, mlps.gate_up.bias)
    found = product(hidden, down, blocks, None, mlps.down.bias)
    return sum_of_chosen(found, routing, mlps.count)


def _is_for_hopper(x: Tensor, weights: FourBitExperts) -> bool:
    """Whether Hopper's kernels multiply these, whose rows begin where hardware copies from."""
    if x.dtype != torch.bfloat16 or not x.is_cuda or weights.scale_dtype is not None:
        return False
    is_even = x.shape[1] % _ALIGNED == weights.codes.shape[1] % _ALIGNED == 0
    return is_even and is_hopper(x.device) and _can_be_built(x.device, x.dtype)


@tried("MXFP4 experts are")
def _can_be_built(device: torch.device, dtype: torch.dtype) -> None:
    """One pair, of one expert."""
    from quire.kernels.triton.experts import hopper_fours, hopper_narrow

    def numbers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    weights = FourBitExperts(numbers(1, 128, 64).short(), numbers(1, 2, 128))
    table = torch.tensor([[0], [0], [1]], dtype=torch.int32, device=device)
    for module, block in ((hopper_narrow, hopper_narrow.MOST), (hopper_fours, 128)):
        x = numbers(block, 4 * 64).to(dtype)
        module.product(x, weights, Blocks(numbers(1), table, block), Activation.SILU, None)


def tiles_of(
    kind: str, hidden: int, features: int, itemsize: int, routing: Routing, mlps: ExpertMLPs
) -> Tiles:
    experts = routing.experts
    pairs = experts.numel() / mlps.count
    return tiles_for(kind, Problem(hidden, features, pairs), itemsize, experts.device)


def sorted_pairs(routing: Routing, mlps: ExpertMLPs, tiles: Tiles) -> Blocks:
    return sort_by_expert(routing.experts, mlps.count, tiles.block)


def is_aligned(weights: Tensor) -> bool:
    return weights.shape[2] * weights.itemsize % _ALIGNED == 0


def has_kernel(weights: CodedExperts) -> bool:
    codes, scales = weights
    if codes.dtype != FP8 or not is_aligned(codes):
        return False
    if codes.is_cuda and torch.cuda.get_device_capability(codes.device) < (8, 9):
        return False
    if scales.is_by_rows:
        return scales.rows == 1
    is_whole = codes.shape[1] % GROUP == codes.shape[2] % GROUP == 0
    return (scales.rows, scales.columns) == (GROUP, GROUP) and is_whole
