"""Which layers a quantization_config means."""

from __future__ import annotations

import pytest
import torch

from quire.layers.formats import Dense
from quire.layers.quantized.grouped import Grouped
from quire.layers.quantized.scaled import Fp8, Int8
from quire.models.quantization.mxfp4 import read_mxfp4
from quire.models.quantization.names import is_named
from quire.models.quantization.read import read_formats

Q = "model.layers.3.self_attn.q_proj"
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}


@pytest.mark.parametrize(
    ("listed", "is_meant"),
    [
        (Q, True),
        ("q_proj", True),
        ("self_attn.q_proj", True),
        ("model.layers.3", True),
        ("layers.3", True),
        ("model.layers.3.", True),
        ("model.layers", True),
        ("layers.33", False),
        ("proj", False),
        ("mlp.gate", False),
        ("model.layers.3.self_attn.q_proj.x", False),
        ("*.3.self_attn*", True),
        ("*.4.self_attn*", False),
        ("re:.*self_attn.*", True),
        ("re:self_attn.*", False),
        (r"re:model\.layers\.\d+\.self_attn\.(q|k|v)_proj$", True),
        ("re:.*o_proj", False),
        ("re:language_model.model.layers.3.*", True),
        ("model.language_model.layers.3", True),  # as transformers 5 calls it
        (r"re:model[.]language_model[.]layers[.]3[.]self_attn.*", True),
        ("re:model.language_model.layers.4.*", False),
    ],
)
def test_a_layer_is_meant(listed: str, is_meant: bool) -> None:
    assert is_named([Q], [listed]) == is_meant


def test_a_fused_tensor_is_meant_by_either_name() -> None:
    fused = "model.layers.3.self_attn.qkv_proj"
    assert is_named([Q, fused], ["qkv_proj"]) and is_named([Q, fused], ["q_proj"])


def test_a_name_comes_before_a_pattern_and_a_pattern_before_the_class() -> None:
    groups = {
        "a": {"targets": ["Linear"], "weights": INT8},
        "b": {"targets": ["re:.*self_attn.*"], "weights": {**INT8, "symmetric": False}},
        "c": {"targets": [Q], "weights": {**INT8, "strategy": "group", "group_size": 64}},
    }
    method = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    raw = {"quantization_config": {**method, "config_groups": groups}, "dtype": "float16"}
    formats = read_formats(raw)
    scales = {"scale_dtype": torch.float16}
    assert formats.of(Q) == Grouped(bits=8, group=64, **scales)
    assert formats.of(Q.replace("q_", "k_")) == Grouped(bits=8, has_zeros=True, **scales)
    assert formats.of("model.layers.3.mlp.up_proj") == Int8()
    inner = {**groups["b"], "targets": ["re:model.language_model.layers.*"]}
    named = read_formats({"quantization_config": {**method, "config_groups": {"a": inner}}})
    assert named.of(Q) == Grouped(bits=8, has_zeros=True, scale_dtype=torch.float32)
    assert formats.of("lm_head") == Int8()  # which this one does not ignore
    assert formats.of("model.embed_tokens") == Dense()


@pytest.mark.parametrize(
    ("inputs", "rounded"),
    [(None, False), ({"num_bits": 8, "dynamic": True}, True), ({"num_bits": 4}, False)],
)
def test_whether_activations_are_rounded_is_what_the_checkpoint_says(inputs, rounded) -> None:
    groups = {"a": {"targets": ["Linear"], "weights": INT8, "input_activations": inputs}}
    method = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    formats = read_formats({"quantization_config": {**method, "config_groups": groups}})
    assert formats.of(Q) == Int8(rounds_inputs=rounded)


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8"])
def test_ends_of_a_model_are_dense(method: str) -> None:
    formats = read_formats({"quantization_config": {"quant_method": method}})
    assert formats.of("lm_head") == formats.of("model.embed_tokens") == Dense()
    assert formats.of(Q) == Fp8()


def test_experts_of_gpt_oss() -> None:
    """Their tensors are shown as matrices of codes; a family that has experts takes them."""
    formats = read_mxfp4({"modules_to_not_convert": ["model.layers.*.self_attn"]})
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stored = {
        f"{name}_blocks": torch.arange(2 * 6 * 2 * 16, dtype=torch.uint8).reshape(2, 6, 2, 16),
        f"{name}_scales": torch.zeros(2, 6, 2, dtype=torch.uint8),
        f"{name}_bias": torch.zeros(2, 6),
    }
    shown = dict(formats.canonical(stored))
    codes = shown[f"{name}.weight"]
    assert tuple(codes.shape) == (2, 6, 32)
    part = (slice(1, 2), slice(2, 4), slice(0, 16))
    assert torch.equal(codes[part], stored[f"{name}_blocks"][1:2, 2:4, 0])
    assert shown.keys() == {f"{name}.weight", f"{name}.weight_scale", f"{name}_bias"}
    assert formats.of(Q) == Dense()
