"""What the gate of an MLP goes through before it is multiplied with the other half."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch.nn.functional as F
from torch import Tensor


class Activation(Enum):
    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"

    def __call__(self, gate: Tensor) -> Tensor:
        return F.silu(gate) if self is Activation.SILU else F.gelu(gate, approximate="tanh")


@dataclass(frozen=True)
class ClampedSwiGLU:
    """How gpt-oss joins the two halves: `gate * sigmoid(alpha * gate) * (up + 1)`.

    The gate is clamped to at most `limit`, `up` to that on both sides. Only experts have it.
    """

    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """In float32, rounded once."""
        clamped = gate.float().clamp(max=self.limit)
        added = up.float().clamp(-self.limit, self.limit) + 1.0
        return (clamped * (clamped * self.alpha).sigmoid() * added).to(gate.dtype)


Gating = Activation | ClampedSwiGLU
