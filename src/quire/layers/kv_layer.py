"""The part of a decoder layer that stores KV, as the cache sees it."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.codes import Activations
from quire.kernels.plain import Rotation
from quire.kv_groups import KVStream
from quire.layers.attention import Step
from quire.layers.tp import TensorParallel
from quire.layers.weights import Block


class KVLayer(Block):
    """An attention block: what it stores for each token, and how far back it looks."""

    layer: int
    window: int | None

    def streams(self, tp: TensorParallel) -> tuple[KVStream, ...]:
        """What one rank stores."""
        raise NotImplementedError

    def onto(self, stream: Tensor, x: Activations, rotation: Rotation, step: Step) -> Tensor | None:
        """What is to be added to `stream`; None: its last product has added it."""
        out: Tensor = self(x, rotation, step)
        return out
