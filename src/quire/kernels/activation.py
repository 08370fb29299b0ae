"""What the gate of an MLP goes through before it is multiplied with the other half."""

from __future__ import annotations

from enum import Enum


class Activation(Enum):
    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
