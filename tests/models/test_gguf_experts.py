"""Experts in GGUF files: their gates, and those of old files, where each has tensors of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from families import GGUF_CASES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from gguf_models import model_parts, tiny_model, write

from quire.errors import ModelError
from quire.layers.experts import Experts
from quire.layers.quantized.gguf import GGUFMatrix
from quire.models.checkpoints.gguf import GGUFSource
from quire.models.source import build_model

Tensors = Iterator[tuple[str, Any, Type]]


@pytest.mark.parametrize("type_", [Type.BF16, Type.Q8_0])
def test_gates_are_numbers_whatever_their_type(tmp_path: Path, type_: Type) -> None:
    """No format multiplies them."""
    _, family, extra = GGUF_CASES["qwen2-moe"]
    model = tiny_model(family, {**extra, "hidden_size": 64})
    parts = model_parts(model, "qwen2moe", gates=type_)
    source = GGUFSource(write(tmp_path / "x.gguf", parts, architecture="qwen2moe"), True)
    built = build_model(source, torch.float32, torch.device("cpu"), progress=False)
    for name in ("gate.weight", "shared_expert_gate.weight"):
        gate = built.get_parameter(f"model.layers.0.mlp.{name}")
        right = model.get_parameter(f"model.layers.0.mlp.{name}")
        assert 0 < (gate - right).abs().max() < 0.05, name


@pytest.mark.parametrize("type_", [Type.F16, Type.Q8_0])
def test_experts_apart(tmp_path: Path, type_: Type) -> None:
    _, family, extra = GGUF_CASES["mixtral"]
    model = tiny_model(family, extra)
    built = []
    for apart in (False, True):
        parts = model_parts(model, "llama", experts=type_, apart=apart)
        source = GGUFSource(write(tmp_path / f"{apart}.gguf", parts), keeps_types=True)
        built.append(build_model(source, torch.float32, torch.device("cpu"), progress=False))
    together, each = (model.state_dict() for model in built)
    assert together.keys() == each.keys()
    assert all(torch.equal(tensor, each[name]) for name, tensor in together.items())
    experts = [module for module in built[1].modules() if isinstance(module, Experts)]
    assert len(experts) == 2
    assert isinstance(experts[0].down, GGUFMatrix) == (type_ == Type.Q8_0)


def one_more(name: str, tensor: Any) -> Tensors:
    yield name, tensor, Type.Q8_0
    yield name.replace(".1.", ".99."), tensor, Type.Q8_0


def left_out(name: str, tensor: Any) -> Tensors:
    yield from ()


def together_too(name: str, tensor: Any) -> Tensors:
    yield name, tensor, Type.Q8_0
    yield name.replace(".1.", "_exps."), np.stack([tensor[::-1]] * 4), Type.Q8_0


def of_another_type(name: str, tensor: Any) -> Tensors:
    yield name, quantize(dequantize(tensor, Type.Q8_0), Type.Q4_0), Type.Q4_0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (one_more, "unexpected: blk.0.ffn_up.99.weight"),
        (left_out, "missing: blk.0.ffn_up.1.weight"),
        (together_too, "blk.0.ffn_up_exps.weight differs"),
        (of_another_type, "model.layers.0.block_sparse_moe.experts.1 is quantised in another way"),
    ],
)
def test_experts_apart_that_do_not_fit(
    tmp_path: Path, change: Callable[[str, Any], Tensors], reason: str
) -> None:
    _, family, extra = GGUF_CASES["mixtral"]
    parts = model_parts(tiny_model(family, extra), "llama", experts=Type.Q8_0, apart=True)

    def changed(writer: gguf.GGUFWriter) -> None:
        add = writer.add_tensor

        def add_changed(name: str, tensor: Any, raw_dtype: Type | None = None) -> None:
            if name != "blk.0.ffn_up.1.weight":
                add(name, tensor, raw_dtype=raw_dtype)
                return
            for called, stored, type_ in change(name, tensor):
                add(called, stored, raw_dtype=type_)

        writer.add_tensor = add_changed
        parts(writer)

    source = GGUFSource(write(tmp_path / "x.gguf", changed), keeps_types=True)
    with pytest.raises(ModelError, match=reason):
        build_model(source, torch.float32, torch.device("cpu"), progress=False)
