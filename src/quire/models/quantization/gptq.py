"""`quant_method` gptq: words of codes along the inputs, in groups, with zeros and maybe an index.

    qweight  [inputs / codes in a word, outputs]    qzeros  [groups, outputs / codes in a word]
    scales   [groups, outputs]                      g_idx   [inputs]

The first version of the format stores each zero one lower than it is. `g_idx` counts whatever the
config says: `desc_act` tells in which order inputs were quantised, and libraries go by the index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

from quire.checks import shown
from quire.errors import ModelError
from quire.layers.formats import MatrixFormat
from quire.layers.quantized.grouped import Grouped
from quire.models.checkpoints.json_fields import Raw, flag, text
from quire.models.checkpoints.lazy_tensor import LazyTensor
from quire.models.checkpoints.tensor_views import Spare, Transposed
from quire.models.quantization.checkpoint import CheckpointFormats, check_words, matrix_rows
from quire.models.quantization.fp8 import ignored_layers
from quire.models.quantization.groups import read_bits, read_group
from quire.models.quantization.names import is_head, read_names
from quire.models.quantization.views import AsBytes, UnpackedRows, is_in_order, is_zero

ENDINGS = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True)
class GptqFormats(CheckpointFormats):
    codes: ClassVar[str] = "qweight"
    scales: ClassVar[str] = "scales"

    bits: int = 4
    group: int | None = None
    by_index: bool = False
    zero_plus: int = 1
    in_block: tuple[str, ...] | None = None  # the layers of a block that are quantised; None: all

    def format_of(self, *names: str) -> MatrixFormat:
        return Grouped(
            bits=self.bits,
            group=self.group,
            has_zeros=True,
            by_index=self.by_index,
            scale_dtype=self.scale_dtype,
        )

    def is_said_of(self, names: Sequence[str]) -> bool:
        if not super().is_said_of(names):
            return False
        if self.in_block is None or is_head(names):
            return True
        return any(f".{name}".endswith(f".{each}") for name in names for each in self.in_block)

    def fitted_to(self, tensors: Mapping[str, LazyTensor]) -> GptqFormats:
        fitted = super().fitted_to(tensors)
        by_index = self.by_index or any(
            not self._says_nothing(tensor, tensors.get(f"{name.removesuffix('g_idx')}qweight"))
            for name, tensor in tensors.items()
            if name.endswith(".g_idx")
        )
        return replace(fitted, by_index=by_index)

    def layer(self, name: str, tensors: Mapping[str, LazyTensor]) -> Mapping[str, LazyTensor]:
        rest = {ending: t for ending, t in tensors.items() if ending not in ENDINGS}
        for ending in ("qweight", "qzeros", "scales"):
            if ending not in tensors:
                raise ModelError(f"{name}.{ending} is missing: download the model again.")
            check = matrix_rows if ending == "scales" else check_words
            check(f"{name}.{ending}", tensors[ending])
        if "bias" in rest and is_zero(rest["bias"]):
            rest["bias"] = Spare(rest["bias"])  # older versions give one to every layer
        outputs = tensors["qweight"].shape[1]
        zeros = UnpackedRows(Transposed(tensors["qzeros"]), outputs, self.bits, (), self.zero_plus)
        views: dict[str, LazyTensor] = {
            "weight": AsBytes(Transposed(tensors["qweight"])),
            "weight_scale": Transposed(tensors["scales"]),
            "weight_zero": zeros,
        }
        if self.by_index and "g_idx" in tensors:
            views["g_idx"] = tensors["g_idx"]
        return {**rest, **views}

    def _says_nothing(self, index: LazyTensor, codes: LazyTensor | None) -> bool:
        """One of another length than the codes' inputs is loaded, which says so."""
        if codes is not None:
            inputs = tuple(words * (32 // self.bits) for words in codes.shape[:1])
            if tuple(index.shape) != inputs:
                return False
        return is_in_order(index, self.group)


def read_gptq(raw: Raw) -> GptqFormats:
    version = text(raw, "checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise ModelError(
            f"The weights are quantised by gptq in the format {shown(version)}, which Quire does "
            f"not read: use one in the formats gptq or gptq_v2."
        )
    if raw.get("dynamic"):
        raise ModelError(
            "The weights are quantised by gptq with settings for single layers (dynamic), which "
            "Quire does not read: choose a model without."
        )
    group = read_group(raw, "group_size")
    return GptqFormats(
        ignored_layers(raw) + read_names(raw, "modules_not_to_convert"),
        head=flag(raw, "lm_head"),
        bits=read_bits(raw, "bits", "gptq"),
        group=group,
        by_index=flag(raw, "desc_act") and group is not None,
        zero_plus=1 if version == "gptq" else 0,
        in_block=read_in_block(raw),
    )


def read_in_block(raw: Raw) -> tuple[str, ...] | None:
    """Lists of names within a block, in the order of quantising; or one list."""
    key = "modules_in_block_to_quantize"
    value: Any = raw.get(key)
    if value is None:
        return None
    if isinstance(value, list) and value and all(isinstance(each, list) for each in value):
        value = list(chain.from_iterable(value))
    return read_names({key: value}, key)
