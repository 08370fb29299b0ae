"""Attention in a decoder layer: what the cache sees of it, and the product behind its heads."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.codes import Activations
from quire.kernels.plain import Rotation
from quire.kv_groups import KVStream
from quire.layers.attention import Step
from quire.layers.linear import RowLinear
from quire.layers.tp import TensorParallel
from quire.layers.weights import Block


class KVLayer(Block):
    """An attention block: what it stores for each token, and how far back it looks."""

    layer: int
    window: int | None
    o_proj: RowLinear

    def streams(self, tp: TensorParallel) -> tuple[KVStream, ...]:
        """What one rank stores."""
        raise NotImplementedError

    def heads(self, x: Activations, rotation: Rotation, step: Step) -> Tensor:
        """What this rank's heads find, side by side: `[tokens, features]`."""
        raise NotImplementedError

    def forward(self, x: Activations, rotation: Rotation, step: Step) -> Tensor:
        out: Tensor = self.o_proj(self.heads(x, rotation, step))
        return out

    def onto(self, stream: Tensor, x: Activations, rotation: Rotation, step: Step) -> Tensor | None:
        """The same to be added to `stream`; None: its last product has added it."""
        return self.o_proj.onto(stream, self.heads(x, rotation, step))
