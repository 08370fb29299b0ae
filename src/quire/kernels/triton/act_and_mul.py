"""SwiGLU and GeGLU: activation(gate) * up of an MLP, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activation import Activation

_WIDTH = 1024


def act_and_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """`activation(gate) * up` of `[tokens, 2 * features]`; a program takes a stretch of one row."""
    rows, features = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = gate_up.contiguous()
    out = torch.empty((rows, features), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(features, _WIDTH))
        gelu = activation is Activation.GELU_TANH
        _act_and_mul[grid](gate_up, out, FEATURES=features, WIDTH=_WIDTH, GELU=gelu)
    return out


@triton.jit
def _act_and_mul(gate_up, out, FEATURES: tl.constexpr, WIDTH: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    live = lane < FEATURES
    source = gate_up + row * (2 * FEATURES) + lane
    gate = tl.load(source, mask=live, other=0.0).to(tl.float32)
    up = tl.load(source + FEATURES, mask=live, other=0.0).to(tl.float32)
    # Rounded before it is multiplied, as models were trained.
    activated = activate(gate, GELU).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * FEATURES + lane, (activated * up).to(out.dtype.element_ty), mask=live)


@triton.jit
def activate(gate, GELU: tl.constexpr):
    """SiLU; or GELU by its approximation with tanh, of which `(1 + tanh(x)) / 2 = sigmoid(2 x)`."""
    x = gate
    if GELU:
        x = 1.5957691216057308 * gate * (1 + 0.044715 * gate * gate)  # sqrt(8 / pi)
    return gate * tl.sigmoid(x)
