"""`quant_method` fp8 and fbgemm_fp8: e4m3 codes, a scale for a tensor, a row, or a block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quire.layers.formats import MatrixFormat
from quire.layers.quantized.scaled import Fp8
from quire.models.checkpoints.json_fields import Raw, refusal, text
from quire.models.checkpoints.lazy_tensor import LazyTensor
from quire.models.quantization.checkpoint import CheckpointFormats, matrix_rows
from quire.models.quantization.expert_scales import scales_beside_codes
from quire.models.quantization.names import read_names
from quire.models.quantization.views import row_scales

MOST_BLOCK = 1 << 16


@dataclass(frozen=True)
class Fp8Formats(CheckpointFormats):
    block: tuple[int, int] | None = None

    def format_of(self, *names: str) -> MatrixFormat:
        return Fp8(block=self.block)

    def by_expert(self, tensors: Mapping[str, LazyTensor]) -> Mapping[str, LazyTensor]:
        return scales_beside_codes(tensors, None if self.block is None else self.block[0])

    def is_quantised(self, of_layer: Mapping[str, LazyTensor]) -> bool:
        weight = of_layer.get("weight")
        return weight is not None and weight.dtype == torch.float8_e4m3fn

    def layer(self, name: str, tensors: Mapping[str, LazyTensor]) -> Mapping[str, LazyTensor]:
        """The scale may be called the inverse of what quantised: the same number."""
        rest = dict(tensors)
        rows = matrix_rows(f"{name}.weight", rest["weight"])
        scale = rest.pop("weight_scale_inv", rest.pop("weight_scale", None))
        if scale is None:
            return rest
        blocks = self.block is not None
        return {**rest, "weight_scale": scale if blocks else row_scales(scale, rows)}


def read_fp8(raw: Raw) -> Fp8Formats:
    scheme = text(raw, "activation_scheme")
    if scheme not in (None, "dynamic", "static"):
        raise refusal("quantization_config.activation_scheme", scheme, "dynamic or static")
    return Fp8Formats(ignored_layers(raw), block=read_block(raw, "weight_block_size"))


def read_fbgemm_fp8(raw: Raw) -> Fp8Formats:
    return Fp8Formats(ignored_layers(raw))


def ignored_layers(raw: Raw) -> tuple[str, ...]:
    """Under the name of `transformers`, or of older checkpoints."""
    return read_names(raw, "modules_to_not_convert") + read_names(raw, "ignored_layers")


def read_block(raw: Raw, key: str) -> tuple[int, int] | None:
    """Rows and columns of a block; None where there are none."""
    value: Any = raw.get(key)
    if value is None:
        return None
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(size) is int and 0 < size <= MOST_BLOCK for size in value):
        raise refusal(f"quantization_config.{key}", value, "two sizes of a block")
    return (value[0], value[1])
