"""Hugging Face folders whose weights are safetensors, in one file or several.

A file is read tensor by tensor through a mapping, so that loading needs little memory beyond the
model's own. Its layout: the header's length (8 bytes), the header (JSON), the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from quire.errors import ModelError
from quire.models.folder import read_config, read_tokenizer
from quire.models.json_file import read_json

if TYPE_CHECKING:
    from quire.models.tokenizer import Tokenizer

INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
SAMPLE = 4096  # bytes of each tensor that go into the fingerprint


class FolderSource:
    """A model in a folder: config.json, safetensors, and a tokenizer if there is one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = Path(path)
        self.config = read_config(self.folder)
        self.files = weight_files(self.folder)
        self.headers = {file: read_header(file) for file in self.files}

    def tokenizer(self) -> Tokenizer | None:
        return read_tokenizer(self.folder)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        from safetensors import SafetensorError, safe_open

        for path in self.files:
            try:
                with safe_open(path, framework="pt", device="cpu") as file:
                    for name in file.keys():  # noqa: SIM118 (it is no dict)
                        yield name, file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} cannot be read ({error}): download it again.") from None

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the config, of each file's header, and of a sample of each tensor."""
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        for path, header in self.headers.items():
            digest.update(f"{path.name}\0{json.dumps(header, sort_keys=True)}\0".encode())
            with path.open("rb") as file:
                data = 8 + int.from_bytes(file.read(8), "little")
                for start, end in extents(header):
                    file.seek(data + (start + max(end - SAMPLE, start)) // 2)
                    digest.update(file.read(min(SAMPLE, end - start)))
        return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights; all of them exist."""
    if (folder / INDEX).exists():
        placed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise ModelError(f"{folder / INDEX} names no files: download it again.")
        names = sorted({str(name) for name in placed.values()})
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ModelError(
                f"{folder} lacks {missing[0]}, one of {len(missing)} missing weight files that "
                f"its index names: download the model again."
            )
        return [folder / name for name in names]
    if (single := folder / "model.safetensors").is_file():
        return [single]
    # Mistral's folders hold everything twice, once in its own format.
    found = sorted(p for p in folder.glob("*.safetensors") if "consolidated" not in p.name)
    if not found:
        refuse_without_weights(folder)
    return found


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


def read_header(path: Path) -> dict[str, Any]:
    """What the file says it holds, once its size shows that it holds all of it."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > size:
                raise EOFError
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        if size != 8 + length + max(end for _, end in extents(header)):
            raise EOFError
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise ModelError(f"{path} is not a whole safetensors file: download it again.") from None
    return header


def extents(header: dict[str, Any]) -> list[tuple[int, int]]:
    """Where each tensor's bytes begin and end, counted from the first tensor."""
    return [(int(t["data_offsets"][0]), int(t["data_offsets"][1])) for t in header.values()]
