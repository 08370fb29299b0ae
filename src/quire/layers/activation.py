"""What the gate of an MLP goes through before it is multiplied with the other half."""

from __future__ import annotations

from enum import Enum


class Activation(Enum):
    SILU = "silu"  # fused with the product where a backend can
    GELU_TANH = "gelu_pytorch_tanh"
