"""`quant_method` mxfp4, as gpt-oss has it: experts in MXFP4, all else dense.

NAME_blocks  [experts, outputs, inputs / 32, 16]    NAME_scales  [experts, outputs, inputs / 32]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from quire.layers.formats import Dense, MatrixFormat
from quire.layers.quantized.fp4 import Mxfp4
from quire.layers.quantized.mxfp4_blocks import Mxfp4Blocks
from quire.models.checkpoints.json_fields import Raw
from quire.models.checkpoints.lazy_tensor import LazyTensor
from quire.models.quantization.checkpoint import CheckpointFormats
from quire.models.quantization.fp8 import ignored_layers
from quire.models.quantization.views import Flattened

BLOCKS, SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class Mxfp4Formats(CheckpointFormats):
    in_blocks: bool = False

    def format_of(self, *names: str) -> MatrixFormat:
        if not any(".experts." in f"{name}." for name in names):
            return Dense()
        return Mxfp4Blocks() if self.in_blocks else Mxfp4()

    def as_a_cpu_multiplies(self) -> Mxfp4Formats:
        return replace(self, in_blocks=True)

    def layer(self, name: str, tensors: Mapping[str, LazyTensor]) -> Mapping[str, LazyTensor]:
        return dict(self._shown(tensors))

    def is_quantised(self, of_layer: Mapping[str, LazyTensor]) -> bool:
        return any(ending.endswith(BLOCKS) for ending in of_layer)

    def _shown(self, tensors: Mapping[str, LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
        for ending, tensor in tensors.items():
            if ending.endswith(BLOCKS):
                yield f"{ending.removesuffix(BLOCKS)}.weight", Flattened(tensor, kept=2)
            elif ending.endswith(SCALES):
                yield f"{ending.removesuffix(SCALES)}.weight_scale", tensor
            else:
                yield ending, tensor


def read_mxfp4(raw: Raw) -> Mxfp4Formats:
    return Mxfp4Formats(ignored_layers(raw))
