"""Which decodes over KV in fp8 go to `hopper_fp8_decode.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.batch import AttentionBatch
from quire.kernels.fp8 import FP8, SCALE, is_fp8
from quire.kernels.pages import LayerPages
from quire.kernels.scoring import Scoring
from quire.kernels.triton.tried import is_hopper, tried

# As `fp8_words.py` has them, which not every version of Triton can load.
_HEAD_DIM, _PIECE, _ROWS = 128, 16, 8


def reads_words(q: Tensor, pages: LayerPages, window: int | None, span: int) -> bool:
    """Whether there is a kernel that reads these pages straight into registers."""
    if not is_fp8(pages.k) or window is not None or span > 1:
        return False
    assert pages.k_scales is not None
    return (
        pages.k_width == pages.v_width == _HEAD_DIM
        and q.shape[1] // pages.kv_heads <= _ROWS
        and q.stride(2) == 1
        and pages.block_size % _PIECE == 0
        and _is_one_image(pages.k, pages.k_scales)
        and pages.k.data_ptr() % 16 == 0
        and q.dtype in (torch.float16, torch.bfloat16)
        and is_hopper(q.device)
        and _can_be_built(q.device, q.dtype)
    )


def _is_one_image(k: Tensor, scales: Tensor) -> bool:
    """Whether it is as far to the next block of both. The one block of a warm-up has no next."""
    return len(k) == 1 or k.stride(0) == scales.stride(0) * SCALE.itemsize


@tried("Attention over fp8 is")
def _can_be_built(device: torch.device, dtype: torch.dtype) -> None:
    """One token, of itself."""
    from quire.kernels.triton.attention.hopper_fp8_decode import SHAPE, attend
    from quire.kernels.triton.attention.kv_splits import KVSplits

    def numbers(*listed: int) -> Tensor:
        return torch.tensor(listed, dtype=torch.int32, device=device)

    image = torch.zeros(
        1, 2 * _PIECE * (_HEAD_DIM + SCALE.itemsize), dtype=torch.uint8, device=device
    )
    values, scales = image.split([2 * _PIECE * _HEAD_DIM, 2 * _PIECE * SCALE.itemsize], 1)
    k, v = values.view(FP8).view(1, 2, 1, _PIECE, _HEAD_DIM).unbind(1)
    k_scales, v_scales = scales.view(SCALE).view(1, 2, 1, _PIECE).unbind(1)
    pages = LayerPages(k, v, k_scales, v_scales)
    batch = AttentionBatch(
        numbers(0).long(), numbers(0).view(1, 1), numbers(0, 1), numbers(1), [1], [1]
    )
    q = torch.zeros(1, 1, _HEAD_DIM, dtype=dtype, device=device)
    nothing = q.new_empty(0, dtype=torch.float32)
    table = numbers(0, 0, 0, 1, 1, 1, 0, 0).view(1, 8)
    splits = KVSplits(1, 1, table, nothing, nothing, nothing)
    attend(q, pages, batch, splits, Scoring(1.0), torch.empty_like(q), True, SHAPE)
