"""Tiny models as each method writes them, beside the numbers that their codes stand for.

Layouts follow the methods' own specifications; everything here is plain numpy and Python, so that
it shares nothing with what it holds to account.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from expert_checkpoints import fused, one_by_one
from safetensors.torch import save_file
from torch import Tensor

SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
FP8 = torch.float8_e4m3fn
Stored = dict[str, Tensor]
Encode = Callable[[str, Tensor], tuple[Stored, Tensor]]


def words(codes: np.ndarray, bits: int) -> Tensor:
    """Codes along the last dimension, several in an int32, the lowest bits first."""
    per_word = 32 // bits
    rows = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, per_word)
    packed = np.zeros(rows.shape[:-1], np.uint32)
    for i in range(per_word):
        packed |= rows[..., i] << np.uint32(bits * i)
    return torch.from_numpy(packed.view(np.int32).copy())


def pairs(codes: np.ndarray) -> Tensor:
    return torch.from_numpy((codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8))


# ── fp8 and int8 ──────────────────────────────────────────────────────────────────────────────────


def fp8(name: str, weight: Tensor, by: str = "tensor", ending: str = "weight_scale") -> Any:
    shape = {"tensor": (), "one": (1,), "row": (len(weight), 1), "rows": (len(weight),)}[by]
    sizes = weight.abs().amax() if by in ("tensor", "one") else weight.abs().amax(1)
    scale = (sizes / 448).reshape(shape)
    over = scale.reshape(-1, 1)
    codes = (weight / over).to(FP8)
    return {"weight": codes, ending: scale}, codes.float() * over


def fp8_blocks(name: str, weight: Tensor, size: int = 128, ending: str = "weight_scale_inv") -> Any:
    scale = torch.empty(-(-weight.shape[0] // size), -(-weight.shape[1] // size))
    codes, dense = torch.empty_like(weight, dtype=FP8), torch.empty_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
            scale[i, j] = weight[block].abs().amax() / 448
            codes[block] = (weight[block] / scale[i, j]).to(FP8)
            dense[block] = codes[block].float() * scale[i, j]
    return {"weight": codes, ending: scale}, dense


def with_static_scales(encode: Encode) -> Encode:
    def both(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        stored, dense = encode(name, weight)
        return {**stored, "input_scale": torch.tensor(0.25)}, dense

    return both


def with_zero_bias(encode: Encode) -> Encode:
    """As older versions of AutoGPTQ write every layer."""

    def both(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
        stored, dense = encode(name, weight)
        return {**stored, "bias": torch.zeros(len(weight))}, dense

    return both


def int8(name: str, weight: Tensor, asymmetric: bool = False) -> tuple[Stored, Tensor]:
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if not asymmetric:
        scale = weight.abs().amax(1, keepdim=True) / 127
        codes = (weight / scale).round().to(torch.int8)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale
    scale = (high - low) / 255
    zero = (-128 - low / scale).round()
    codes = (weight / scale + zero).round().clamp(-128, 127)
    stored = {
        "weight": codes.to(torch.int8),
        "weight_scale": scale,
        "weight_zero_point": zero.to(torch.int8),
    }
    return stored, (codes - zero) * scale


# ── groups of unsigned codes ──────────────────────────────────────────────────────────────────────


def grouped(
    weight: Tensor, bits: int, group: int, symmetric: bool, index: Tensor | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Tensor]:
    """Codes `[out, in]`, scales and zeros `[out, groups]`, and the numbers that they stand for."""
    out, inputs = weight.shape
    levels = 2**bits
    index = torch.arange(inputs) // group if index is None else index
    count = int(index.max()) + 1
    scales, zeros = np.zeros((out, count), np.float16), np.zeros((out, count), np.int64)
    codes, dense = np.zeros((out, inputs), np.int64), np.zeros((out, inputs), np.float32)
    for g in range(count):
        columns = np.flatnonzero((index == g).numpy())
        part = weight[:, columns].numpy()
        low, high = np.minimum(part.min(1), -1e-3), np.maximum(part.max(1), 1e-3)
        if symmetric:
            scale = (np.maximum(-low, high) / (levels / 2 - 1)).astype(np.float16)
            zero = np.full(out, levels // 2)
        else:
            scale = ((high - low) / (levels - 1)).astype(np.float16)
            zero = np.clip(np.round(-low / scale), 1, levels - 1).astype(np.int64)
        scales[:, g], zeros[:, g] = scale, zero
        wide = scale.astype(np.float32)[:, None]
        codes[:, columns] = np.clip(np.round(part / wide) + zero[:, None], 0, levels - 1)
        dense[:, columns] = (codes[:, columns] - zero[:, None]) * wide
    return codes, scales, zeros, torch.from_numpy(dense)


def shuffled_index(name: str, inputs: int, group: int) -> Tensor:
    """Groups in no order, another for each matrix."""
    generator = torch.Generator().manual_seed(len(name) + inputs)
    return (torch.arange(inputs) // group)[torch.randperm(inputs, generator=generator)]


def gptq(
    name: str,
    weight: Tensor,
    bits: int = 4,
    group: int = 64,
    version: int = 1,
    desc_act: bool = False,
    symmetric: bool = False,
) -> tuple[Stored, Tensor]:
    inputs = weight.shape[1]
    index = shuffled_index(name, inputs, group) if desc_act else torch.arange(inputs) // group
    codes, scales, zeros, dense = grouped(weight, bits, group, symmetric, index)
    stored_zeros = zeros - 1 if version == 1 else zeros
    stored = {
        "qweight": words(codes, bits).T.contiguous(),
        "qzeros": words(np.ascontiguousarray(stored_zeros.T), bits),
        "scales": torch.from_numpy(np.ascontiguousarray(scales.T)),
        "g_idx": index.int(),
    }
    return stored, dense


def awq(name: str, weight: Tensor, group: int = 64) -> tuple[Stored, Tensor]:
    codes, scales, zeros, dense = grouped(weight, 4, group, symmetric=False)

    def interleaved(by_output: np.ndarray) -> Tensor:
        """`[n, outputs]` to words of the outputs 0 2 4 6 1 3 5 7 of each eight."""
        eights = by_output.reshape(len(by_output), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return words(np.ascontiguousarray(eights.reshape(by_output.shape)), 4)

    stored = {
        "qweight": interleaved(np.ascontiguousarray(codes.T)),
        "qzeros": interleaved(np.ascontiguousarray(zeros.T)),
        "scales": torch.from_numpy(np.ascontiguousarray(scales.T)),
    }
    return stored, dense


def packed(
    name: str,
    weight: Tensor,
    bits: int = 4,
    group: int = 64,
    symmetric: bool = True,
    actorder: bool = False,
) -> tuple[Stored, Tensor]:
    """compressed-tensors' pack-quantized: zeros are packed along the outputs."""
    index = shuffled_index(name, weight.shape[1], group) if actorder else None
    codes, scales, zeros, dense = grouped(weight, bits, group, symmetric, index)
    stored = {
        "weight_packed": words(codes, bits),
        "weight_scale": torch.from_numpy(scales),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        stored["weight_zero_point"] = words(np.ascontiguousarray(zeros.T), bits).T.contiguous()
    if index is not None:
        stored["weight_g_idx"] = index.int()
    return stored, dense


# ── fp4 ───────────────────────────────────────────────────────────────────────────────────────────


def fp4_codes(x: np.ndarray) -> np.ndarray:
    return np.abs(x[..., None] - E2M1).argmin(-1)


def mxfp4(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    groups = weight.numpy().reshape(len(weight), -1, 32)
    exponents = np.ceil(np.log2(np.abs(groups).max(-1) / 6)).astype(np.int64)
    steps = 2.0 ** exponents[..., None]
    codes = fp4_codes(groups / steps)
    dense = (E2M1[codes] * steps).astype(np.float32).reshape(weight.shape)
    scale = torch.from_numpy((exponents + 127).astype(np.uint8))
    stored = {"weight_packed": pairs(codes.reshape(weight.shape)), "weight_scale": scale}
    return stored, torch.from_numpy(dense)


def nvfp4(name: str, weight: Tensor, modelopt: bool = False) -> tuple[Stored, Tensor]:
    groups = weight.numpy().reshape(len(weight), -1, 16)
    largest = np.abs(groups).max(-1)
    over_all = float(np.abs(groups).max() / (6 * 448))
    scale = torch.from_numpy(largest / 6 / over_all).to(FP8)
    steps = scale.float().numpy()[..., None] * np.float32(over_all)
    codes = fp4_codes(groups / steps)
    dense = (E2M1[codes] * steps).astype(np.float32).reshape(weight.shape)
    code_pairs = pairs(codes.reshape(weight.shape))
    if modelopt:
        stored = {"weight": code_pairs, "weight_scale_2": torch.tensor(over_all)}
    else:
        divisor = torch.tensor([1 / over_all])
        stored = {"weight_packed": code_pairs, "weight_global_scale": divisor}
        stored["input_global_scale"] = torch.tensor([2.0])
    return {**stored, "weight_scale": scale}, torch.from_numpy(dense)


# ── what config.json says ─────────────────────────────────────────────────────────────────────────


def scheme(**weights: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": weights, "input_activations": None}


def compressed(name: str, *groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": ["lm_head"],
        **more,
    }


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
MLP, ATTENTION = "re:.*mlp.*", "re:.*self_attn.*"


@dataclass(frozen=True)
class Method:
    """How a checkpoint is quantised: its config, and what becomes of each layer's matrix."""

    config: dict[str, Any]
    encode: Encode
    attention: Encode | None = None  # where that of attention is another
    dense: tuple[str, ...] = ()  # layers that stay as they are
    has_head: bool = False  # quantised, too
    also: tuple[str, ...] = ()  # ends of other layers' names that are
    outside: bool = False  # whether hf_quant_config.json has the config

    def of(self, name: str) -> Encode | None:
        is_one = name.endswith(("_proj", *self.also)) or (self.has_head and name == "lm_head")
        if not is_one or any(part in name for part in self.dense):
            return None
        return self.attention if self.attention and "self_attn" in name else self.encode


BLOCK = {**FLOAT8, "strategy": "block", "block_structure": [128, 128]}
METHODS: dict[str, Method] = {
    "fp8-tensor": Method(
        {"quant_method": "fp8", "activation_scheme": "static"}, with_static_scales(fp8)
    ),
    "fp8-blocks": Method(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        fp8_blocks,
    ),
    "fp8-not-all": Method(
        {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0", "v_proj", "lm_head"]},
        partial(fp8, by="row"),
        dense=("layers.0.", "v_proj"),
    ),
    "fbgemm": Method(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, partial(fp8, by="row")
    ),
    "float-quantized": Method(
        compressed("float-quantized", scheme(**FLOAT8)), partial(fp8, by="row")
    ),
    "float-quantized-tensor": Method(
        compressed("float-quantized", scheme(**{**FLOAT8, "strategy": "tensor"})),
        partial(fp8, by="one"),
    ),
    "float-quantized-block": Method(
        compressed("float-quantized", scheme(**BLOCK)), partial(fp8_blocks, ending="weight_scale")
    ),
    "naive-quantized": Method(compressed("naive-quantized", scheme(**INT8)), int8),
    "int-quantized": Method(compressed("int-quantized", scheme(**INT8)), int8),
    "int-quantized-zeros": Method(
        compressed("int-quantized", scheme(**{**INT8, "symmetric": False})),
        partial(int8, asymmetric=True),
    ),
    "pack-quantized": Method(compressed("pack-quantized", scheme(**INT4)), packed),
    "pack-quantized-zeros": Method(
        compressed("pack-quantized", scheme(**{**INT4, "symmetric": False})),
        partial(packed, symmetric=False),
    ),
    "pack-quantized-index": Method(
        compressed("pack-quantized", scheme(**{**INT4, "actorder": "group"})),
        partial(packed, actorder=True),
    ),
    "pack-quantized-rows": Method(
        compressed("pack-quantized", scheme(**{**INT4, "strategy": "channel"})),
        partial(packed, group=10**6),
    ),
    "pack-quantized-8": Method(
        compressed("pack-quantized", scheme(**{**INT4, "num_bits": 8})), partial(packed, bits=8)
    ),
    "nvfp4-pack-quantized": Method(
        compressed("nvfp4-pack-quantized", scheme(**FLOAT4, group_size=16)), nvfp4
    ),
    "mxfp4-pack-quantized": Method(
        compressed("mxfp4-pack-quantized", scheme(**FLOAT4, group_size=32)), mxfp4
    ),
    "mixed-precision": Method(
        compressed(
            "mixed-precision",
            {**scheme(**INT4), "targets": [MLP], "format": "pack-quantized"},
            {**scheme(**FLOAT8), "targets": [ATTENTION], "format": "float-quantized"},
            ignore=["lm_head", "re:.*layers.1.self_attn.k_proj"],
        ),
        packed,
        attention=partial(fp8, by="row"),
        dense=("layers.1.self_attn.k_proj",),
    ),
    "awq": Method({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, awq),
    "gptq": Method(GPTQ, with_zero_bias(gptq)),
    "gptq-sym-8": Method({**GPTQ, "bits": 8, "sym": True}, partial(gptq, bits=8, symmetric=True)),
    "gptq-v2": Method({**GPTQ, "checkpoint_format": "gptq_v2"}, partial(gptq, version=2)),
    "gptq-desc-act": Method({**GPTQ, "desc_act": True}, partial(gptq, desc_act=True)),
    "gptq-whole-rows": Method({**GPTQ, "group_size": -1}, partial(gptq, group=10**6)),
    "modelopt-fp8": Method(
        {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head", "*.0.mlp*"]}},
        with_static_scales(fp8),
        dense=("layers.0.mlp",),
        outside=True,
    ),
    "modelopt-nvfp4": Method(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        partial(nvfp4, modelopt=True),
    ),
}
INDEXED = ("gptq-desc-act", "pack-quantized-index")


def encode_weights(method: Method, weights: Iterable[tuple[str, Tensor]]) -> tuple[Stored, Stored]:
    """The tensors that the checkpoint has, and those of the same model with plain numbers."""
    stored: Stored = {}
    dense: Stored = {}
    for name, weight in weights:
        layer, _, ending = name.rpartition(".")
        encode = method.of(layer) if ending == "weight" else None
        if encode is None:
            stored[name] = dense[name] = weight.contiguous()
            continue
        found, dense[name] = encode(layer, weight)
        stored.update({f"{layer}.{end}": tensor.contiguous() for end, tensor in found.items()})
    return stored, dense


class QuantizedModel:
    """A folder as the method writes it, and what `transformers` makes of its plain numbers."""

    def __init__(self, method: Method, folder: Path, model_type: str = "Llama", **changes: Any):
        import transformers

        torch.manual_seed(len(str(method.config)))
        config = getattr(transformers, f"{model_type}Config")(**{**SHAPE, **changes})
        self.oracle = getattr(transformers, f"{model_type}ForCausalLM")(config).eval().float()
        tensors = self.oracle.state_dict()
        stored, self.dense = encode_weights(method, one_by_one(tensors))
        self.oracle.load_state_dict(fused(self.dense, like=tensors))
        self.folder = folder
        folder.mkdir(exist_ok=True)
        config.architectures = [f"{model_type}ForCausalLM"]
        config.save_pretrained(folder)
        written = json.loads((folder / "config.json").read_text())
        if method.outside:
            (folder / "hf_quant_config.json").write_text(json.dumps(method.config))
        else:
            written["quantization_config"] = method.config
        (folder / "config.json").write_text(json.dumps(written))
        save_file(stored, folder / "model.safetensors")

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        found: Tensor = self.oracle(torch.tensor([ids])).logits[0]
        return found
