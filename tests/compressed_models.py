"""Tiny models that the library `compressed-tensors` quantises, writes, and reads back."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor, decompress_module
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from quantized_models import SHAPE
from torch import Tensor, nn

LINEAR = ["Linear"]


def scheme(preset: str, targets: list[str] | None = None, **weights: Any) -> QuantizationScheme:
    """One of the library's presets, with other settings for its weights."""
    found = preset_name_to_scheme(preset, targets or LINEAR)
    settings = found.weights.model_dump() | weights
    return found.model_copy(update={"weights": QuantizationArgs(**settings)})


def smallest_and_largest(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """Those of all numbers that share a scale, in the shape that the library has scales in."""
    rows, columns = weight.shape
    height, width = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "group": (1, args.group_size),
        "tensor_group": (1, args.group_size),
        "block": tuple(args.block_structure or ()),
    }[str(getattr(args.strategy, "value", args.strategy))]
    padded = nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    return blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))


def set_scales(layer: nn.Module) -> None:
    """From the weights' ends, as without calibration; those of inputs are of no consequence."""
    args = layer.quantization_scheme.weights
    low, high = smallest_and_largest(layer.weight, args)
    over_all = None
    if hasattr(layer, "weight_global_scale"):
        over_all = generate_gparam(low.amin(), high.amax())
        layer.weight_global_scale.data = over_all.reshape(1)
    scale, zero = calculate_qparams(low, high, args, global_scale=over_all)
    layer.weight_scale.data = scale.reshape(layer.weight_scale.shape)
    if hasattr(layer, "weight_zero_point"):
        layer.weight_zero_point.data = zero.reshape(layer.weight_zero_point.shape)
    for name in ("input_scale", "input_global_scale"):
        if hasattr(layer, name):
            getattr(layer, name).data.fill_(0.25)


def decompress(model: nn.Module) -> None:
    """By the library, whose NVFP4 alone would be rounded to bfloat16."""
    for layer in model.modules():
        if not isinstance(layer, nn.Linear) or not hasattr(layer, "quantization_scheme"):
            continue
        found = layer.quantization_scheme
        if found.format != "nvfp4-pack-quantized":
            decompress_module(layer)
            continue
        rows, half = layer.weight_packed.shape
        layer.weight = nn.Parameter(
            dequantize(
                unpack_fp4_from_uint8(layer.weight_packed, rows, 2 * half, dtype=torch.float32),
                layer.weight_scale.float(),
                args=found.weights,
                global_scale=layer.weight_global_scale,
                dtype=torch.float32,
            )
        )


class CompressedModel:
    """A folder as the library writes it, and the logits of what the library makes of it."""

    def __init__(
        self,
        folder: Path,
        *schemes: QuantizationScheme,
        ignore: tuple[str, ...] = ("lm_head",),
        kv_cache: QuantizationArgs | None = None,
        written_as: str | None = None,
        **changes: Any,
    ) -> None:
        import transformers

        torch.manual_seed(3)
        config = transformers.LlamaConfig(**{**SHAPE, **changes})
        config.architectures = ["LlamaForCausalLM"]
        model = transformers.LlamaForCausalLM(config).eval().float()
        groups = {f"group_{i}": each for i, each in enumerate(schemes)}
        wanted = QuantizationConfig(
            config_groups=groups, ignore=list(ignore), kv_cache_scheme=kv_cache
        )
        with contextlib.redirect_stderr(io.StringIO()):  # bars of progress
            apply_quantization_config(model, wanted)
            for layer in model.modules():
                if isinstance(layer, nn.Linear) and hasattr(layer, "quantization_scheme"):
                    set_scales(layer)
                for name in ("k_scale", "v_scale"):
                    if hasattr(layer, name):
                        getattr(layer, name).data.fill_(0.125)
            compressor = ModelCompressor.from_pretrained_model(model, written_as)
            compressor.compress_model(model)
            model.save_pretrained(folder)
            compressor.update_config(str(folder))
            decompress(model)
        self.folder = folder
        self.config = json.loads((folder / "config.json").read_text())["quantization_config"]
        self.oracle = transformers.LlamaForCausalLM(config).eval().float()
        names = self.oracle.state_dict().keys()
        self.oracle.load_state_dict({k: v for k, v in model.state_dict().items() if k in names})

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        found: Tensor = self.oracle(torch.tensor([ids])).logits[0]
        return found
