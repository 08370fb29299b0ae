"""`quant_method` awq: words of codes along the outputs, in an order of their own.

    qweight  [inputs, outputs / 8]    qzeros  [groups, outputs / 8]    scales  [groups, outputs]

The eight codes of a word are those of outputs 0 2 4 6 1 3 5 7, from the lowest bits up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from quire.checks import shown
from quire.errors import ModelError
from quire.layers.formats import MatrixFormat
from quire.layers.quantized.grouped import Grouped
from quire.models.checkpoints.json_fields import Raw, flag, text
from quire.models.checkpoints.lazy_tensor import LazyTensor
from quire.models.checkpoints.tensor_views import Transposed
from quire.models.quantization.checkpoint import CheckpointFormats, check_words, matrix_rows
from quire.models.quantization.fp8 import ignored_layers
from quire.models.quantization.groups import read_bits, read_group
from quire.models.quantization.views import AWQ_ORDER, PackedPairs, UnpackedRows

BITS = 4


@dataclass(frozen=True)
class AwqFormats(CheckpointFormats):
    codes: ClassVar[str] = "qweight"
    scales: ClassVar[str] = "scales"

    group: int | None = None

    def format_of(self, *names: str) -> MatrixFormat:
        return Grouped(bits=BITS, group=self.group, has_zeros=True, scale_dtype=self.scale_dtype)

    def layer(self, name: str, tensors: Mapping[str, LazyTensor]) -> Mapping[str, LazyTensor]:
        rest = dict(tensors)
        for ending in ("qweight", "qzeros", "scales"):
            if ending not in rest:
                raise ModelError(f"{name}.{ending} is missing: download the model again.")
            check = matrix_rows if ending == "scales" else check_words
            check(f"{name}.{ending}", rest[ending])
        codes = unpacked(rest.pop("qweight"))
        return {
            "weight": PackedPairs(codes),
            "weight_zero": unpacked(rest.pop("qzeros")),
            "weight_scale": Transposed(rest.pop("scales")),
            **rest,
        }


def unpacked(words: LazyTensor) -> UnpackedRows:
    per_word = 32 // BITS
    return UnpackedRows(Transposed(words), words.shape[1] * per_word, BITS, AWQ_ORDER)


def read_awq(raw: Raw) -> AwqFormats:
    version = (text(raw, "version") or "gemm").lower()
    if version != "gemm":
        raise ModelError(
            f"The weights are quantised by awq in the version {shown(version)}, which Quire does "
            f"not read: use one in the version gemm."
        )
    if not flag(raw, "zero_point", True):
        raise ModelError(
            "The weights are quantised by awq without zero points, which Quire does not read: "
            "use a model with zero_point=true."
        )
    read_bits(raw, "bits" if "bits" in raw else "w_bit", "awq", (BITS,))
    key = "group_size" if "group_size" in raw else "q_group_size"
    return AwqFormats(ignored_layers(raw), group=read_group(raw, key))
