"""`quant_method` gptq: words of codes along the inputs, in groups, with zeros and maybe an index.

    qweight  [inputs / codes in a word, outputs]    qzeros  [groups, outputs / codes in a word]
    scales   [groups, outputs]                      g_idx   [inputs]

The first version of the format stores each zero one lower than it is.
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
from quire.models.quantization.names import read_names
from quire.models.quantization.views import AsBytes, UnpackedRows, whole

ENDINGS = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True)
class GptqFormats(CheckpointFormats):
    codes: ClassVar[str] = "qweight"
    scales: ClassVar[str] = "scales"

    bits: int = 4
    group: int | None = None
    by_index: bool = False
    zero_plus: int = 1

    def format_of(self, *names: str) -> MatrixFormat:
        return Grouped(
            bits=self.bits,
            group=self.group,
            has_zeros=True,
            by_index=self.by_index,
            scale_dtype=self.scale_dtype,
        )

    def layer(self, name: str, tensors: Mapping[str, LazyTensor]) -> Mapping[str, LazyTensor]:
        rest = {ending: t for ending, t in tensors.items() if ending not in ENDINGS}
        for ending in ("qweight", "qzeros", "scales"):
            if ending not in tensors:
                raise ModelError(f"{name}.{ending} is missing: download the model again.")
            check = matrix_rows if ending == "scales" else check_words
            check(f"{name}.{ending}", tensors[ending])
        if "bias" in rest and not bool(whole(rest["bias"]).any()):
            del rest["bias"]  # older versions give one to every layer, those without it, too
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
    )
