"""GGUF files: every type of tensor, the families as converters write them, and broken files."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from families import GGUF_CASES, causal_lm
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from gguf_models import Writes, model_parts, tensors_of, tiny_model, write

from quire.errors import ModelError
from quire.layers.rope import inverse_frequencies
from quire.models.checkpoints.gguf import GGUFSource
from quire.models.checkpoints.gguf_architecture import GGUFArchitecture
from quire.models.checkpoints.gguf_config import ROPE_TENSORS
from quire.models.checkpoints.gguf_file import SUPPORTED_TYPES, GGUFFile
from quire.models.gemma3 import Gemma3Config
from quire.models.hf_config import read_hf_config
from quire.models.source import build_model, read_whole

NOT_MADE = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")


# --- types of tensors ---------------------------------------------------------------------------


def encoded(type_: Type, shape: tuple[int, int]) -> np.ndarray:
    """Some tensor of a type: quantised numbers, or any bytes where the package cannot quantise."""
    rng = np.random.default_rng(7)
    if type_.name not in NOT_MADE:
        return quantize(rng.standard_normal(shape, dtype=np.float32), type_)
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    num_bytes = shape[1] // block_values * block_bytes
    return rng.integers(0, 256, (shape[0], num_bytes), dtype=np.uint8)


@pytest.mark.filterwarnings("ignore:invalid value")  # any bytes may be NaNs
@pytest.mark.parametrize("shape", [(1, 256), (3, 768), (48, 2560)])
@pytest.mark.parametrize("name", SUPPORTED_TYPES)
def test_every_type(tmp_path: Path, name: str, shape: tuple[int, int]) -> None:
    type_ = Type[name]
    data = encoded(type_, shape)
    path = write(tmp_path / "x.gguf", lambda w: w.add_tensor("t", data, raw_dtype=type_))
    tensor = GGUFFile(path).tensor("t")[()]
    assert tuple(tensor.shape) == shape
    np.testing.assert_array_equal(tensor.float().numpy(), dequantize(data, type_))
    native = {"F16": torch.float16, "BF16": torch.bfloat16}.get(name, torch.float32)
    assert tensor.dtype == native


@pytest.mark.parametrize("type_", [Type.IQ3_S, Type.IQ2_S, Type.TQ1_0, Type.I32, Type.F64])
def test_another_type_is_refused(tmp_path: Path, type_: Type) -> None:
    block_bytes = gguf.GGML_QUANT_SIZES[type_][1]
    data = np.zeros((2, block_bytes), dtype=np.uint8)
    path = write(tmp_path / "x.gguf", lambda w: w.add_tensor("t", data, raw_dtype=type_))
    with pytest.raises(ModelError, match=rf"{type_.name}.*Q4_0, Q4_1.*Q6_K"):
        GGUFFile(path)


def test_metadata_reads_as_the_package_reads_it(tmp_path: Path) -> None:
    def values(writer: gguf.GGUFWriter) -> None:
        for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
            getattr(writer, f"add_{kind}")(f"a.{kind}", 100)
        writer.add_int32("a.negative", -5)
        writer.add_float32("a.float32", 0.1)
        writer.add_float64("a.float64", 0.1)
        writer.add_bool("a.bool", True)
        writer.add_string("a.string", "Ünï 汉 🍐")
        writer.add_array("a.words", ["", "Ġthe", "汉"])
        writer.add_array("a.numbers", [1, -2, 3])
        writer.add_array("a.reals", [0.5, -0.25])
        writer.add_array("a.flags", [True, False])

    path = write(tmp_path / "x.gguf", values)
    expected = {
        name: field.contents()
        for name, field in gguf.GGUFReader(path).fields.items()
        if not name.startswith("GGUF.")
    }
    assert len(expected) == 18
    assert GGUFFile(path).metadata == expected


# --- families -----------------------------------------------------------------------------------

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("name", GGUF_CASES)
def test_a_family_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    architecture, family, extra = GGUF_CASES[name]
    model = tiny_model(family, extra)
    parts = model_parts(model, architecture)
    source = GGUFSource(write(tmp_path / "x.gguf", parts, architecture=architecture))

    expected = {n: t for n, t in tensors_of(model).items() if n != "lm_head.weight"}
    if not model.config.tie_word_embeddings:
        expected["lm_head.weight"] = model.lm_head.weight
    found = read_whole(source)
    stored = GGUFFile(tmp_path / "x.gguf").tensors.keys() - {*ROPE_TENSORS}
    assert {source.stored_name(n) for n in found} == stored
    assert found.keys() == expected.keys()
    for tensor_name, tensor in expected.items():
        if architecture.startswith("gemma") and tensor_name.endswith("norm.weight"):
            torch.testing.assert_close(found[tensor_name], tensor, atol=1e-6, rtol=0)
        else:
            assert torch.equal(found[tensor_name], tensor), tensor_name

    raw = {**model.config.to_dict(), "architectures": [causal_lm(family)]}
    config = read_hf_config(raw)
    changes = {"dtype": None, "rms_norm_eps": float(np.float32(config.rms_norm_eps))}
    if (architecture, family) == ("llama", "Mistral"):  # which has no biases
        config = read_hf_config({**raw, "architectures": ["LlamaForCausalLM"]})
    assert vars(source.config) == {**vars(config), **changes}
    assert source.tokenizer() is None


def test_llama3_positions(tmp_path: Path) -> None:
    """`rope_freqs` holds one divisor for each frequency, as the converter computes them."""
    model = tiny_model("Llama", {"rope_parameters": LLAMA3, "head_dim": 64})
    theirs = model.model.rotary_emb.inv_freq
    plain = 1.0 / LLAMA3["rope_theta"] ** (torch.arange(0, 64, 2).float() / 64)
    divisors = plain / theirs
    assert divisors.unique().numel() > 3

    def factors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", divisors.numpy())

    path = write(tmp_path / "x.gguf", model_parts(model, "llama"), factors)
    source = GGUFSource(path)
    torch.testing.assert_close(
        inverse_frequencies(64, source.config.rope), theirs, rtol=1e-6, atol=0
    )
    assert "rope_freqs.weight" not in read_whole(source)


def test_all_tokens_that_end_a_text(tmp_path: Path) -> None:
    def ends(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(7)
        writer.add_eom_token_id(2)

    path = write(tmp_path / "x.gguf", model_parts(tiny_model("Llama", {}), "llama"), ends)
    assert GGUFSource(path).config.eos_token_ids == (2, 7)


def test_gemma_ends_with_a_turn_where_the_file_does_not_say_so(tmp_path: Path) -> None:
    def tokens(writer: gguf.GGUFWriter) -> None:
        writer.add_array("tokenizer.ggml.tokens", ["<pad>", "<eos>", "<bos>", "<end_of_turn>"])

    _, family, extra = GGUF_CASES["gemma3"]
    parts = model_parts(tiny_model(family, extra), "gemma3")
    path = write(tmp_path / "x.gguf", parts, tokens, architecture="gemma3")
    assert GGUFSource(path).config.eos_token_ids == (2, 3)


def test_scores_of_gemma_27b_in_gguf(tmp_path: Path) -> None:
    """Which no key of a file says; llama.cpp goes by the number of layers."""
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "head_dim": 16}
    model = tiny_model("Gemma3Text", {**shape, "num_hidden_layers": 62, "sliding_window": None})
    path = write(tmp_path / "x.gguf", model_parts(model, "gemma3"), architecture="gemma3")
    config = GGUFSource(path).config
    assert isinstance(config, Gemma3Config)
    assert config.query_pre_attn_scalar == 4
    assert not any(config.is_local)


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", model_parts(tiny_model("Llama", {}), "llama"))
    content = bytearray(path.read_bytes())
    (tmp_path / "copy.gguf").write_bytes(content)
    content[GGUFFile(path).tensors["blk.1.attn_q.weight"].start + 5000] ^= 1
    (tmp_path / "changed.gguf").write_bytes(content)
    names = ("x", "copy", "changed")
    sources = (GGUFSource(tmp_path / f"{name}.gguf") for name in names)
    first, copy, changed = (source.fingerprint.result() for source in sources)
    assert first == copy != changed


def test_names() -> None:
    named = GGUFArchitecture("x", blocks={"ffn_up": "mlp.gate_up_proj"}).hugging_face_name
    assert named("token_embd.weight") == "model.embed_tokens.weight"
    assert named("blk.12.attn_q.bias") == "model.layers.12.self_attn.q_proj.bias"
    assert named("blk.2.ffn_up.weight") == "model.layers.2.mlp.gate_up_proj.weight"
    assert named("blk.1.strange.weight") == "blk.1.strange.weight"
    assert named("blk.1.ffn_up.0.weight") == "blk.1.ffn_up.0.weight"  # there are no experts


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.1.attn_k.weight", "token_embd.weight"])
@pytest.mark.parametrize("layers", [1, 2])
def test_what_a_file_lacks_is_named_as_it_would_be(
    tmp_path: Path, name: str, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = name.replace("1", str(layers - 1))
    parts = model_parts(tiny_model("Llama", {"num_hidden_layers": layers}), "llama")
    source = GGUFSource(write(tmp_path / "x.gguf", parts))
    all_tensors = list(source.tensors())
    kept = [pair for pair in all_tensors if source.stored_name(pair[0]) != name]
    assert len(kept) == len(all_tensors) - 1
    monkeypatch.setattr(source, "tensors", lambda: iter(kept))
    with pytest.raises(ModelError, match=rf"\(missing: {re.escape(name)}\)"):
        build_model(source, torch.float32, torch.device("cpu"), progress=False)


# --- broken files -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    return write(path, model_parts(tiny_model("Llama", {}), "llama")).read_bytes()


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        GGUFSource(path)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04 a zip", "not a GGUF file"),
        (b"GGU", "not a GGUF file"),
        (b"GGUF", "truncated"),
        (b"GGUF\x01\x00\x00\x00" + bytes(16), "version 1"),
        (b"GGUF\x00\x00\x00\x03" + bytes(16), "little-endian"),
        (b"GGUF\x03\x00\x00\x00" + bytes(16), "architecture None"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, "18,446,744,073,709,551,615 tensors"),
    ],
)
def test_what_is_no_model(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    assert reason in refusal(path)


def test_no_file(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "missing.gguf")
    assert "Is a directory" in refusal(tmp_path)


def test_truncated_anywhere(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "x.gguf"
    for length in [*range(4, 2000, 37), len(good) // 2, len(good) - 1]:
        path.write_bytes(good[:length])
        assert "truncated" in refusal(path), length


def test_damaged_headers_are_refused_or_read(tmp_path: Path, good: bytes) -> None:
    """Whatever the bytes are, nothing but a `ModelError` comes out."""
    header = good.index(b"output_norm") + 100
    rng = random.Random(3)
    path = tmp_path / "x.gguf"
    refused = 0
    for _ in range(400):
        damaged = bytearray(good)
        for _ in range(rng.choice((1, 1, 4))):
            damaged[rng.randrange(4, header)] = rng.choice((0, 1, 8, 9, 255, rng.randrange(256)))
        path.write_bytes(damaged)
        try:
            read_whole(GGUFSource(path))
        except ModelError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 50


def replaced(**values: Any) -> Writes:
    def write_values(writer: gguf.GGUFWriter) -> None:
        for key, value in values.items():
            name = key.replace("__", ".")
            for data in writer.kv_data:
                data.pop(name, None)
            if isinstance(value, list):
                writer.add_array(name, value)
            elif isinstance(value, str):
                writer.add_string(name, value)
            elif value is not None:
                writer.add_uint32(name, value)

    return write_values


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"general__architecture": "gemma"}, "llama, mistral, qwen2, qwen3"),
        ({"general__architecture": ["llama"]}, "llama, mistral, qwen2, qwen3"),
        ({"split__count": 3}, "llama-gguf-split"),
        (
            {"general__architecture": "gemma2", "gemma2__expert_count": 8},
            "mixture of experts of architecture 'gemma2' and Quire knows llama, qwen2moe, qwen3moe",
        ),
        ({"llama__expert_count": "many"}, "num_experts='many'"),
        ({"llama__expert_count": 8, "llama__expert_used_count": 9}, "9 of 8 experts"),
        ({"llama__block_count": None}, "llama.block_count=None"),
        ({"llama__block_count": 3}, "blk.2.attn_output.weight"),
        ({"llama__nextn_predict_layers": 1}, "nextn_predict_layers"),
        ({"llama__block_count": 2**31}, "blk."),
        ({"llama__embedding_length": "wide"}, "positive whole number"),
        ({"llama__attention__head_count": 0}, "positive whole number"),
        ({"llama__attention__head_count_kv": 3}, "evenly"),
        ({"llama__attention__head_count_kv": [2, 4]}, "llama.attention.head_count_kv=[2, 4]"),
        ({"llama__attention__value_length": 8}, "two sizes"),
        ({"llama__rope__dimension_count": 8}, "part of each head"),
        ({"llama__rope__scaling__type": "strange"}, "strange"),
        ({"general__alignment": 12}, "alignment"),
    ],
)
def test_what_quire_cannot_compute(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    parts = model_parts(tiny_model("Llama", {}), "llama")
    path = write(tmp_path / "x.gguf", parts, replaced(**change))
    assert reason in refusal(path)


def test_layers_that_all_say_the_same(tmp_path: Path) -> None:
    parts = model_parts(tiny_model("Llama", {}), "llama")
    change = replaced(llama__attention__head_count_kv=[2, 2])
    assert GGUFSource(write(tmp_path / "x.gguf", parts, change)).config.num_kv_heads == 2


def test_rows_that_heads_cannot_share(tmp_path: Path) -> None:
    parts = model_parts(tiny_model("Llama", {}), "llama")
    change = replaced(llama__attention__head_count=12, llama__attention__key_length=16)
    source = GGUFSource(write(tmp_path / "x.gguf", parts, change))
    with pytest.raises(ModelError, match="heads cannot share"):
        read_whole(source)
