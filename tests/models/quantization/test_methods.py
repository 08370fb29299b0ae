"""Every method's checkpoints against `transformers`, with the numbers that codes stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paged import PagedModel
from quantized_models import (
    INDEXED,
    INT4,
    METHODS,
    Method,
    QuantizedModel,
    compressed,
    grouped,
    packed,
    scheme,
    words,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import ModelError
from quire.kernels.backend import backend_for
from quire.layers.experts import Experts
from quire.layers.formats import Dense, StackedMatrix
from quire.layers.linear import ColumnLinear, RowLinear
from quire.layers.matrix import DenseMatrix, Matrix
from quire.layers.quantized.matrix import QuantizedMatrix
from quire.layers.tp import SINGLE, TensorParallel
from quire.models.causal_lm import CausalLM
from quire.models.source import build_model, open_model

IDS = [5, 17, 99, 3, 42, 130, 0, 77, 8, 21]


def load(folder: Path, tp: TensorParallel = SINGLE) -> CausalLM:
    device = torch.device("cpu")
    return build_model(open_model(str(folder)), torch.float32, device, progress=False, tp=tp)


def numbers(matrix: Matrix) -> Tensor:
    if isinstance(matrix, StackedMatrix):
        return torch.cat([numbers(part) for part in matrix.parts])
    if isinstance(matrix, DenseMatrix):
        return matrix.weight
    assert isinstance(matrix, QuantizedMatrix)
    return matrix.dense()


def check_logits(made: QuantizedModel, model: CausalLM) -> None:
    paged = PagedModel(model, backend_for(torch.device("cpu")), block_size=4)
    found = torch.cat([paged.step({"a": IDS[:7]})["a"], paged.step({"a": IDS[7:]})["a"]])
    right = made.logits(IDS)
    assert (found - right).abs().max() < 1e-3 * right.abs().max()


def check_ranks(folder: Path, model: CausalLM) -> None:
    """What two ranks hold, put together, is the whole."""
    ranks = [dict(load(folder, TensorParallel(rank, 2)).named_modules()) for rank in range(2)]
    for path, layer in model.named_modules():
        if isinstance(layer, ColumnLinear):
            halves = [numbers(rank[path].matrix).split(rank[path].sizes) for rank in ranks]
            both = [torch.cat(parts) for parts in zip(*halves, strict=True)]
            assert torch.equal(torch.cat(both), numbers(layer.matrix)), path
        elif isinstance(layer, RowLinear):
            halves = [numbers(rank[path].matrix) for rank in ranks]
            assert torch.equal(torch.cat(halves, dim=1), numbers(layer.matrix)), path


@pytest.mark.parametrize("name", METHODS)
def test_a_checkpoint_computes_what_its_codes_stand_for(name: str, tmp_path: Path) -> None:
    made = QuantizedModel(METHODS[name], tmp_path / name)
    model = load(made.folder)
    held = [module for module in model.modules() if isinstance(module, QuantizedMatrix)]
    assert held
    check_logits(made, model)
    if name not in INDEXED:
        check_ranks(made.folder, model)
    else:
        with pytest.raises(ModelError, match=r"o_proj has its 256 inputs in groups out of order"):
            load(made.folder, TensorParallel(0, 2))


@pytest.mark.parametrize(
    ("name", "unsaid"), [("gptq-desc-act", "desc_act"), ("pack-quantized-index", "actorder")]
)
def test_an_index_counts_where_the_config_does_not_announce_it(
    name: str, unsaid: str, tmp_path: Path
) -> None:
    method = METHODS[name]
    config = without(method.config, unsaid)
    assert config != method.config
    made = QuantizedModel(replace(method, config=config), tmp_path / name, num_hidden_layers=1)
    check_logits(made, load(made.folder))


def without(config: Any, key: str) -> Any:
    if not isinstance(config, dict | list):
        return config
    if isinstance(config, list):
        return [without(each, key) for each in config]
    return {k: without(value, key) for k, value in config.items() if k != key}


def test_a_bias_of_zeros_is_the_model_s_where_that_has_one(tmp_path: Path) -> None:
    made = QuantizedModel(METHODS["gptq"], tmp_path / "m", num_hidden_layers=1, attention_bias=True)
    model = load(made.folder)
    check_logits(made, model)
    assert not model.get_parameter("model.layers.0.self_attn.o_proj.bias").any()


@pytest.mark.parametrize(
    ("bits", "strategy"), [(4, {"strategy": "channel"}), (8, {"group_size": 10})], ids=str
)
def test_words_that_are_filled_up(bits: int, strategy: dict[str, Any], tmp_path: Path) -> None:
    """compressed-tensors does so where a row's codes end within a word."""
    shape = {"hidden_size": 90, "intermediate_size": 150, "head_dim": 30, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    per_word, group = 32 // bits, strategy.get("group_size", 10**6)

    def encode(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, scales, _, dense = grouped(weight, bits, group, symmetric=True)
        filled = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per_word)))
        tensors = {"weight_packed": words(filled, bits), "weight_scale": torch.from_numpy(scales)}
        return {**tensors, "weight_shape": torch.tensor(weight.shape)}, dense

    config = compressed("pack-quantized", scheme(**{**INT4, "num_bits": bits, **strategy}))
    made = QuantizedModel(Method(config, encode), tmp_path / "m", **shape, **heads)
    check_logits(made, load(made.folder))


NOT_ALL = METHODS["fp8-not-all"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def leaving(method: Method, names: list[str], *dense: str, **more: Any) -> Method:
    config = {**method.config, "modules_to_not_convert": names}
    return replace(method, config=config, dense=dense, **more)


@pytest.mark.parametrize(
    "method",
    [
        leaving(NOT_ALL, ["model.layers.0.mlp"], "layers.0.mlp", has_head=True),
        leaving(METHODS["fp8-blocks"], [], has_head=True),
        leaving(NOT_ALL, ["model.layers.*.self_attn"], "self_attn"),
        leaving(NOT_ALL, [r"model\.layers\.\d+\.self_attn"], "self_attn"),
        leaving(NOT_ALL, ["model.layers.(0|1).self_attn.(q|k)_proj"], "q_proj", "k_proj"),
        leaving(NOT_ALL, ["attn.q_proj"], "q_proj"),
        leaving(METHODS["awq"], ["attn"], "self_attn"),
        leaving(METHODS["awq"], ["mlp"]),
        replace(METHODS["modelopt-fp8"], has_head=True, dense=()),
    ],
    ids=lambda method: str(method.config)[-60:],
)
def test_the_tensors_say_which_layers_are_quantised(method: Method, tmp_path: Path) -> None:
    """Libraries differ in how they take the names of a config, and in what they do unasked."""
    made = QuantizedModel(method, tmp_path / "m")
    check_logits(made, load(made.folder))


@pytest.mark.parametrize("in_one", [False, True])
def test_experts_that_a_library_passed_over(in_one: bool, tmp_path: Path) -> None:
    """`transformers` 5 has them as parameters, which are no layers of the class `Linear`."""
    method = replace(METHODS["pack-quantized"], dense=("mlp.experts",))
    made = QuantizedModel(method, tmp_path / "m", "Qwen3Moe", **EXPERTS)
    if in_one:
        tensors = load_file(made.folder / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
        own = made.oracle.state_dict()
        kept |= {name: tensor for name, tensor in own.items() if ".experts." in name}
        save_file(kept, made.folder / "model.safetensors")
    config = open_model(str(made.folder)).config
    experts = "model.layers.1.mlp.experts"
    names = (f"{experts}.3.up_proj", f"{experts}.3.gate_up_proj", f"{experts}.gate_up_proj")
    assert isinstance(config.formats.of(*names), Dense)
    check_logits(made, load(made.folder))


def test_a_fused_matrix_is_codes_where_the_config_leaves_a_part_of_it_out(tmp_path: Path) -> None:
    method = leaving(METHODS["fp8-tensor"], ["q_proj", "lm_head"])
    made = QuantizedModel(method, tmp_path / "m", "Phi3", original_max_position_embeddings=128)
    check_logits(made, load(made.folder))


def test_gptq_of_layers_that_its_config_does_not_name(tmp_path: Path) -> None:
    config = {**METHODS["gptq"].config, "modules_in_block_to_quantize": [["mlp.gate_proj"]]}
    made = QuantizedModel(replace(METHODS["gptq"], config=config), tmp_path / "m")
    check_logits(made, load(made.folder))


def test_numbers_beside_a_scale_of_kv(tmp_path: Path) -> None:
    made = QuantizedModel(leaving(METHODS["modelopt-fp8"], [], "k_proj"), tmp_path / "m")
    tensors = load_file(made.folder / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
    save_file(tensors, made.folder / "model.safetensors")
    check_logits(made, load(made.folder))


def test_an_index_of_layers_that_the_config_leaves_out(tmp_path: Path) -> None:
    """It is not passed over: all layers of a group have one, or the model is refused."""
    config = compressed("pack-quantized", scheme(**INT4), ignore=["lm_head", "re:.*attn.*"])
    indexed = METHODS["pack-quantized-index"].encode
    method = Method(config, METHODS["pack-quantized"].encode, attention=indexed)
    made = QuantizedModel(method, tmp_path / "m")
    with pytest.raises(ModelError, match=r"missing: .*mlp\.\w+_proj\.g_idx"):
        load(made.folder)
    made = QuantizedModel(Method(config, indexed), tmp_path / "n")
    check_logits(made, load(made.folder))


def test_codes_that_no_group_names(tmp_path: Path) -> None:
    config = compressed("pack-quantized", {**scheme(**INT4), "targets": ["re:.*mlp.*"]})
    made = QuantizedModel(replace(METHODS["pack-quantized"], config=config), tmp_path / "m")
    with pytest.raises(ModelError, match=r"unexpected: .*self_attn\.\w_proj\.weight_packed"):
        load(made.folder)


@pytest.mark.parametrize(
    "name",
    ["fp8-tensor", "fp8-blocks", "int-quantized", "pack-quantized", "nvfp4-pack-quantized"],
)
def test_routers_and_gates_become_numbers(name: str, tmp_path: Path) -> None:
    """Libraries quantise a gate of one row as any other layer, if nobody says otherwise."""
    method = replace(METHODS[name], also=(".gate", ".shared_expert_gate"))
    shared = {"shared_expert_intermediate_size": 128}
    made = QuantizedModel(method, tmp_path / "m", "Qwen2Moe", **EXPERTS, **shared)
    check_logits(made, load(made.folder))


def test_a_router_whose_scales_are_missing(tmp_path: Path) -> None:
    method = replace(METHODS["int-quantized"], also=(".gate",))
    made = QuantizedModel(method, tmp_path / "m", "Qwen3Moe", **EXPERTS)
    tensors = load_file(made.folder / "model.safetensors")
    name = "model.layers.1.mlp.gate.weight_scale"
    tensors[name] = tensors[name][1:].contiguous()
    save_file(tensors, made.folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"1\.mlp\.gate\.weight_scale is "):
        load(made.folder)


@pytest.mark.parametrize("is_first", [False, True])
def test_of_two_patterns_the_first_in_the_alphabet_counts(is_first: bool, tmp_path: Path) -> None:
    eight = {**scheme(**{**INT4, "num_bits": 8}), "targets": ["re:.*down_proj.*"]}
    four = {**scheme(**INT4), "targets": ["re:.*mlp.*"]}
    groups = (eight, four) if is_first else (four, eight)

    def encode(name: str, weight: Tensor) -> Any:
        return packed(name, weight, bits=8 if "down_proj" in name else 4)

    config = compressed("pack-quantized", *groups)
    made = QuantizedModel(Method(config, encode, dense=("self_attn",)), tmp_path / "m")
    check_logits(made, load(made.folder))


def test_a_group_without_weights_is_of_kv(tmp_path: Path) -> None:
    attention = {"targets": ["LlamaAttention"], "weights": None, "format": "dense"}
    config = compressed("pack-quantized", scheme(**INT4), attention)
    made = QuantizedModel(replace(METHODS["pack-quantized"], config=config), tmp_path / "m")
    check_logits(made, load(made.folder))


def test_gptq_of_some_layers_of_a_block(tmp_path: Path) -> None:
    lists = [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]
    config = {**METHODS["gptq"].config, "modules_in_block_to_quantize": lists}
    method = replace(METHODS["gptq"], config=config, dense=("self_attn",))
    made = QuantizedModel(method, tmp_path / "m", num_hidden_layers=1)
    check_logits(made, load(made.folder))


@pytest.mark.parametrize(
    "name", ["fp8-tensor", "fp8-blocks", "pack-quantized-zeros", "gptq-desc-act", "awq"]
)
def test_matrices_that_a_checkpoint_has_fused_are_cut(name: str, tmp_path: Path) -> None:
    """q, k and v in one tensor, gate and up in another; heads that turn in part are reordered."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    changes = {"rope_parameters": rope, "original_max_position_embeddings": 128}
    made = QuantizedModel(METHODS[name], tmp_path / name, "Phi3", **changes)
    model = load(made.folder)
    check_logits(made, model)
    if name not in INDEXED:
        check_ranks(made.folder, model)


def test_parts_with_scales_of_their_own_are_one_matrix(tmp_path: Path) -> None:
    model = load(QuantizedModel(METHODS["fp8-tensor"], tmp_path / "m").folder)
    qkv = model.get_submodule("model.layers.0.self_attn.qkv.matrix")
    scales = qkv.get_parameter("weight_scale")
    assert scales.shape == (512, 1) and len(scales.unique()) == 3


@pytest.mark.parametrize(
    ("name", "bits"),
    [("fp8-tensor", 8), ("fp8-blocks", 8), ("pack-quantized", 4), ("awq", 4), ("gptq", 4)],
)
def test_memory_holds_what_the_file_does(name: str, bits: int, tmp_path: Path) -> None:
    made = QuantizedModel(METHODS[name], tmp_path / name)
    model = load(made.folder)
    for module in model.modules():
        if isinstance(module, QuantizedMatrix):
            size = sum(parameter.nbytes for parameter in module.parameters())
            codes = module.out_features * module.in_features * bits / 8
            scales = 3 / 32 if bits == 4 else 4 / 128  # in groups of 64; a float32 for 128 at least
            assert codes < size <= codes * (1 + scales)


@pytest.mark.parametrize(
    ("name", "features", "matrices"),
    [
        ("fp8-tensor", 128, 2),
        ("fp8-blocks", 128, 2),
        ("fp8-blocks", 96, 9),  # gates and ups, which end within a block, are stored apart
        ("int-quantized", 128, 2),
        ("pack-quantized-zeros", 128, 2),
        ("gptq-desc-act", 128, 12),  # each has an index of its own
        ("awq", 128, 2),
        ("mxfp4-pack-quantized", 128, 2),
        ("nvfp4-pack-quantized", 128, 2),
    ],
)
def test_experts(name: str, features: int, matrices: int, tmp_path: Path) -> None:
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": features}
    folder = tmp_path / name
    made = QuantizedModel(METHODS[name], folder, "Qwen3Moe", num_hidden_layers=1, **shape)
    model = load(folder)
    experts = experts_of(model)
    assert sum(isinstance(part, QuantizedMatrix) for part in experts.modules()) == matrices
    check_logits(made, model)
    if name not in INDEXED:
        ranks = [TensorParallel(rank, 2, expert_parallel=True) for rank in range(2)]
        halves = [numbers(experts_of(load(folder, tp)).gate_up) for tp in ranks]
        assert torch.equal(torch.cat(halves), numbers(experts.gate_up))


def experts_of(model: CausalLM) -> Experts:
    (experts,) = (module for module in model.modules() if isinstance(module, Experts))
    return experts
