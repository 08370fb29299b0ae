"""SwiGLU and GeGLU: activation(gate) * up of an MLP, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.codes import CodeFormat, Codes
from quire.kernels.triton.codes.quantise import room_for, write_codes
from quire.kernels.triton.pdl import pdl_launch, trigger_then_wait
from quire.kernels.triton.sizes import cdiv, next_power_of_2

_WIDTH = 1024


def act_and_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """`activation(gate) * up` of `[tokens, 2 * features]`; a program takes a stretch of one row."""
    rows, features = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, features), dtype=gate_up.dtype, device=gate_up.device)
    _launch(gate_up, activation, out, None, _WIDTH, 0)
    return out


def quantised_gate(gate_up: Tensor, activation: Activation, form: CodeFormat) -> Codes:
    """The same, whose result is rounded and then quantised; a program takes whole groups."""
    rows, features = gate_up.shape[0], gate_up.shape[1] // 2
    out = room_for(rows, features, form, gate_up)
    width = next_power_of_2(features) if form.group is None else max(_WIDTH, form.group)
    _launch(gate_up, activation, out.values, out.scales, width, form.group or width)
    return out


def _launch(
    gate_up: Tensor,
    activation: Activation,
    out: Tensor,
    scales: Tensor | None,
    width: int,
    group: int,
) -> None:
    rows, features = out.shape
    if rows == 0:
        return
    _act_and_mul[(rows, cdiv(features, width))](
        gate_up.contiguous(),
        out,
        out if scales is None else scales,
        rows,
        FEATURES=features,
        WIDTH=width,
        GROUP=group,
        GELU=activation is Activation.GELU_TANH,
        num_warps=min(16, max(4, width // 1024)),
        **pdl_launch(gate_up.device),
    )


@triton.jit(do_not_specialize=["rows"])
def _act_and_mul(
    gate_up,
    out,
    scales,
    rows,
    FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    dtype: tl.constexpr = gate_up.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * WIDTH
    lane = first + tl.arange(0, WIDTH)
    live = lane < FEATURES
    trigger_then_wait(PDL)
    source = gate_up + row * (2 * FEATURES) + lane
    gate = tl.load(source, mask=live, other=0.0).to(tl.float32)
    up = tl.load(source + FEATURES, mask=live, other=0.0).to(tl.float32)
    # Rounded before it is multiplied, as models were trained.
    activated = activate(gate, GELU).to(dtype).to(tl.float32)
    result = (activated * up).to(dtype)
    if GROUP > 0:
        write_codes(result, out, scales, row, rows, first, FEATURES, WIDTH, GROUP)
    else:
        tl.store(out + row * FEATURES + lane, result, mask=live)


@triton.jit
def activate(gate, GELU: tl.constexpr):
    """SiLU; or GELU by its approximation with tanh, of which `(1 + tanh(x)) / 2 = sigmoid(2 x)`."""
    x = gate
    if GELU:
        x = 1.5957691216057308 * gate * (1 + 0.044715 * gate * gate)  # sqrt(8 / pi)
    return gate * tl.sigmoid(x)
