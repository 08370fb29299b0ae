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
from gguf_codes import random_codes
from gguf_models import model_parts, tiny_model, write

from quire import LLM, SamplingParams
from quire.errors import ModelError
from quire.kernels.four_bits import FourBitExperts
from quire.layers.experts import Experts, split
from quire.layers.matrix import DenseMatrix
from quire.layers.quantized.gguf import GGUFMatrix
from quire.layers.quantized.gguf_experts import GGUFExpertsMatrix
from quire.models.causal_lm import CausalLM
from quire.models.checkpoints.gguf import GGUFSource
from quire.models.source import build_model

Tensors = Iterator[tuple[str, Any, Type]]


def experts_of(model: CausalLM) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


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
    experts = experts_of(built[1])
    assert len(experts) == 2
    assert isinstance(experts[0].down, GGUFMatrix) == (type_ == Type.Q8_0)


@pytest.mark.parametrize("down", [Type.MXFP4, Type.Q8_0])
def test_four_bits_stay_so_on_a_gpu(
    tmp_path: Path, down: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all experts of a layer have them: a product of numbers goes with another of numbers."""
    monkeypatch.setattr(Experts, "lay_out", lambda experts: None)  # in a CPU's order, here
    path = write_experts(tmp_path, Type.MXFP4, down)
    kept, inflated = (
        build_model(
            GGUFSource(path, keeps, on_gpu=True), torch.float16, torch.device("cpu"), progress=False
        )
        for keeps in (True, False)
    )
    pairs = zip(experts_of(kept), experts_of(inflated), strict=True)
    for ours, wanted in pairs:
        for matrix, numbers in ((ours.gate_up, wanted.gate_up), (ours.down, wanted.down)):
            assert isinstance(numbers, DenseMatrix)
            if down == Type.Q8_0:
                assert isinstance(matrix, DenseMatrix)
                continue
            assert isinstance(matrix, GGUFExpertsMatrix)
            assert torch.equal(matrix.dense().half(), numbers.weight)
            matrix.lay_in_quarters(split(matrix, ours.count))
            assert isinstance(matrix.as_experts(ours.count), FourBitExperts)
            assert torch.equal(matrix.dense().half(), numbers.weight)


@pytest.mark.gpu
def test_an_engine_on_a_gpu_has_four_bits(tmp_path: Path) -> None:
    path = write_experts(tmp_path, Type.MXFP4, Type.MXFP4)
    prompt = [(7 * i * i + 3 * i) % 40 for i in range(40)]
    params = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=0, ignore_eos=True)
    found = []
    for dtype in ("auto", "bfloat16"):
        with LLM(str(path), device="cuda", num_blocks=16, use_tqdm=False, dtype=dtype) as llm:
            for experts in experts_of(llm.engine.runner.model):
                assert (experts.mlps.gate_up.packed is not None) == (dtype == "auto")
            (output,) = llm.generate([prompt], params)
        entries = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        found.append(torch.tensor([entry[token].logprob for entry, token in entries]))
    assert (found[0] - found[1]).abs().max() < 0.1 * found[1].std()


def test_scales_for_a_gpu_that_are_no_numbers(tmp_path: Path) -> None:
    def no_number(name: str, codes: Any) -> None:
        if name == "blk.1.ffn_up_exps.weight":
            codes[2, 3, 0] = 0xFF

    path = write_experts(tmp_path, Type.MXFP4, Type.MXFP4, no_number)
    source = GGUFSource(path, True, on_gpu=True)
    with pytest.raises(ModelError, match=r"^blk\.1\.ffn_up_exps\.weight has scales that are no"):
        build_model(source, torch.float16, torch.device("cpu"), progress=False)


def write_experts(
    folder: Path, gate_up: Type, down: Type, change: Callable[[str, Any], None] | None = None
) -> Path:
    """A mixture whose experts' matrices are of these types; `change` gets the codes of each."""
    _, family, extra = GGUF_CASES["mixtral"]
    model = tiny_model(family, {**extra, "hidden_size": 64, "intermediate_size": 96})
    parts = model_parts(model, "llama", experts=Type.F32)

    def of_types(writer: gguf.GGUFWriter) -> None:
        add = writer.add_tensor

        def add_of_type(name: str, tensor: Any, raw_dtype: Type | None = None) -> None:
            if "_exps." in name:
                raw_dtype = down if "_down_" in name else gate_up
                tensor = stored(raw_dtype, tensor)
                if change is not None:
                    change(name, tensor)
            add(name, tensor, raw_dtype=raw_dtype)

        writer.add_tensor = add_of_type
        parts(writer)

    return write(folder / "experts.gguf", of_types)


def stored(type_: Type, numbers: Any) -> Any:
    if type_ != Type.MXFP4:
        return quantize(numbers, type_)
    count, rows, columns = numbers.shape
    return random_codes(type_, count * rows, columns).reshape(count, rows, -1)


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
