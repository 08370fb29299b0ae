"""Checkpoints whose matrices stay in their types: the same model, in the memory of the file."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import effort
from gguf import GGMLQuantizationType as Type
from golden_text import PROMPTS, check, generate
from quantized_models import METHODS, QuantizedModel
from safetensors.torch import save_file
from tiny_gguf import SHAPE
from tiny_gguf import write_at_random as write

from quire import LLM, SamplingParams
from quire.engine.build_store import block_namespace
from quire.errors import ConfigError, ModelError
from quire.kernels.gguf_product import multiplies_bytes
from quire.kv.layout import KVLayout
from quire.layers.embedding import Vocabulary
from quire.layers.formats import AllDense, StackedMatrix
from quire.layers.linear import Linear
from quire.layers.matrix import DenseMatrix, Matrix
from quire.layers.quantized import gguf as gguf_matrices
from quire.layers.quantized.gguf import GGUFMatrix
from quire.layers.tp import TensorParallel
from quire.layers.weights import room_needed
from quire.models.checkpoints.gguf import GGUFSource
from quire.models.checkpoints.gguf_file import GGUFFile
from quire.models.checkpoints.safetensors import FolderSource
from quire.models.hf_config import read_hf_config
from quire.models.pool_groups import pool_groups
from quire.models.source import build_model, open_model, shapes
from quire.runner import device
from quire.runner.device import keeps_types
from quire.runner.memory import weight_bytes

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that is not made for bfloat16, which has no use for halves."""
    monkeypatch.setattr(gguf_matrices, "is_made_for_bfloat16", lambda: False)


def dense(matrix: Matrix) -> torch.Tensor:
    if isinstance(matrix, StackedMatrix):
        return torch.cat([dense(part) for part in matrix.parts])
    assert isinstance(matrix, GGUFMatrix)
    return matrix.dense()


@pytest.mark.parametrize(
    ("type_", "quantization", "words"),
    [
        (Type.Q4_0, "int8", "matrices (Q4_0) are dequantised and rounded once more, to int8"),
        (Type.Q4_0, None, ""),
        (Type.Q4_0, "none", ""),
        (Type.F16, "int8", ""),  # its embedding and head, which stay numbers, are in Q8_0
    ],
)
def test_a_file_that_is_rounded_once_more_says_so(
    type_: Type, quantization: str | None, words: str, tmp_path: Path, caplog: Any
) -> None:
    ends = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), Type.Q8_0)
    path = write(tmp_path, "Llama", type_, ends)
    with LLM(str(path), device="cpu", num_blocks=8, quantization=quantization, use_tqdm=False):
        said = [text for text in caplog.messages if "rounded" in text]
    assert len(said) == bool(words)
    assert words in "".join(said)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("name", "type_"),
    [
        ("Llama", Type.Q4_0),
        ("Qwen3", Type.Q8_0),
        ("Llama", Type.F16),
        ("Qwen3", Type.BF16),
    ],
)
def test_each_rank_holds_its_part_as_it_is(
    tmp_path: Path, name: str, type_: Type, size: int
) -> None:
    path = write(tmp_path, name, type_)
    for rank in range(size):
        tp = TensorParallel(rank, size)
        kept, inflated = (
            build_model(GGUFSource(path, keeps), torch.float32, CPU, False, tp)
            for keeps in (True, False)
        )
        wanted = dict(inflated.named_modules())
        matrices = [(at, each) for at, each in kept.named_modules() if isinstance(each, Linear)]
        assert matrices
        for at, layer in matrices:
            whole = wanted[at].matrix
            assert isinstance(whole, DenseMatrix)
            rows = len(whole.weight)
            if isinstance(layer, Vocabulary):  # the last rank's has padding
                rows = len(range(layer.shape[0])[layer.part.start : layer.part.stop])
            assert torch.equal(dense(layer.matrix)[:rows], whole.weight[:rows]), at


def test_columns_within_a_block_are_refused_by_name(tmp_path: Path) -> None:
    source = GGUFSource(write(tmp_path, "Llama", Type.Q4_0), keeps_types=True)
    with pytest.raises(ModelError, match=r"o_proj is Q4_0, in blocks of 32 values.* 16 of 64"):
        build_model(source, torch.float32, CPU, False, TensorParallel(0, 4))


@pytest.mark.parametrize("type_", [Type.Q4_0, Type.Q4_1, Type.Q8_0])
@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scales_that_are_not_numbers_are_refused_by_name(
    tmp_path: Path, type_: Type, scale: float
) -> None:
    path = write(tmp_path, "Llama", type_)
    info = GGUFFile(path).tensors["blk.1.ffn_down.weight"]
    with path.open("r+b") as file:
        file.seek(info.start + info.num_bytes // 2)  # the rows are even: a block begins there
        file.write(struct.pack("<e", scale))
    with pytest.raises(ModelError, match=r"^blk\.1\.ffn_down\.weight has scales that are no") as no:
        build_model(GGUFSource(path, keeps_types=True), torch.float32, CPU, False)
    assert "\n" not in str(no.value)


def test_a_matrix_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, "Llama", Type.Q4_0)
    source = GGUFSource(path, keeps_types=True)
    source.config = replace(source.config, intermediate_size=96)
    with pytest.raises(ModelError, match=r"unfit: blk\.\d\.ffn_\w+\.weight is") as no:
        build_model(source, torch.float32, CPU, False)
    assert "\n" not in str(no.value)


def test_memory_is_that_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "Llama", Type.Q4_0, vocab_size=4096)
    kept, inflated = (
        room_needed(shapes(GGUFSource(path, keeps).config), torch.float32) for keeps in (1, 0)
    )
    assert kept < 1.05 * path.stat().st_size
    assert inflated > 6 * kept


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_folder_in_16_bits_stays_so(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = {"architectures": ["LlamaForCausalLM"], **SHAPE, "vocab_size": 2000}
    torch.manual_seed(3)
    tensors = {
        weight.name: (0.2 * torch.randn(weight.shape)).to(dtype)
        for weight in shapes(read_hf_config(raw)).weights()
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, tmp_path / "model.safetensors")
    kept, inflated = (
        build_model(FolderSource(tmp_path, keeps), torch.float32, CPU, False)
        for keeps in (True, False)
    )
    size = (tmp_path / "model.safetensors").stat().st_size
    assert weight_bytes(kept) < 1.05 * size
    assert weight_bytes(inflated) > 1.9 * size
    wanted = dict(inflated.named_modules())
    layers = [(at, each) for at, each in kept.named_modules() if isinstance(each, Linear)]
    x = torch.randn(21, 128)
    for at, layer in layers:
        numbers = wanted[at].matrix.weight
        assert torch.equal(dense(layer.matrix), numbers), at
        rows = x[:, : numbers.shape[1]]
        torch.testing.assert_close(layer.matrix.multiply(rows, None), rows @ numbers.T)


def test_a_cpu_made_for_bfloat16_computes_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (device, gguf_matrices):
        monkeypatch.setattr(module, "is_made_for_bfloat16", lambda: True)
    config = GGUFSource(write(tmp_path, "Llama", Type.BF16), keeps_types=True).config
    assert isinstance(config.formats, AllDense)
    assert device.choose_dtype("auto", config, CPU) == torch.bfloat16


def test_a_cpu_made_for_bfloat16_computes_codes_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And then it has a use for halves, too."""
    for module in (device, gguf_matrices):
        monkeypatch.setattr(module, "is_made_for_bfloat16", lambda: True)
    path = write(tmp_path, "Llama", Type.Q8_0, {"lm_head.weight": Type.F16})
    config = GGUFSource(path, keeps_types=True).config
    assert device.choose_dtype("auto", config, CPU) == torch.float32
    assert device.choose_dtype("bfloat16", config, CPU) == torch.bfloat16
    assert {kind for _, kind in config.formats.types} == {"Q8_0", "F16"}


def test_blocks_have_names_of_their_own(tmp_path: Path) -> None:
    """KV that was computed with rounded activations is not taken for exact."""
    path = write(tmp_path, "Llama", Type.Q4_0)
    names = set()
    for keeps in (True, False):
        source = GGUFSource(path, keeps)
        source.fingerprint.begin()
        layout = KVLayout(pool_groups(source.config, window_groups=False), 16, torch.float32)
        names.add(block_namespace(source, torch.float32, layout, 1).root_key())
    assert len(names) == 2


def test_types_are_kept_unless_another_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert keeps_types("auto", CPU)
    assert not keeps_types("float32", CPU)
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert keeps_types("auto", gpu)
    assert not keeps_types("bfloat16", gpu)
    monkeypatch.setattr(torch.version, "cuda", None)  # another's: these have no kernels
    assert not keeps_types("auto", gpu)


def test_none_is_for_numbers_alone(tmp_path: Path) -> None:
    path = write(tmp_path, "Llama", Type.Q4_0)
    settings: dict[str, Any] = {"keeps_types": True}
    for quantization, is_kept in ((None, True), ("auto", True), ("none", False)):
        config = open_model(str(path), quantization=quantization, **settings).config
        assert (config.formats != AllDense()) == is_kept
    quantised = QuantizedModel(METHODS["awq"], tmp_path / "awq", num_hidden_layers=1).folder
    with pytest.raises(ModelError, match="is quantised, so quantization=none cannot be"):
        open_model(str(quantised), quantization="none", **settings)
    held = []
    for quantization in ("auto", "none"):
        config = open_model(str(path), quantization=quantization, **settings).config
        held.append(room_needed(shapes(config), torch.float32))
    assert held[1] > 3 * held[0]
    with LLM(str(path), quantization="none", device="cpu", num_blocks=8, use_tqdm=False) as llm:
        assert llm.config.quantization == "none"


@pytest.mark.parametrize(("quantization", "is_kept"), [("auto", True), ("none", False)])
def test_none_is_for_a_draft_model_too(tmp_path: Path, quantization: str, is_kept: bool) -> None:
    path = str(write(tmp_path, "Llama", Type.Q4_0))
    settings: dict[str, Any] = {"device": "cpu", "num_blocks": 8, "use_tqdm": False}
    with LLM(path, quantization=quantization, speculative=path, **settings) as llm:
        drafts = llm.engine.scheduler.speculation.drafter._runner.model
        assert any(isinstance(module, GGUFMatrix) for module in drafts.modules()) == is_kept


def test_a_quantised_draft_model_is_refused_by_none(tmp_path: Path) -> None:
    shape = {"vocab_size": 131, "num_hidden_layers": 1}
    path = str(write(tmp_path, "Llama", Type.Q4_0, **shape))
    draft = str(QuantizedModel(METHODS["awq"], tmp_path / "awq", **shape).folder)
    with pytest.raises(ConfigError, match="awq is quantised, so quantization=none cannot be"):
        LLM(path, quantization="none", speculative=draft, device="cpu", use_tqdm=False)


@pytest.mark.parametrize("type_", [Type.Q8_0, Type.Q2_K, Type.Q3_K, Type.IQ4_NL, Type.IQ4_XS])
def test_an_engine_computes_the_model_of_the_file(tmp_path: Path, type_: Type) -> None:
    path = write(tmp_path, "Llama", type_, hidden_size=256, intermediate_size=512, head_dim=64)
    prompt = [(7 * i * i + 3 * i) % 101 for i in range(40)]
    params = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=0, ignore_eos=True)
    found, tokens = {}, []
    for dtype in ("auto", "float32"):
        settings = {"device": "cpu", "num_blocks": 16, "use_tqdm": False, "dtype": dtype}
        with LLM(str(path), **settings) as llm:
            (output,) = llm.generate([prompt], params)
        tokens.append(output.outputs[0].token_ids)
        entries = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        found[dtype] = torch.tensor([entry[token].logprob for entry, token in entries])
    assert tokens[0] == tokens[1]
    difference = (found["auto"] - found["float32"]).abs()
    assert 0 < difference.max() < 0.1 * found["float32"].std()


def test_the_demo_model_foretells_a_text_as_it_does_dequantised(smollm2_path: Path) -> None:
    text = (Path(__file__).parents[1] / "golden" / "prose.txt").read_text()[:1000]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    found = []
    few_bits = [{"activation_bits": 8}] if multiplies_bytes() else []
    for own in ({"dtype": "float32"}, {}, *few_bits):
        settings = {"device": "cpu", "num_blocks": 24, "use_tqdm": False, **own}
        with LLM(str(smollm2_path), **settings) as llm:
            (output,) = llm.generate([text], params)
        entries = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        found.append(torch.tensor([entry[token].logprob for entry, token in entries]))
    difference, *coarse = (logprobs - found[0] for logprobs in found[1:])
    assert len(difference) > 150
    assert difference.std() < 0.002  # of numbers whose own is about 3
    assert difference.mean().abs() < 1e-4  # 0.01 % of perplexity
    for each in coarse:
        assert 10 * difference.std() < each.std() < 0.1 and each.mean().abs() < 0.01


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "float32"}, "this model has none, though quantization='int8' would make"),
        ({"quantization": "fp8", "dtype": "float32"}, "this model has none, though"),
        ({"activation_bits": 4}, "activation_bits must be one of 16, 8, not 4"),
    ],
)
def test_activations_of_few_bits_are_for_codes(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    path = str(write(tmp_path, "Llama", Type.Q4_0, num_hidden_layers=1))
    with pytest.raises(ConfigError, match=words):
        LLM(path, device="cpu", use_tqdm=False, **({"activation_bits": 8} | settings))


def test_the_demo_model_answers_as_transformers_does_dequantised(smollm2_path: Path) -> None:
    some = sorted(PROMPTS, key=lambda prompt: len(prompt["ids"]))[: effort(6, 12)]
    with LLM(str(smollm2_path), device="cpu", num_blocks=200, use_tqdm=False) as llm:
        check(generate(llm, some), some)
