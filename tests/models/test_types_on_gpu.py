"""GGUF files whose matrices stay in their types on a GPU: the same model, in the file's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exact_products import check, exact
from gguf import GGMLQuantizationType as Type
from tiny_gguf import write_at_random as write

from quire import LLM, SamplingParams
from quire.errors import ModelError
from quire.layers.embedding import Vocabulary
from quire.layers.formats import StackedMatrix
from quire.layers.linear import Linear
from quire.layers.matrix import DenseMatrix, Matrix
from quire.layers.quantized.gguf_tiles import GGUFTilesMatrix
from quire.layers.tp import SINGLE, TensorParallel
from quire.layers.weights import room_needed
from quire.models.causal_lm import CausalLM
from quire.models.checkpoints.gguf import GGUFSource
from quire.models.source import build_model
from quire.runner.memory import weight_bytes

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
MIXED = {
    "model.layers.0.self_attn.v_proj.weight": Type.Q6_K,
    "model.layers.0.mlp.down_proj.weight": Type.Q6_K,
}
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def build(path: Path, keeps: bool, device: str, tp: TensorParallel = SINGLE) -> CausalLM:
    source = GGUFSource(path, keeps, on_gpu=True)
    return build_model(source, torch.float16, torch.device(device), False, tp)


def dense(matrix: Matrix) -> torch.Tensor:
    if isinstance(matrix, StackedMatrix):
        return torch.cat([dense(part) for part in matrix.parts])
    assert isinstance(matrix, GGUFTilesMatrix)
    return matrix.dense().cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tied", [False, True])
def test_layers_compute_what_the_file_has(device: str, tmp_path: Path, tied: bool) -> None:
    """Of two types in one layer, too, and of a vocabulary that fills no tile."""
    shape = {**SIZES, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 32}
    path = write(tmp_path, "Qwen3", Type.Q4_0, MIXED, tie_word_embeddings=tied, **shape)
    model, inflated = (build(path, keeps, device) for keeps in (True, False))
    wanted = dict(inflated.named_modules())
    layers = {at: each for at, each in model.named_modules() if isinstance(each, Linear)}
    assert any(isinstance(layer.matrix, StackedMatrix) for layer in layers.values())
    for at, layer in layers.items():
        numbers = dense(layer.matrix)
        whole = wanted[at].matrix
        assert isinstance(whole, DenseMatrix)
        assert torch.equal(numbers.half(), whole.weight.cpu()), at
        x = torch.randn(2, numbers.shape[1]).div(numbers.shape[1] ** 0.5).half()
        check(layer.matrix.multiply(x.to(device), None), exact(x, numbers, None), slack=4)
        if isinstance(layer, Vocabulary):
            ids = torch.tensor([100, 0, 57, 57])
            assert torch.equal(layer.embed(ids.to(device)).cpu(), numbers[ids].half())
    assert weight_bytes(model) < 0.4 * weight_bytes(inflated)


@pytest.mark.parametrize(
    ("type_", "most"), [(Type.Q4_K, 1.04), (Type.Q6_K, 1.01), (Type.Q8_0, 1.01), (Type.Q2_K, 1.02)]
)
def test_memory_is_about_that_of_the_file(tmp_path: Path, type_: Type, most: float) -> None:
    path = write(tmp_path, "Llama", type_, vocab_size=4096, **SIZES)
    model = build(path, True, "cpu")
    assert weight_bytes(model) < most * path.stat().st_size
    assert weight_bytes(model) == room_needed(model, torch.float16)


def test_each_rank_holds_its_part(tmp_path: Path) -> None:
    path = write(tmp_path, "Llama", Type.Q4_0, **SIZES)
    for rank in range(2):
        tp = TensorParallel(rank, 2)
        model, inflated = (build(path, keeps, "cpu", tp) for keeps in (True, False))
        wanted = dict(inflated.named_modules())
        for at, layer in model.named_modules():
            if isinstance(layer, Linear) and not isinstance(layer, Vocabulary):
                assert torch.equal(dense(layer.matrix).half(), wanted[at].matrix.weight), at


def test_columns_within_a_block_are_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, "Llama", Type.Q4_0)
    with pytest.raises(ModelError, match=r"o_proj is Q4_0, in blocks of 32 values.* 16 of 64"):
        build(path, True, "cpu", TensorParallel(0, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("type_", [Type.Q8_0, Type.Q2_K, Type.Q4_K, Type.Q6_K, Type.IQ4_XS])
def test_an_engine_computes_the_model_of_the_file(tmp_path: Path, type_: Type) -> None:
    path = write(tmp_path, "Llama", type_, **SIZES)
    prompt = [(7 * i * i + 3 * i) % 101 for i in range(40)]
    params = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=0, ignore_eos=True)
    found = []
    for dtype in ("auto", "bfloat16"):
        with LLM(str(path), device="cuda", num_blocks=16, use_tqdm=False, dtype=dtype) as llm:
            (output,) = llm.generate([prompt], params)
        entries = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        found.append(torch.tensor([entry[token].logprob for entry, token in entries]))
    assert (found[0] - found[1]).abs().max() < 0.1 * found[1].std()
