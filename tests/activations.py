"""What the gate of an MLP goes through, for numbers of any type; in float64 it is exact."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation import Activation


def gelu_tanh(x: Tensor) -> Tensor:
    """As `torch` has it too, but without the rounding of `1 + tanh(…)` for negative numbers."""
    return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))


EXACT = {Activation.SILU: F.silu, Activation.GELU_TANH: gelu_tanh}
