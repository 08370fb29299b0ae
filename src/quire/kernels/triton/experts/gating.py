"""What joins the two halves of an expert's first product."""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.triton.act_and_mul import activate


@triton.jit
def join(gate, up, dtype: tl.constexpr, GELU: tl.constexpr):
    """Of float32 sums, `activation(gate) * up`, rounded where models in plain torch round."""
    activated = activate(gate.to(dtype).to(tl.float32), GELU).to(dtype).to(tl.float32)
    return (activated * up.to(dtype).to(tl.float32)).to(dtype)
