"""Folders that are there whole or not at all, and tensors that other readers find in them."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire.errors import ConfigError
from quire.models.checkpoints.safetensors import folder_tensors
from quire.quantize.writer import TensorWriter, copy_others, new_folder

TENSORS = {
    "a.weight_packed": torch.arange(-6, 6, dtype=torch.int32).reshape(3, 4),
    "a.weight_scale": torch.randn(3, 1).bfloat16(),
    "a.weight_shape": torch.tensor([3, 32]),
    "norm.weight": torch.randn(5),
    "b.weight": torch.randn(4, 6).t(),  # not contiguous
}


def write(folder: Path, shard_bytes: int) -> None:
    writer = TensorWriter(folder, shard_bytes)
    for name, tensor in TENSORS.items():
        writer.add(name, tensor)
    writer.end()
    assert writer.bytes == sum(tensor.nbytes for tensor in TENSORS.values())


@pytest.mark.parametrize(("shard_bytes", "files"), [(1 << 20, 1), (64, 3), (1, 5)])
def test_the_format_s_own_library_reads_what_is_written(
    tmp_path: Path, shard_bytes: int, files: int
) -> None:
    write(tmp_path, shard_bytes)
    found = {}
    paths = sorted(tmp_path.glob("*.safetensors"))
    assert len(paths) == files
    for path in paths:
        found |= load_file(path)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
    ours = {name: tensor[()] for name, tensor in folder_tensors(tmp_path)}  # through the index
    assert all(torch.equal(ours[name], TENSORS[name]) for name in TENSORS)


def test_a_folder_has_its_name_when_all_of_it_is_there(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "model"
    with new_folder(out) as partial:
        (partial / "config.json").write_text("{}")
        assert not out.exists()
    assert (out / "config.json").exists() and [out] == list(out.parent.iterdir())
    with pytest.raises(ConfigError, match="exists: name a folder that does not"), new_folder(out):
        pass


def test_nothing_is_left_of_a_run_that_ends_early(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "model") as partial:
        (partial / "half").write_text("")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_nor_of_one_whose_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, tensors: object) -> None:
        path.write_text("the first bytes")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("quire.quantize.writer.write_safetensors", full)
    says = r"safetensors cannot be written: No space left on device\.$"
    with pytest.raises(ConfigError, match=says), new_folder(tmp_path / "model") as partial:
        write(partial, 1 << 20)
    assert not list(tmp_path.iterdir())


def test_one_run_at_a_time_writes_a_folder(tmp_path: Path) -> None:
    out = tmp_path / "model"
    running = pytest.raises(ConfigError, match="of one that is running")
    with new_folder(out), running, new_folder(out):
        pass
    assert not (tmp_path / "model.partial").exists()


def test_what_lies_beside_weights_is_copied(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "folder"
    source.mkdir()
    folder.mkdir()
    kept = ["tokenizer.json", "chat_template.jinja", "LICENSE", "tokenizer.model"]
    for name in [*kept, "model.safetensors", "model.safetensors.index.json", "run.py", "a.bin"]:
        (source / name).write_text(json.dumps(name))
    (source / "folder.json").mkdir()
    copy_others(source, folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(kept)
