"""RMS normalisation, over the residual stream and over single heads.

With a unit offset (Gemma) a checkpoint stores how far each weight is from 1. Near 1 a 16-bit number
is much coarser than near 0, so these layers keep `1 + stored` in float32, whatever the model
computes in; the kernels then round once, after the multiplication, as these models were trained.
Other models that were trained so (gpt-oss) keep their weights in float32, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.kernels.adapted_product import AdaptedProduct, Delta
from quire.kernels.backend import Backend
from quire.kernels.codes import Activations
from quire.kernels.plain import HeadScale
from quire.layers.weights import Block, Layer, TensorPlace, Weight, parameter, sibling


class RMSNorm(Layer):
    """Normalises the residual stream on its way into a block."""

    def __init__(self, size: int, eps: float, unit_offset: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.unit_offset = self.in_float32 = unit_offset
        self.weight = parameter(size)

    def dtype_in_memory(self, dtype: torch.dtype, declared: torch.dtype) -> torch.dtype:
        return torch.float32 if self.in_float32 else dtype

    def forward(
        self,
        stream: Tensor,
        delta: Delta | None,
        backend: Backend,
        reader: Block | None = None,
    ) -> Activations:
        """Add `delta`, what the last block computed, to `stream` in place; then normalise.

        `reader` is the block that the result goes into, which may take codes.
        """
        form = None if reader is None else reader.takes(len(stream), stream.dtype)
        if isinstance(delta, AdaptedProduct):
            if form is None:
                return delta.add_rms_norm(stream, self.weight, self.eps)
            delta = delta.summed()
        if form is not None:
            return backend.quantised_norm(stream, delta, self.weight, self.eps, form)
        return backend.add_rms_norm(stream, delta, self.weight, self.eps)

    def weights(self, path: str) -> Iterator[Weight]:
        shape, place = tuple(self.weight.shape), TensorPlace(self.weight)
        yield Weight(f"{path}.weight", shape, place, offset=float(self.unit_offset))


class HeadNorm(Layer):
    """Normalises each head of q and k, which lie side by side.

    `order` is that of a head's features, where it is not the checkpoint's (`layers/rope.py`).
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        order: tuple[int, ...] = (),
        unit_offset: bool = False,
    ) -> None:
        super().__init__()
        self.order = order
        self.eps = eps
        self.unit_offset = unit_offset
        self.heads = heads
        self.weight = parameter(heads + kv_heads, head_dim)  # all rows of q alike, all of k alike

    def dtype_in_memory(self, dtype: torch.dtype, declared: torch.dtype) -> torch.dtype:
        return torch.float32 if self.unit_offset else dtype

    @property
    def scale(self) -> HeadScale:
        return HeadScale(self.weight, self.eps)

    def weights(self, path: str) -> Iterator[Weight]:
        shape, offset = tuple(self.weight.shape[1:]), float(self.unit_offset)
        places = {"q_norm": self.weight[: self.heads], "k_norm": self.weight[self.heads :]}
        for name, place in places.items():
            name = sibling(path, f"{name}.weight")
            yield Weight(name, shape, TensorPlace(place), order=self.order, offset=offset)
