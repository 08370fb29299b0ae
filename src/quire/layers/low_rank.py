"""What an adapter adds to a product: two matrices so narrow that both cost little (LoRA)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """`y += B (A x) + bias` for one of the checkpoint's matrices, of which this is one rank's part.

    The adapter's scale is in B. Of experts, every tensor has one more dimension in front: one
    entry for each of the experts that this rank holds.
    """

    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank]
    bias: Tensor | None = None  # [outputs]

    @property
    def rank(self) -> int:
        return self.b.shape[-1]

    def tensors(self) -> Iterator[Tensor]:
        yield from (self.a, self.b)
        if self.bias is not None:
            yield self.bias
