"""What a linear layer of any kernel is held to: the same numbers, multiplied in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def check(out: Tensor, wanted: Tensor, slack: int) -> None:
    """So many roundings of the dtype, of numbers about 1."""
    eps = 1e-5 if out.dtype == torch.float32 else slack * torch.finfo(out.dtype).eps
    assert out.shape == wanted.shape
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=eps, atol=eps)
