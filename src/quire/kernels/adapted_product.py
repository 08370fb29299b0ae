"""A matrix's product to which adapters have yet to add: the norm behind it does that as it reads.

A launch less for each matrix that a norm follows: `RowLinear.delta` makes it of a decode, layers
hand it on as they do a tensor, and it ends in `RMSNorm`. All others ask for tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quire.kernels.adapter_slots import AdapterBatch, AdapterSlots


@dataclass(frozen=True, eq=False)
class AdaptedProduct:
    """On a GPU. One of the two sums is to be asked for, once."""

    product: Tensor  # [rows, features]: the matrix's own
    hidden: Tensor  # `a x`, as `expand` reads it
    slots: AdapterSlots
    batch: AdapterBatch

    def summed(self) -> Tensor:
        """By a launch of its own; the sums may take the product's place."""
        from quire.kernels.triton.adapters.expand import expand, expanded

        if not self.product.is_contiguous():  # but columns of a joint product
            return expanded(self.hidden, self.slots, self.batch, self.product)
        expand(self.hidden, self.slots, self.batch, self.product)
        return self.product

    def add_rms_norm(self, stream: Tensor, weight: Tensor, eps: float) -> Tensor:
        """What `Backend.add_rms_norm` does with `summed`, in one launch."""
        from quire.kernels.triton.adapters.norm import add_adapted_norm

        return add_adapted_norm(
            stream, self.product, self.hidden, self.slots, self.batch, weight, eps
        )


Delta = Tensor | AdaptedProduct  # what a block adds to the residual stream
