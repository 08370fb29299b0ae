"""What the gate of an MLP goes through before it is multiplied with the other half."""

from __future__ import annotations

from enum import Enum

import torch.nn.functional as F
from torch import Tensor


class Activation(Enum):
    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"

    def __call__(self, gate: Tensor) -> Tensor:
        return F.silu(gate) if self is Activation.SILU else F.gelu(gate, approximate="tanh")
