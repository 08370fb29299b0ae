"""A Hugging Face folder written tensor by tensor, which is there whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.models.checkpoints.safetensors import INDEX
from quire.models.checkpoints.safetensors_entries import DTYPES

SHARD_BYTES = 2 << 30
NAME_OF = {dtype: name for name, dtype in DTYPES.items()}
PARTIAL = ".partial"
# What lies beside weights in a model's folder and is the same for any weights.
KEPT_ENDINGS = (".json", ".jinja", ".model", ".tiktoken", ".txt", ".md")
KEPT_NAMES = ("LICENSE", "NOTICE", "USE_POLICY")
MOST_KEPT_BYTES = 256 << 20


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name when all of it is there."""
    if out.exists():
        raise ConfigError(f"{out} exists: name a folder that does not.")
    partial = out.with_name(out.name + PARTIAL)
    try:
        partial.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(
            f"{partial} is left of a run that did not end, or of one that is running: remove it, "
            f"or name another folder."
        ) from None
    except OSError as error:
        raise ConfigError(f"{partial} cannot be made: {error.strerror or error}.") from None
    try:
        yield partial
        with writing(out):
            partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full disk, say, is one sentence."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.") from error


class TensorWriter:
    """Tensors in files of at most some gigabytes each."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._shard_bytes = folder, shard_bytes
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._shards: list[list[str]] = []
        self.bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._waiting and self._waiting_bytes + tensor.nbytes > self._shard_bytes:
            self._write()
        self._waiting[name] = tensor.cpu().contiguous()
        self._waiting_bytes += tensor.nbytes
        self.bytes += tensor.nbytes

    def _write(self) -> None:
        shard = self._shard(len(self._shards))
        with writing(shard):
            write_safetensors(shard, self._waiting)
        self._shards.append(list(self._waiting))
        self._waiting, self._waiting_bytes = {}, 0

    def _shard(self, index: int) -> Path:
        return self._folder / f"shard-{index}.safetensors"

    def end(self) -> None:
        """Write the rest, and the index if there is more than one file."""
        self._write()
        count = len(self._shards)
        if count == 1:
            self._shard(0).rename(self._folder / "model.safetensors")
            return
        places: dict[str, str] = {}
        for index, tensors in enumerate(self._shards):
            name = f"model-{index + 1:05}-of-{count:05}.safetensors"
            self._shard(index).rename(self._folder / name)
            places |= dict.fromkeys(tensors, name)
        index_of = {"metadata": {"total_size": self.bytes}, "weight_map": places}
        write_json(self._folder / INDEX, index_of)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """The header's length (8 bytes), the header (JSON), the tensors' bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entry = {"dtype": NAME_OF[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**entry, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # numbers lie at a multiple of their size
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            file.write(tensor.flatten().view(torch.uint8).numpy().data)


def copy_others(source: Path, folder: Path) -> None:
    """Tokenizer, chat template, licence and the like."""
    for path in sorted(source.iterdir()):
        is_kept = path.suffix in KEPT_ENDINGS or path.name.startswith(KEPT_NAMES)
        is_index = path.name.endswith(".index.json")
        if is_kept and not is_index and path.is_file() and path.stat().st_size <= MOST_KEPT_BYTES:
            with writing(folder / path.name):
                shutil.copyfile(path, folder / path.name)


def write_json(path: Path, content: dict[str, Any]) -> None:
    with writing(path):
        path.write_text(json.dumps(content, indent=2) + "\n")
