"""What joins the two halves of an expert's first product."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.activation import Activation, ClampedSwiGLU, Gating
from quire.kernels.triton.act_and_mul import activate


def gating_of(activation: Gating | None) -> dict[str, bool | float]:
    """The arguments of a kernel that calls `join`; without an activation it does not."""
    if isinstance(activation, ClampedSwiGLU):
        clamp = {"CLAMPED": True, "ALPHA": activation.alpha, "LIMIT": activation.limit}
    else:
        clamp = {"CLAMPED": False, "ALPHA": 0.0, "LIMIT": 0.0}
    return {"GELU": activation is Activation.GELU_TANH, **clamp}


@triton.jit
def join(
    gate,
    up,
    dtype: tl.constexpr,
    GELU: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Of float32 sums, what `Gating` says, rounded where models in plain torch round."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if CLAMPED:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        result = gate * tl.sigmoid(gate * ALPHA) * up
    else:
        result = activate(gate, GELU).to(dtype).to(tl.float32) * up
    return result.to(dtype)
