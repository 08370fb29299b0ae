"""Hugging Face folders whose weights are safetensors, in one file or several.

A file is read piece by piece, and of each tensor the part that is asked for, so that loading needs
little memory beyond the model's own. Its layout: the header's length (8 bytes), the header (JSON),
the tensors' bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quire.checks import shorten
from quire.errors import ModelError
from quire.layers.quantized.gguf import GGUFFormats, keeps_halves
from quire.models.checkpoints.digest import Fingerprint
from quire.models.checkpoints.folder import MODELOPT_FILE, read_config, read_tokenizer
from quire.models.checkpoints.git_lfs import refuse_pointer
from quire.models.checkpoints.json_file import read_json
from quire.models.checkpoints.lazy_tensor import FileTensor, LazyTensor, TensorFile, as_stored
from quire.models.checkpoints.safetensors_entries import (
    DTYPES,
    MOST_HEADER_BYTES,
    Entry,
    read_entries,
)
from quire.models.quantization.checkpoint import CheckpointFormats

if TYPE_CHECKING:
    from quire.models.text.tokenizer import Tokenizer

INDEX = "model.safetensors.index.json"
HALF_TYPES = {torch.float16: "F16", torch.bfloat16: "BF16"}  # as GGUF calls them
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class FolderSource:
    """A model in a folder: config.json, safetensors, and a tokenizer if there is one.

    `keeps_types`: matrices are as a CPU's kernels multiply them, where there are some.
    """

    def __init__(self, path: str | os.PathLike[str], keeps_types: bool = False) -> None:
        self.folder = Path(path)
        self.config = read_config(self.folder)
        paths = weight_files(self.folder)
        # Which tensors lie where is in the files' own headers; the index adds nothing.
        configs = [self.folder / "config.json", self.folder / MODELOPT_FILE]
        read = [configs[0], *(path for path in configs[1:] if path.exists()), *paths]
        self.fingerprint = Fingerprint("safetensors", read)
        self.files = [TensorFile(path) for path in paths]
        self.headers = [read_header(file.path) for file in self.files]
        if isinstance(formats := self.config.formats, CheckpointFormats):
            stored = formats.fitted_to(dict(self._stored()))
            stored = stored.as_a_cpu_multiplies() if keeps_types else stored
            self.config = replace(self.config, formats=stored)
        elif keeps_types and (halves := self._halves()):
            self.config = replace(self.config, formats=GGUFFormats.from_types(halves))

    def tokenizer(self) -> Tokenizer | None:
        return read_tokenizer(self.folder)

    def _halves(self) -> dict[str, str]:
        """Layers with matrices of 16 bits that stay so, and their types."""
        found = {}
        for name, tensor in self._stored():
            layer = name.removesuffix(".weight")
            if layer != name and tensor.dtype in HALF_TYPES and keeps_halves(layer, tensor.shape):
                found[layer] = HALF_TYPES[tensor.dtype]
        return found

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that were read since this source was opened."""
        return sum(file.bytes_read for file in self.files)

    def tensors(self) -> Iterator[tuple[str, LazyTensor]]:
        if isinstance(formats := self.config.formats, CheckpointFormats):
            return formats.canonical(dict(self._stored()))
        return self._stored()

    def _stored(self) -> Iterator[tuple[str, FileTensor]]:
        return stored_tensors(self.files, self.headers)


@dataclass(frozen=True)
class Header:
    """What a file says it holds."""

    data: int  # where the first tensor begins
    tensors: dict[str, Entry]

    def extents(self) -> list[tuple[int, int]]:
        """Where each tensor's bytes begin and end, counted from the first tensor."""
        return [
            (int(t["data_offsets"][0]), int(t["data_offsets"][1])) for t in self.tensors.values()
        ]

    def tensor(self, file: TensorFile, name: str) -> FileTensor:
        entry = self.tensors[name]
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ModelError(
                f"{file.path} stores {shorten(name)} as {shorten(entry['dtype'])}, which Quire "
                f"does not read: "
                f"choose a model in float32, bfloat16 or float16."
            )
        shape, (start, _) = tuple(entry["shape"]), entry["data_offsets"]
        return FileTensor(
            file, self.data + start, shape, dtype, 1, dtype.itemsize, as_stored(dtype), name
        )


def stored_tensors(
    files: list[TensorFile], headers: list[Header]
) -> Iterator[tuple[str, FileTensor]]:
    for file, header in zip(files, headers, strict=True):
        for name in header.tensors:
            yield name, header.tensor(file, name)


def folder_tensors(folder: Path) -> Iterator[tuple[str, FileTensor]]:
    """All tensors of a folder, as they are stored."""
    files = [TensorFile(path) for path in weight_files(folder)]
    return stored_tensors(files, [read_header(file.path) for file in files])


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights; all of them exist."""
    if (folder / INDEX).exists():
        placed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise ModelError(f"{folder / INDEX} names no files: download it again.")
        if not all(isinstance(name, str) and is_beside(name) for name in placed.values()):
            raise ModelError(
                f"{folder / INDEX} names something else than files beside it: download it again."
            )
        names = sorted(set(placed.values()))
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ModelError(
                f"{folder} lacks {shorten(missing[0])}, one of {len(missing)} missing weight "
                f"files that its index names: download the model again."
            )
        return [folder / name for name in names]
    if (single := folder / "model.safetensors").is_file():
        return [single]
    # Mistral's folders hold everything twice, once in its own format.
    found = sorted(p for p in folder.glob("*.safetensors") if "consolidated" not in p.name)
    files = [path for path in found if path.is_file()]
    if not files:
        refuse_without_weights(folder)
    return files


def is_beside(name: str) -> bool:
    """Whether an index may name it: a file of the folder itself, nowhere else on this machine."""
    is_plain = name not in ("", "..") and Path(name).name == name
    return is_plain and len(name.encode(errors="replace")) < 256


def refuse_without_weights(folder: Path) -> None:
    if any(path for pattern in PICKLES for path in folder.glob(pattern)):
        raise ModelError(
            f"{folder} has only pickled weights, which can run code when they are opened: convert "
            f"them with transformers' AutoModelForCausalLM.from_pretrained(folder)"
            f".save_pretrained(folder, safe_serialization=True)."
        )
    raise ModelError(
        f"{folder} has no safetensors weights: download them, or use load_format=dummy to try "
        f"its shape with random ones."
    )


def read_header(path: Path) -> Header:
    """What the file says it holds, once its size shows that it holds all of it."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            refuse_pointer(path, file.peek())
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, MOST_HEADER_BYTES):
                raise ValueError(f"its header would have {length:,} bytes")
            return Header(8 + length, read_entries(file.read(length), size - 8 - length))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        why = "its header is not JSON"
    except ValueError as error:
        why = str(error)
    raise ModelError(f"{path} is not a whole safetensors file ({why}): download it again.")
