"""Products of weights in eight bits with scales, by whatever multiplies fastest on the device.

On a GPU one or two rows are multiplied as they are, by weights that become float32 in registers:
such a product is nothing but reading the matrix. With more rows the activations are codes too,
quantised for each token, and tensor cores multiply eight bits by eight: few rows and some by
kernels of ours, many by torch's scaled product; of int8 all by ours, since torch's writes unscaled
sums of 32 bits.

Sums of fp8 are float32, but for those of more than `FEW` rows by weights with a scale for each row:
there tensor cores add up whole rows of codes, for which Hopper's keep fewer bits. Against float64
that makes 2.1e-3 of the 1.7e-3 that rounding to bfloat16 alone leaves.
"""

from __future__ import annotations

from functools import cache as memoise

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.codes import BlockScales, CodeFormat, Codes
from quire.kernels.codes import quantise as quantise_plainly
from quire.kernels.fp8 import FP8

GROUP = 128  # rows and columns of the only blocks that torch multiplies
AS_THEY_ARE = 2  # rows that stay numbers
FEW = 16  # rows for which our kernel of codes is faster than torch's

# torch multiplies so many rows faster than 129 to 255. By 24,576 features of 4,096 columns 160
# rows take 61 µs on an H200, and 256 take 43.
_FULL = 256
# What torch asks of sizes: 16 bytes of codes in a row, and scales of blocks and rows by fours.
_BYTES, _FOUR = 16, 4


def wanted_codes(
    weight: Tensor, scales: BlockScales, rows: int, dtype: torch.dtype
) -> CodeFormat | None:
    """What a product takes instead of so many rows of numbers; None: the numbers."""
    if rows <= AS_THEY_ARE or not weight.is_cuda or dtype != torch.bfloat16:
        return None
    if not _multiplies_codes(weight.device, weight.dtype, scales.is_by_rows):
        return None
    features, columns = weight.shape
    if scales.is_by_rows and scales.rows == 1:
        fits = features % _BYTES == columns % _BYTES == 0
        return CodeFormat(dtype=weight.dtype) if fits else None
    fits = (scales.rows, scales.columns) == (GROUP, GROUP)
    fits = fits and features % GROUP == columns % (_FOUR * GROUP) == 0
    return CodeFormat(GROUP) if fits else None


def quantise(x: Tensor, form: CodeFormat) -> Codes:
    """The codes of activations that no kernel before wrote as codes."""
    if not x.is_cuda:
        return quantise_plainly(x, form)
    from quire.kernels.triton.codes.quantise import quantise

    return quantise(x, form)


def multiply_as_is(
    x: Tensor,
    weight: Tensor,
    scales: BlockScales,
    bias: Tensor | None,
    activation: Activation | None = None,
    add_to: Tensor | None = None,
) -> Tensor | None:
    """A linear layer of one or two rows, and its gate, or added to what is there; None: there is
    no kernel for these (`is_as_is`)."""
    if not is_as_is(x, weight, scales):
        return None
    from quire.kernels.triton.codes.gemv import gemv

    return gemv(x, weight, scales, bias, activation, add_to)


def is_as_is(x: Tensor, weight: Tensor, scales: BlockScales) -> bool:
    if not x.is_cuda:
        return False
    from quire.kernels.triton.codes.gemv import is_few

    return is_few(x, weight, scales)


def multiply_codes(x: Codes, weight: Tensor, scales: BlockScales, bias: Tensor | None) -> Tensor:
    """A linear layer of `wanted_codes`."""
    if len(x) <= FEW:
        from quire.kernels.triton.codes.few_rows import multiply_few

        return multiply_few(x, weight, scales, bias)
    from quire.kernels.triton.codes.tiles_product import is_tiled, multiply_tiles

    if weight.dtype == torch.int8 or (
        _is_hopper(weight.device)
        and is_tiled(len(x), len(weight), scales.is_by_rows, weight.device)
    ):
        return multiply_tiles(x, weight, scales, bias)
    return _scaled_product(x, weight, scales, bias)


def _scaled_product(x: Codes, weight: Tensor, scales: BlockScales, bias: Tensor | None) -> Tensor:
    rows, is_by_rows = len(x), scales.is_by_rows
    if is_by_rows and _FULL // 2 < rows < _FULL:
        x = x.filled_up(_FULL)
    codes, x_scales = x.values, x.scales
    padding = 0 if is_by_rows else -len(x) % _FOUR
    if padding:
        codes = F.pad(codes.view(torch.uint8), (0, 0, 0, padding)).view(FP8)
        x_scales = F.pad(x_scales.t(), (0, padding)).t()
    out: Tensor = torch._scaled_mm(
        codes,
        weight.t(),
        x_scales,
        scales.values.t(),
        bias if is_by_rows else None,
        out_dtype=x.dtype,
        use_fast_accum=is_by_rows,
    )
    if not is_by_rows and bias is not None:
        out += bias
    return out[:rows]


@memoise
def _multiplies_codes(device: torch.device, codes: torch.dtype, is_by_rows: bool) -> bool:
    """What torch has for fp8: by rows from Ada on, in blocks on Hopper alone. Our kernel of int8
    copies tiles as Hopper does."""
    if codes == FP8 and is_by_rows:
        return torch.cuda.get_device_capability(device) >= (8, 9)
    if codes == FP8:
        return _is_hopper(device) and _has_blocks()
    return codes == torch.int8 and is_by_rows and _is_hopper(device)


def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def _has_blocks() -> bool:
    """Whether torch is new enough (2.9), and built with a CUDA that is (12.9)."""
    torch_version, cuda = (_version(v) for v in (torch.__version__, torch.version.cuda or "0"))
    return torch_version >= (2, 9) and cuda >= (12, 9)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split("+")[0].split(".")[:2])
