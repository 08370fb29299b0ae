"""The formats that a config.json names, by its `quant_method`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from quire.checks import shown
from quire.errors import ModelError
from quire.layers.formats import AllDense, MatrixFormats
from quire.models.checkpoints.json_fields import Raw, text
from quire.models.quantization.awq import read_awq
from quire.models.quantization.checkpoint import SCALE_DTYPES, CheckpointFormats
from quire.models.quantization.compressed_tensors import read_compressed_tensors
from quire.models.quantization.fp8 import read_fbgemm_fp8, read_fp8
from quire.models.quantization.gptq import read_gptq
from quire.models.quantization.modelopt import read_modelopt
from quire.models.quantization.mxfp4 import read_mxfp4

METHODS: dict[str, Callable[[Raw], CheckpointFormats]] = {
    "fp8": read_fp8,
    "fbgemm_fp8": read_fbgemm_fp8,
    "compressed-tensors": read_compressed_tensors,
    "awq": read_awq,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "mxfp4": read_mxfp4,
}


def read_formats(raw: Raw) -> MatrixFormats:
    """Those of a checkpoint's matrices; all dense where its config.json says nothing."""
    written: Any = raw.get("quantization_config")
    if not written:
        return AllDense()
    method = written.get("quant_method") if isinstance(written, dict) else written
    if not isinstance(written, dict) or not isinstance(method, str) or method not in METHODS:
        raise ModelError(
            f"The weights are quantised by {shown(method)}, which Quire does not read; it reads "
            f"{', '.join(METHODS)} and GGUF files."
        )
    formats = METHODS[method](written)
    dtype = text(raw, "dtype") or text(raw, "torch_dtype") or ""
    return replace(formats, scale_dtype=SCALE_DTYPES.get(dtype, torch.float32))
