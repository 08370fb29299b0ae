"""`quant_method` modelopt, in config.json or, by older versions, in hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quire.checks import shown
from quire.errors import ModelError
from quire.layers.formats import MatrixFormat
from quire.layers.quantized.fp4 import NVFP4_GROUP, Nvfp4
from quire.layers.quantized.scaled import Fp8
from quire.models.checkpoints.json_fields import Raw, mapping, refusal, text
from quire.models.checkpoints.lazy_tensor import LazyTensor
from quire.models.quantization.checkpoint import CheckpointFormats, matrix_rows
from quire.models.quantization.groups import read_group
from quire.models.quantization.names import read_names
from quire.models.quantization.views import row_scales

FP8_NAMES = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
NVFP4_NAME = "NVFP4"


@dataclass(frozen=True)
class ModelOptFormats(CheckpointFormats):
    is_fp4: bool = False

    def format_of(self, *names: str) -> MatrixFormat:
        return Nvfp4() if self.is_fp4 else Fp8()

    def is_quantised(self, of_layer: Mapping[str, LazyTensor]) -> bool:
        return "weight_scale" in of_layer and "weight" in of_layer

    def layer(self, name: str, tensors: Mapping[str, LazyTensor]) -> Mapping[str, LazyTensor]:
        """NVFP4 has codes under the name of numbers, and a second scale over all groups."""
        rest = dict(tensors)
        if "pre_quant_scale" in rest:
            raise ModelError(
                f"{name}.pre_quant_scale scales the layer's inputs, which Quire does not do: "
                f"choose a model that was quantised without it."
            )
        rows = matrix_rows(f"{name}.weight", rest["weight"])
        over_all = rest.pop("weight_scale_2", None)
        if rest["weight"].dtype != torch.uint8:
            return {**rest, "weight_scale": row_scales(rest["weight_scale"], rows)}
        if over_all is not None:
            rest["weight_scale_over_all"] = row_scales(over_all, rows)
        return rest


def read_modelopt(raw: Raw) -> ModelOptFormats:
    raw = {**raw, **mapping(raw, "quantization")}
    algorithm = text(raw, "quant_algo")
    ignored = read_names(raw, "exclude_modules") + read_names(raw, "ignore")
    if algorithm in FP8_NAMES:
        return ModelOptFormats(ignored)
    if algorithm == NVFP4_NAME:
        if read_group(raw, "group_size", NVFP4_GROUP) != NVFP4_GROUP:
            raise refusal("NVFP4's group_size", raw.get("group_size"), f"{NVFP4_GROUP}")
        return ModelOptFormats(ignored, is_fp4=True)
    raise ModelError(
        f"The weights are quantised by modelopt with {shown(algorithm)}, which Quire does not "
        f"read; it reads {', '.join((*FP8_NAMES, NVFP4_NAME))}."
    )
