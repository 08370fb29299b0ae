"""Checkpoints that other libraries wrote, beside the numbers that those read back from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import PagedModel
from quantized_models import GPTQ, METHODS, SHAPE, QuantizedModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import ModelError
from quire.kernels.cpu import CpuBackend
from quire.kernels.reference import ReferenceBackend
from quire.layers.quantized.matrix import QuantizedMatrix
from quire.layers.weights import Weight, make_room
from quire.models.causal_lm import CausalLM
from quire.models.quantization.checkpoint import CheckpointFormats
from quire.models.quantization.read import read_formats
from quire.models.source import build_model, open_model

pytest.importorskip("numba")
pytest.importorskip("compressed_tensors")

from compressed_models import CompressedModel, scheme
from compressed_tensors.entrypoints.convert import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs

from quire.kernels.numba import NumbaBackend

IDS = [5, 17, 99, 3, 42, 130, 0, 77, 8, 21]
CPU = torch.device("cpu")
BACKENDS = (ReferenceBackend, CpuBackend, NumbaBackend)
KV_IN_FP8 = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="tensor")
MLP, ATTENTION = ["re:.*mlp.*"], ["re:.*self_attn.*"]

Written = tuple[str, Callable[[Path], CompressedModel]]
WRITTEN: dict[str, Written] = {  # the format that the library chose, and its model
    "fp8 of a tensor, inputs static": (
        "float-quantized",
        lambda folder: CompressedModel(folder, scheme("FP8")),
    ),
    "fp8 of a row": (
        "float-quantized",
        lambda folder: CompressedModel(folder, scheme("FP8_DYNAMIC"), kv_cache=KV_IN_FP8),
    ),
    "fp8 in blocks that rows and columns do not fill": (
        "float-quantized",
        lambda folder: CompressedModel(folder, scheme("FP8_BLOCK"), intermediate_size=320),
    ),
    "fp8 by its plain name": (
        "naive-quantized",
        lambda folder: CompressedModel(folder, scheme("FP8_DYNAMIC"), written_as="naive-quantized"),
    ),
    "int8": ("int-quantized", lambda folder: CompressedModel(folder, scheme("W8A8"))),
    "int8 of a tensor": (
        "int-quantized",
        lambda folder: CompressedModel(folder, scheme("W8A8", strategy="tensor")),
    ),
    "int8 with zeros": (
        "int-quantized",
        lambda folder: CompressedModel(folder, scheme("W8A8", symmetric=False)),
    ),
    "4 bits, a byte each": (
        "int-quantized",
        lambda folder: CompressedModel(folder, scheme("W4A8")),
    ),
    "4 bits": ("pack-quantized", lambda folder: CompressedModel(folder, scheme("W4A16"))),
    "4 bits with zeros": (
        "pack-quantized",
        lambda folder: CompressedModel(folder, scheme("W4A16_ASYM", group_size=32)),
    ),
    "4 bits of a row": (
        "pack-quantized",
        lambda folder: CompressedModel(
            folder, scheme("W4A16", strategy="channel", group_size=None)
        ),
    ),
    "4 bits of a row with zeros": (
        "pack-quantized",
        lambda folder: CompressedModel(
            folder, scheme("W4A16_ASYM", strategy="channel", group_size=None)
        ),
    ),
    "8 bits in groups": ("pack-quantized", lambda folder: CompressedModel(folder, scheme("W8A16"))),
    "8 bits in groups with zeros": (
        "pack-quantized",
        lambda folder: CompressedModel(folder, scheme("W8A16", group_size=64, symmetric=False)),
    ),
    "NVFP4": ("nvfp4-pack-quantized", lambda folder: CompressedModel(folder, scheme("NVFP4"))),
    "MXFP4": ("mxfp4-pack-quantized", lambda folder: CompressedModel(folder, scheme("MXFP4"))),
    "the head, too": (
        "pack-quantized",
        lambda folder: CompressedModel(
            folder, scheme("W4A16", group_size=64), ignore=(), vocab_size=136
        ),
    ),
    "several": (
        "mixed-precision",
        lambda folder: CompressedModel(
            folder,
            scheme("W4A16_ASYM", MLP, group_size=64),
            scheme("FP8_DYNAMIC", ATTENTION),
            ignore=("lm_head", "model.layers.1.self_attn.k_proj", "re:.*layers.0.mlp.up_proj"),
        ),
    ),
}


def load(folder: Path) -> CausalLM:
    return build_model(open_model(str(folder)), torch.float32, CPU, progress=False)


def check_logits(model: CausalLM, right: Tensor) -> None:
    for backend in BACKENDS:
        paged = PagedModel(model, backend())
        found = torch.cat([paged.step({"a": IDS[:7]})["a"], paged.step({"a": IDS[7:]})["a"]])
        assert (found - right).abs().max() < 1e-3 * right.abs().max(), backend


@pytest.mark.parametrize("name", WRITTEN)
def test_compressed_tensors(name: str, tmp_path: Path) -> None:
    chosen, write = WRITTEN[name]
    written = write(tmp_path)
    assert written.config["format"] == chosen
    model = load(tmp_path)
    assert any(isinstance(module, QuantizedMatrix) for module in model.modules())
    check_logits(model, written.logits(IDS))


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("MXFP8", "in the format 'mxfp8-quantized', which Quire does not read; it reads float-q"),
        ("W3A16", "pack-quantized to 3 bits, of which Quire reads only 4 or 8"),
    ],
)
def test_compressed_tensors_that_are_refused(preset: str, words: str, tmp_path: Path) -> None:
    CompressedModel(tmp_path, scheme(preset), num_hidden_layers=1)
    with pytest.raises(ModelError, match=words):
        open_model(str(tmp_path))


FINE_GRAINED: dict[str, dict[str, Any]] = {
    "blocks": {},
    "blocks whose scales are powers of two": {"scale_fmt": "ue8m0"},
    "tensors, inputs static": {"weight_block_size": None, "activation_scheme": "static"},
    "not all": {"modules_to_not_convert": ["lm_head", "v_proj", "model.layers.1.mlp"]},
}


@pytest.mark.parametrize("name", FINE_GRAINED)
def test_fp8_of_transformers(name: str, tmp_path: Path) -> None:
    """Its conversions are those that `from_pretrained` and `save_pretrained` use on a GPU."""
    from transformers import FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
    from transformers.quantizers.quantizers_utils import should_convert_module

    settings = FineGrainedFP8Config(**FINE_GRAINED[name])
    quantizer: Any = type("Quantizer", (), {"quantization_config": settings})
    torch.manual_seed(5)
    config = LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"])
    oracle = LlamaForCausalLM(config).eval().float()
    skipped = settings.modules_to_not_convert or ["lm_head"]
    stored: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for key, tensor in oracle.state_dict().items():
        layer = key.removesuffix(".weight")
        if not layer.endswith("_proj") or not should_convert_module(layer, skipped):
            stored[key] = dense[key] = tensor
            continue
        found = Fp8Quantize(quantizer).convert({key: tensor})
        if settings.weight_block_size is None:
            found[f"{layer}.weight_scale_inv"] = found[f"{layer}.weight_scale_inv"].reshape(())
            found[f"{layer}.activation_scale"] = torch.tensor(0.5)
        stored |= found
        pair = {"weight": found[key], "weight_scale_inv": found[f"{layer}.weight_scale_inv"]}
        dense[key] = Fp8Dequantize(quantizer).convert(pair)["weight"].float()
    oracle.load_state_dict(dense)
    config.quantization_config = settings.to_dict()
    config.save_pretrained(tmp_path)
    save_file({key: t.contiguous() for key, t in stored.items()}, tmp_path / "model.safetensors")
    with torch.inference_mode():
        check_logits(load(tmp_path), oracle(torch.tensor([IDS])).logits[0])


def filled(formats: CheckpointFormats, tensors: Mapping[str, Tensor], shape: torch.Size) -> Tensor:
    """The numbers of the one layer that the tensors are."""
    shown = dict(formats.canonical(tensors))
    matrix = formats.of("layer").matrix(*shape)
    make_room(matrix, torch.float32, CPU)
    assert isinstance(matrix, QuantizedMatrix)
    for weight in matrix.weights(Weight("layer", tuple(shape)), slice(None)):
        found = shown.pop(weight.name)
        assert tuple(found.shape) == weight.shape
        weight.fill(found[tuple(map(slice, weight.shape))])
    assert not shown
    return matrix.dense()


LAYERS: dict[str, dict[str, Any]] = {
    "gptq_v1": GPTQ,
    "gptq_v1_symmetric": {**GPTQ, "sym": True},
    "gptq_v1_desc_act": {**GPTQ, "desc_act": True},
    "gptq_v1_8_bits": {**GPTQ, "sym": True, "bits": 8},
    "gptq_v2": {**GPTQ, "checkpoint_format": "gptq_v2"},
    "gptq_v2_8_bits": {**GPTQ, "checkpoint_format": "gptq_v2", "bits": 8},
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm"},
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_gptqmodel(name: str) -> None:
    """tests/golden/make_gptqmodel.py; `gptqmodel` multiplies codes and scales in float16."""
    golden = Path(__file__).parents[2] / "golden" / "gptqmodel.safetensors"
    found = {
        key.partition(".")[2]: tensor
        for key, tensor in load_file(golden).items()
        if key.startswith(f"{name}.")
    }
    right = found.pop("dense").float()
    config = {**LAYERS[name], "group_size": 32}
    formats = read_formats({"quantization_config": config, "dtype": "float16"})
    assert isinstance(formats, CheckpointFormats)
    numbers = filled(formats, {f"layer.{end}": t for end, t in found.items()}, right.shape)
    torch.testing.assert_close(numbers, right, rtol=1e-3, atol=1e-6)


def test_awq_as_compressed_tensors_converts_it(tmp_path: Path) -> None:
    """The library reads AWQ's order of codes on its own, and writes a checkpoint of its own."""
    made = QuantizedModel(METHODS["awq"], tmp_path / "awq")
    config = json.loads((made.folder / "config.json").read_text())
    converter = AutoAWQConverter.from_autoawq_config(config["quantization_config"])
    tensors = converter.process(load_file(made.folder / "model.safetensors"))
    target = tmp_path / "converted"
    target.mkdir()
    save_file({key: t.contiguous() for key, t in tensors.items()}, target / "model.safetensors")
    written = json.loads(converter.update_config(None).model_dump_json())
    config["quantization_config"] = {**written, "quant_method": "compressed-tensors"}
    (target / "config.json").write_text(json.dumps(config))
    ours, theirs = (dict(load(folder).named_modules()) for folder in (made.folder, target))
    for path, matrix in ours.items():
        if isinstance(matrix, QuantizedMatrix):
            assert torch.equal(matrix.dense(), theirs[path].dense()), path
