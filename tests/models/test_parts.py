"""Each rank reads its part of a checkpoint: the right one, and of all bytes no more than that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_gguf
import torch
from families import FUSED, SHARDED
from fuzz.model_folders import read_safetensors
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file
from torch import Tensor

from quire.errors import ModelError
from quire.layers.tp import TensorParallel
from quire.layers.weights import TensorPlace, Weight
from quire.models.checkpoints import weights
from quire.models.checkpoints.dummy import DummySource
from quire.models.checkpoints.gguf import GGUFSource
from quire.models.checkpoints.safetensors import INDEX, FolderSource
from quire.models.hf_config import read_hf_config
from quire.models.source import ModelSource, build_model, shapes

CPU = torch.device("cpu")
SIZES = [1, 2, 4]
SHAPE: dict[str, Any] = {
    "vocab_size": 101,  # which neither two nor four ranks share evenly
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # so that of four ranks two hold the same
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def raw_config(name: str, **changes: Any) -> dict[str, Any]:
    architecture = f"{name.split()[0]}ForCausalLM"
    return {"architectures": [architecture], **SHAPE, **SHARDED[name], **changes}


def checkpoint(raw: dict[str, Any]) -> dict[str, Tensor]:
    """Random tensors under a checkpoint's names, norms and biases too."""
    torch.manual_seed(3)
    fused = FUSED.get(raw["architectures"][0], ())
    found: dict[str, tuple[int, ...]] = {}
    for weight in model_weights(raw):
        if weight.fused and any(f".{name}." in weight.fused.name for name in fused):
            found[weight.fused.name] = (weight.fused.rows, *weight.shape[1:])
        else:
            found[weight.name] = weight.shape
    return {name: torch.randn(shape) for name, shape in found.items()}


def model_weights(raw: dict[str, Any]) -> list[Weight]:
    return [weight for weight in shapes(read_hf_config(raw)).weights() if weight.same_as is None]


def write_folder(folder: Path, raw: dict[str, Any], files: int) -> FolderSource:
    tensors = list(checkpoint(raw).items())
    placed = {}
    for i in range(files):
        name = f"model-{i}.safetensors"
        save_file(dict(tensors[i::files]), folder / name)
        placed |= {tensor: name for tensor, _ in tensors[i::files]}
    if files > 1:
        (folder / INDEX).write_text(json.dumps({"weight_map": placed}))
    (folder / "config.json").write_text(json.dumps(raw))
    return FolderSource(folder)


def write_gguf(folder: Path, raw: dict[str, Any], type_: Type) -> GGUFSource:
    return GGUFSource(tiny_gguf.write_gguf(folder / "model.gguf", raw, checkpoint(raw), type_))


def held(source: ModelSource, tp: TensorParallel) -> Iterator[tuple[Weight, Tensor]]:
    """This rank's weights, each with the numbers in its place."""
    for weight in build_model(source, torch.float32, CPU, False, tp).weights():
        assert isinstance(weight.place, TensorPlace)
        yield weight, weight.place.tensor


def check_parts(source: ModelSource, size: int) -> None:
    """The parts of all ranks are those of the whole model, and cover it."""
    whole = {weight.name: place for weight, place in held(source, TensorParallel())}
    covered = {name: torch.zeros(tensor.shape) for name, tensor in whole.items()}
    for rank in range(size):
        for weight, place in held(source, TensorParallel(rank, size)):
            name = weight.name
            if place.dim() > len(weight.shape):  # norms of heads: a row for each
                assert torch.equal(place, whole[name][: len(place)]), name
                covered[name].fill_(1)
                continue
            assert torch.equal(place, whole[name][weight.part]), name
            covered[name][weight.part] = 1
    assert all(seen.all() for seen in covered.values())


# --- the right parts ----------------------------------------------------------------------------


@pytest.mark.diagonal
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("name", SHARDED)
def test_parts_of_a_folder(tmp_path: Path, name: str, files: int, size: int) -> None:
    source = write_folder(tmp_path, raw_config(name), files)
    assert len(source.files) == files
    check_parts(source, size)


@pytest.mark.diagonal
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SHARDED)
def test_parts_of_a_gguf_file(tmp_path: Path, name: str, size: int) -> None:
    check_parts(write_gguf(tmp_path, raw_config(name), Type.Q4_0), size)


@pytest.mark.parametrize("type_", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q5_1])
def test_parts_of_other_types(tmp_path: Path, type_: Type) -> None:
    check_parts(write_gguf(tmp_path, raw_config("Llama"), type_), 4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SHARDED)
def test_parts_of_random_weights(name: str, size: int) -> None:
    check_parts(DummySource(read_hf_config(raw_config(name))), size)


def test_random_weights_wider_than_the_numbers_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.models.checkpoints.dummy.Noise.COUNT", 37)
    check_parts(DummySource(read_hf_config(raw_config("Llama"))), 2)


@pytest.mark.parametrize("numbers", [1, 100, 1000])
def test_large_tensors_are_read_in_pieces(
    tmp_path: Path, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_folder(tmp_path, raw_config("Llama tied"), 1)
    whole = build_model(source, torch.float32, CPU, False)
    monkeypatch.setattr(weights, "PIECE", numbers)
    check_parts(source, 2)
    pieces = build_model(source, torch.float32, CPU, False)
    for a, b in zip(whole.parameters(), pieces.parameters(), strict=True):
        assert torch.equal(a, b)


def test_rows_within_a_head(tmp_path: Path) -> None:
    """Converters change the order of rows within a head, and a part may begin anywhere."""
    stored = dict(write_gguf(tmp_path, raw_config("Llama"), Type.Q8_0).tensors())
    for kind in ("q", "k"):
        tensor = stored[f"model.layers.0.self_attn.{kind}_proj.weight"]
        rows, columns = slice(5, 23), slice(7, 41)
        assert torch.equal(tensor[rows, columns], tensor[()][rows, columns])


# --- and no more --------------------------------------------------------------------------------


def bytes_over_ranks(source: Any, size: int) -> int:
    before = source.bytes_read
    for rank in range(size):
        build_model(source, torch.bfloat16, CPU, False, TensorParallel(rank, size))
    return int(source.bytes_read - before)


def replicas(weight: Weight, size: int) -> int:
    """How many ranks beyond the first hold the same of a tensor."""
    name = weight.name
    if "_norm." in name and weight.shape[0] > SHAPE["head_dim"]:  # over all heads, each its own
        return replicas(replace(weight, name=name.replace("norm", "proj")), size)
    if name.endswith(("norm.weight", "o_proj.bias", "down_proj.bias")):
        return size - 1
    if "k_proj" in name or "v_proj" in name:
        return max(1, size // SHAPE["num_key_value_heads"]) - 1
    return 0


@pytest.mark.diagonal
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SHARDED)
def test_ranks_together_read_each_byte_of_a_folder_once(
    tmp_path: Path, name: str, size: int
) -> None:
    """But for what every rank holds: norms, biases that are added once, and shared KV heads."""
    source = write_folder(tmp_path, raw_config(name), 3)
    stored = sum(4 * np.prod(tensor.shape) for _, tensor in source.tensors())
    weights = model_weights(raw_config(name))
    again = sum(4 * np.prod(weight.shape) * replicas(weight, size) for weight in weights)
    assert bytes_over_ranks(source, size) == stored + again


@pytest.mark.diagonal
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SHARDED)
def test_ranks_together_read_each_block_of_a_gguf_file_once(
    tmp_path: Path, name: str, size: int
) -> None:
    """Where columns end within a block of 32 numbers, both neighbours need it."""
    source = write_gguf(tmp_path, raw_config(name), Type.Q4_0)
    expected = 0
    for weight in model_weights(raw_config(name)):
        if len(weight.shape) == 1:
            expected += 4 * weight.shape[0] * (1 + replicas(weight, size))
            continue
        rows, columns = weight.shape
        blocks = columns // 32
        if "o_proj" in weight.name or "down_proj" in weight.name:
            share = columns // size
            blocks = sum(
                len({column // 32 for column in range(rank * share, (rank + 1) * share)})
                for rank in range(size)
            )
        expected += rows * blocks * 18 * (1 + replicas(weight, size))
    assert bytes_over_ranks(source, size) == expected


def test_blocks_that_ranks_share_evenly_are_read_once(tmp_path: Path) -> None:
    raw = raw_config("Qwen2", intermediate_size=256, head_dim=32, num_key_value_heads=4)
    source = write_gguf(tmp_path, raw, Type.Q8_0)
    again = sum(4 * 3 * t.shape[0] for n, t in source.tensors() if n.endswith("norm.weight"))
    assert bytes_over_ranks(source, 4) == bytes_over_ranks(source, 1) + again


# --- and what cannot be read --------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_file_that_becomes_shorter(tmp_path: Path, kind: str, rank: int) -> None:
    raw = raw_config("Qwen3")
    if kind == "folder":
        source: ModelSource = write_folder(tmp_path, raw, 1)
        path = tmp_path / "model-0.safetensors"
    else:
        source, path = write_gguf(tmp_path, raw, Type.Q8_0), tmp_path / "model.gguf"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 4)
    with pytest.raises(ModelError, match=r"became shorter while it was read: download it again\."):
        build_model(source, torch.float32, CPU, False, TensorParallel(rank, 4))
    path.unlink()
    with pytest.raises(ModelError, match="No such file"):
        build_model(source, torch.float32, CPU, False, TensorParallel(rank, 4))


def test_what_does_not_fit_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    source = write_folder(tmp_path, raw_config("Llama"), 1)
    source.config = read_hf_config(raw_config("Llama", vocab_size=102))
    with pytest.raises(ModelError, match=r"lm_head.weight is \[101, 64\], not \[102, 64\]"):
        build_model(source, torch.float32, CPU, False)
    assert source.bytes_read == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "F4"}, "as F4, which Quire does not read"),
        ({"dtype": "F16"}, r"describes model\.norm\.weight wrongly"),
        ({"shape": [1, 2]}, r"describes model\.norm\.weight wrongly"),
    ],
)
def test_a_header_that_contradicts_itself(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    file = write_folder(tmp_path, raw_config("Llama"), 1).files[0].path
    header, data = read_safetensors(file)
    header["model.norm.weight"] |= change
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    with pytest.raises(ModelError, match=reason):
        build_model(FolderSource(tmp_path), torch.float32, CPU, False)


def test_a_tied_head_is_compared_in_parts(tmp_path: Path) -> None:
    raw = raw_config("Llama tied")
    tensors = checkpoint(raw)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][100, 63] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    source = FolderSource(tmp_path)
    build_model(source, torch.float32, CPU, False, TensorParallel(0, 2))
    with pytest.raises(ModelError, match="differs from the tensor it is tied to"):
        build_model(source, torch.float32, CPU, False, TensorParallel(1, 2))
