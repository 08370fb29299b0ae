"""Quantised checkpoints that are damaged, or of an unknown format: one sentence each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_models import FLOAT8, GPTQ, INT4, METHODS, QuantizedModel, compressed, scheme
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import ModelError
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.hf_config import read_hf_config
from quire.models.source import build_model, open_model

ATTENTION = "model.layers.0.self_attn"
Q = f"{ATTENTION}.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
Change = Callable[[Any], Tensor | None]  # of a tensor, or of None, where there is none


def load(folder: Path, tp: TensorParallel = SINGLE) -> None:
    device = torch.device("cpu")
    build_model(open_model(str(folder)), torch.float32, device, progress=False, tp=tp)


def with_nan(tensor: Tensor) -> Tensor:
    wide = tensor.float()
    wide.view(-1)[-1] = torch.nan
    return wide.to(tensor.dtype)


def without_rows(tensor: Tensor) -> Tensor:
    return tensor[:0]


def whole_numbers(tensor: Tensor) -> Tensor:
    return tensor.int()


def gone(tensor: Tensor) -> None:
    return None


DAMAGES: dict[str, tuple[str, str, Change, str]] = {
    "scales cut": ("gptq", f"{Q}.scales", lambda t: t[:-1], r"q_proj.scales stands for \[256, 3\]"),
    "scales gone": ("gptq", f"{Q}.scales", lambda t: None, r"q_proj.scales is missing"),
    "zeros cut": ("awq", f"{Q}.qzeros", lambda t: t[:, 1:], r"q_proj.qzeros stands for \[248, 4\]"),
    "zeros gone": ("awq", f"{Q}.qzeros", lambda t: None, r"q_proj.qzeros is missing"),
    "codes cut": ("awq", f"{Q}.qweight", lambda t: t[:-8], r"qweight stands for \[256, 124\]"),
    "codes in a row": ("gptq", f"{Q}.qweight", lambda t: t.flatten(), r"not a matrix"),
    "floats for codes": ("gptq", f"{Q}.qweight", lambda t: t.float(), r"q_proj.qweight is float32"),
    "an index cut": ("gptq-desc-act", f"{Q}.g_idx", lambda t: t[1:], r"q_proj.g_idx is \[255\]"),
    "an index gone": ("gptq-desc-act", f"{Q}.g_idx", lambda t: None, r"missing: .*q_proj.g_idx"),
    "an index too far": ("gptq-desc-act", f"{Q}.g_idx", lambda t: t + 1, r"q_proj.g_idx names gro"),
    "an index below": ("gptq-desc-act", f"{Q}.g_idx", lambda t: t - 1, r"q_proj.g_idx names gro"),
    "NaN of a group": ("gptq", f"{Q}.scales", with_nan, r"q_proj.scales has scales that"),
    "NaN of a tensor": ("fp8-tensor", f"{Q}.weight_scale", with_nan, r"q_proj.weight_scale has"),
    "NaN of a block": ("fp8-blocks", f"{Q}.weight_scale_inv", with_nan, r"weight_scale_inv ha"),
    "NaN of an input": ("fp8-tensor", f"{Q}.input_scale", with_nan, r"q_proj.input_scale has"),
    "NaN of an exponent": (
        "mxfp4-pack-quantized",
        f"{Q}.weight_scale",
        lambda t: torch.full_like(t, 255),
        r"q_proj.weight_scale has scales that",
    ),
    "infinity over all": (
        "nvfp4-pack-quantized",
        f"{Q}.weight_global_scale",
        torch.zeros_like,
        r"q_proj.weight_global_scale has scales that",
    ),
    "an input's matrix": (
        "fp8-tensor",
        f"{Q}.input_scale",
        lambda t: torch.ones(2, 2, 2),
        r"q_proj.input_scale is not the scales",
    ),
    "blocks cut": ("fp8-blocks", f"{DOWN}.weight_scale_inv", lambda t: t[:1], r"\[1, 4\], not"),
    "scales of two rows": ("fbgemm", f"{Q}.weight_scale", lambda t: t[:2], r"\[2, 1\], not \[256"),
    "dense instead": ("fbgemm", f"{Q}.weight", lambda t: t.float(), r"q_proj.weight is float32"),
    "packed cut": (
        "pack-quantized",
        f"{Q}.weight_packed",
        lambda t: t[:, 1:],
        r"\[256, 124\],",
    ),
    "infinity of a tensor": (
        "fp8-tensor",
        f"{Q}.weight_scale",
        lambda t: torch.tensor(torch.inf),
        r"q_proj.weight_scale has scales that are no finite numbers",
    ),
    "infinite divisor": (
        "nvfp4-pack-quantized",
        f"{Q}.weight_global_scale",
        lambda t: torch.tensor([torch.inf]),
        r"q_proj.weight_global_scale has scales that",
    ),
    "NaN as an exponent": (
        "fp8-blocks",
        f"{Q}.weight_scale_inv",
        lambda t: torch.full(t.shape, 255, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        r"q_proj.weight_scale_inv has scales that",
    ),
    "no scale of a tensor": (
        "fp8-tensor",
        f"{Q}.weight_scale",
        lambda t: torch.empty(0),
        r"q_proj.weight_scale is \[0\], not \[256, 1\]",
    ),
    "no scale of rows": ("fbgemm", f"{Q}.weight_scale", without_rows, r"\[0, 1\], not \[256, 1\]"),
    "no scale of blocks": (
        "fp8-blocks",
        f"{Q}.weight_scale_inv",
        without_rows,
        r"\[0, 2\], not \[2, 2\]",
    ),
    "no scale of groups": ("gptq", f"{Q}.scales", without_rows, r"\[256, 0\], not \[256, 4\]"),
    "scales of fp8 gone": ("fp8-blocks", f"{Q}.weight_scale_inv", gone, r"missing: .*weight_scale"),
    "scales of words gone": ("pack-quantized", f"{Q}.weight_scale", gone, r"missing: .*weight_sca"),
    "zeros of words gone": (
        "pack-quantized-zeros",
        f"{Q}.weight_zero_point",
        gone,
        r"missing: .*q_proj.weight_zero",
    ),
    "the scale over all gone": (
        "modelopt-nvfp4",
        f"{Q}.weight_scale_2",
        gone,
        r"missing: .*q_proj.weight_scale_2",
    ),
    "integers of rows": ("fbgemm", f"{Q}.weight_scale", whole_numbers, r"weight_scale is int32"),
    "integers of groups": ("awq", f"{Q}.scales", whole_numbers, r"q_proj.scales is int32"),
    "floats of exponents": (
        "mxfp4-pack-quantized",
        f"{Q}.weight_scale",
        lambda t: t.float(),
        r"weight_scale is float32",
    ),
    "floats for zeros": (
        "pack-quantized-zeros",
        f"{Q}.weight_zero_point",
        lambda t: t.float(),
        r"q_proj.weight_zero_point is float32, not int32",
    ),
    "floats for an index": (
        "gptq-desc-act",
        f"{Q}.g_idx",
        lambda t: t.float(),
        r"q_proj.g_idx is float32",
    ),
    "scales on their side": ("gptq", f"{Q}.scales", lambda t: t.T, r"\[4, 256\], not \[256, 4\]"),
    "zeros that are denied": (
        "int-quantized",
        f"{Q}.weight_zero_point",
        lambda t: torch.ones(256, 1, dtype=torch.int8),
        r"q_proj.weight_zero_point has zero points where",
    ),
    "a shape of floats": (
        "pack-quantized-rows",
        f"{Q}.weight_shape",
        lambda t: t.float() * torch.nan,
        r"q_proj.weight_shape is not two sizes",
    ),
    "an index of blocks": (
        "float-quantized-block",
        f"{Q}.weight_g_idx",
        lambda t: torch.arange(256) % 2,
        r"q_proj.weight_g_idx has inputs in groups out of order",
    ),
    "an index of words without its end": (
        "pack-quantized",
        f"{Q}.weight_g_idx",
        lambda t: torch.arange(255) // 64,
        r"^model\.\S+q_proj\.weight_g_idx is \[255\], and weight_packed has 256 inputs: download",
    ),
    "an index of words of nothing": (
        "pack-quantized",
        f"{Q}.weight_g_idx",
        lambda t: torch.arange(0),
        r"q_proj.weight_g_idx is \[0\], and weight_packed has 256 inputs",
    ),
    "an announced index of words without its end": (
        "pack-quantized-index",
        f"{Q}.weight_g_idx",
        lambda t: t[:-1],
        r"q_proj.weight_g_idx is \[255\], and weight_packed has 256 inputs",
    ),
    "an index of blocks without its end": (
        "float-quantized-block",
        f"{Q}.weight_g_idx",
        lambda t: torch.arange(255) // 128,
        r"q_proj.weight_g_idx is \[255\], and weight has 256 inputs",
    ),
    "an index of fp4 without its end": (
        "mxfp4-pack-quantized",
        f"{Q}.weight_g_idx",
        lambda t: torch.arange(255) // 32,
        r"q_proj.weight_g_idx is \[255\], and weight_packed has 256 inputs",
    ),
    "an index of another type": (
        "gptq",
        f"{Q}.g_idx",
        lambda t: t.to(torch.float8_e4m3fn),
        r"q_proj.g_idx is float8",
    ),
    "an index that is not announced": (
        "gptq",
        f"{Q}.g_idx",
        lambda t: t[1:],
        r"q_proj.g_idx is \[255\]",
    ),
    "an index of nothing": ("gptq", f"{Q}.g_idx", lambda t: t[:0], r"q_proj.g_idx is \[0\], not"),
    "an index without its end": (
        "gptq",
        f"{Q}.g_idx",
        lambda t: t[:-1],
        r"q_proj.g_idx is \[255\], not \[256\]",
    ),
    "a bias of no matrix": (
        "gptq",
        f"{Q}.bias",
        lambda t: torch.ones(256),
        r"unexpected: .*q_proj.bi",
    ),
    "NaN of keys": (
        "fbgemm",
        f"{ATTENTION}.k_scale",
        lambda t: torch.tensor(torch.nan),
        r"self_attn.k_scale has scales that",
    ),
    "integers of keys": (
        "fbgemm",
        f"{ATTENTION}.k_scale",
        lambda t: torch.tensor(1),
        r"self_attn.k_scale is not the scales",
    ),
    "no scale of values": (
        "awq",
        f"{ATTENTION}.v_scale",
        lambda t: torch.empty(0),
        r"self_attn.v_scale is not the scales",
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            made[name] = QuantizedModel(METHODS[name], tmp_path_factory.mktemp(name)).folder
        return made[name]

    return find


def copy_of(folder: Path, target: Path, **quantization: Any) -> Path:
    target.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(quantization)
    (target / "config.json").write_text(json.dumps(config))
    (target / "model.safetensors").symlink_to(folder / "model.safetensors")
    return target


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tensors(damage: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    method, name, change, words = DAMAGES[damage]
    folder = copy_of(models(method), tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors.pop(name, None))
    if changed is not None:
        tensors[name] = changed.contiguous()
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=words) as error:
        load(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("k_scale", torch.tensor(0.5)),
        ("v_scale", torch.ones(2, 1, 1)),  # one for each head
        ("k_proj.k_scale", torch.ones(1)),
        ("q_proj.input_zero_point", torch.zeros(1, dtype=torch.int8)),
    ],
)
def test_scales_that_are_not_needed(
    name: str, scale: Tensor, models: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copy_of(models("fbgemm"), tmp_path / "more")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(tensors | {f"{ATTENTION}.{name}": scale}, folder / "model.safetensors")
    load(folder)


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [
        ("gptq", {"group_size": 96}, r"q_proj has 256 inputs, which groups of 96 .* last group:"),
        ("gptq", {"group_size": 128}, r"scales stands for \[256, 8\], not \[256, 4\]"),
        ("gptq", {"bits": 8}, r"qweight stands for \[256, 256\], not \[256, 512\]"),
        ("gptq", {"desc_act": True, "group_size": 32}, r"scales stands for \[256, 8\], not"),
        ("fp8-blocks", {"weight_block_size": None}, r"weight_scale_inv is \[2, 4\], not \[256"),
        ("fp8-blocks", {"weight_block_size": [64, 64]}, r"scale_inv is \[2, 4\], not \[4, 8\]"),
    ],
)
def test_a_config_that_is_not_the_weights(
    method: str,
    changes: dict[str, Any],
    words: str,
    models: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    with pytest.raises(ModelError, match=words):
        load(copy_of(models(method), tmp_path / "other", **changes))


@pytest.mark.parametrize("odd", ["2", "0"])
def test_experts_in_formats_of_their_own(odd: str, tmp_path: Path) -> None:
    method = METHODS["pack-quantized"]
    config = {**method.config, "ignore": ["lm_head", "re:.*gate$", f"re:.*0.*experts.{odd}[.].*"]}
    method = replace(method, config=config, dense=(f"layers.0.mlp.experts.{odd}.",))
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    made = QuantizedModel(method, tmp_path / "m", "Qwen3Moe", num_hidden_layers=1, **shape)
    words = r"^model\.layers\.0\.mlp\.experts\.[12] is quantised in another way than model.*\.0, "
    with pytest.raises(ModelError, match=words):
        load(made.folder)


def test_ranks_that_would_cut_a_group_are_refused(tmp_path: Path) -> None:
    made = QuantizedModel(METHODS["fp8-blocks"], tmp_path / "m", intermediate_size=384)
    words = r"layers.0.mlp.gate_proj is quantised in blocks of 128 outputs, and a part of 192 of "
    with pytest.raises(ModelError, match=words):
        load(made.folder, TensorParallel(0, 2))
    made = QuantizedModel(METHODS["awq"], tmp_path / "n", intermediate_size=192)
    words = r"layers.0.mlp.down_proj is quantised in blocks of 64 inputs, and a part of 96 of "
    with pytest.raises(ModelError, match=words):
        load(made.folder, TensorParallel(1, 2))


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ("int4", "quantised by 'int4', which Quire does not read; it reads fp8, fbgemm_fp8"),
        ([1], r"quantised by \[1\]"),
        ({"bits": 4}, "quantised by None"),
        ({"quant_method": "bitsandbytes"}, "quantised by 'bitsandbytes'"),
        ({"quant_method": ["gptq"]}, r"quantised by \['gptq'\]"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size=\\[128\\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "two sizes of a block"),
        ({"quant_method": "fp8", "activation_scheme": "maybe"}, "dynamic or static"),
        ({"quant_method": "fp8", "modules_to_not_convert": [1]}, "a list of names"),
        ({**GPTQ, "bits": 3}, "by gptq to 3 bits, of which Quire reads only 4 or 8"),
        ({**GPTQ, "bits": True}, "by gptq to True bits"),
        ({**GPTQ, "group_size": 0}, "group_size=0"),
        ({**GPTQ, "group_size": "all"}, "group_size='all'"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "gptq in the format 'marlin'"),
        ({**GPTQ, "dynamic": {"-:.*": {}}}, r"for single layers \(dynamic\)"),
        ({**GPTQ, "modules_in_block_to_quantize": [["a"], "b"]}, "modules_in_block_to_quantize="),
        ({"quant_method": "awq", "bits": 8, "group_size": 64}, "awq to 8 bits"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "'gemv'"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False},
            "without zero points",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "modelopt with 'W4A16_AWQ'"),
        (compressed("marlin-24", scheme(**INT4)), "in the format 'marlin-24'"),
        (compressed("pack-quantized", scheme(**{**INT4, "num_bits": 3})), "to 3 bits"),
        (
            compressed("pack-quantized", scheme(**{**INT4, "strategy": "attn_head"})),
            "strategy 'attn_head'",
        ),
        (compressed("int-quantized", scheme(**FLOAT8)), "int-quantized to floats in a way"),
        (compressed("pack-quantized", scheme(**INT4), transform_config={"x": 1}), "transform_conf"),
        (compressed("pack-quantized", scheme(**INT4), ignore=["re:("]), "no regular expression"),
        (compressed("pack-quantized", scheme(**INT4), ignore=["re:(a+)+$"]), "for ever"),
        (compressed("pack-quantized", scheme(**INT4), ignore=["re:" + ".*a" * 9]), "for ever"),
        (compressed("pack-quantized", *[{}] * 99), "a few groups"),
        (compressed("pack-quantized", scheme(**INT4), config_groups=[1]), "config_groups"),
    ],
    ids=str,
)
def test_what_nobody_reads_is_refused_by_name(quantization: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words) as error:
        read_hf_config({**CONFIG, "quantization_config": quantization})
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
