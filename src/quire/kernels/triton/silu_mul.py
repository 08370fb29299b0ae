"""SwiGLU: silu(gate) * up of an MLP, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDTH = 1024


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[tokens, 2 * features]`; a program takes a stretch of one row."""
    rows, features = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = gate_up.contiguous()
    out = torch.empty((rows, features), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(features, _WIDTH))
        _silu_mul[grid](gate_up, out, FEATURES=features, WIDTH=_WIDTH)
    return out


@triton.jit
def _silu_mul(gate_up, out, FEATURES: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live = lane < FEATURES
    source = gate_up + row * (2 * FEATURES) + lane
    gate = tl.load(source, mask=live, other=0.0).to(tl.float32)
    up = tl.load(source + FEATURES, mask=live, other=0.0).to(tl.float32)
    # Rounded before it is multiplied, as models were trained.
    activated = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * FEATURES + lane, (activated * up).to(out.dtype.element_ty), mask=live)
