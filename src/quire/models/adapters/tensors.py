"""The tensors of an adapter's file: which module each belongs to, and what it is of it.

base_model.model.<module>.lora_A.weight               [rank, inputs]
base_model.model.<module>.lora_B.weight               [outputs, rank], and .bias [outputs]
base_model.model.<experts>.base_layer.lora_A.weight   of the parameter before the last one
base_model.model.<embedding>.lora_embedding_A         [rank, tokens], and _B [hidden, rank]
base_model.model.<module>.weight                      all of it (`modules_to_save`)
base_model.model.<module>.base_layer.weight           a copy of the base model's own
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quire.checks import shorten
from quire.errors import ModelError
from quire.layers.weights import FLOATS
from quire.models.checkpoints.lazy_tensor import LazyTensor, TensorFile
from quire.models.checkpoints.safetensors import read_header

TENSORS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
MOST_NAME_CHARS = 512
KEY = re.compile(
    r"base_model\.model\.(?P<module>.+?)(?P<wrappers>(?:\.base_layer)*)\."
    r"(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B|weight)"
)
OF_EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
OF_LINEAR = ("lora_A.weight", "lora_B.weight")
BIAS = "lora_B.bias"
WHOLE = "weight"


class Named(NamedTuple):
    """A tensor and its name in the file."""

    name: str
    tensor: LazyTensor

    def check(self, *shape: int) -> None:
        if tuple(self.tensor.shape) != shape:
            raise ModelError(
                f"The adapter does not fit the model: {shorten(self.name)} is "
                f"{list(self.tensor.shape[:4])}, not {list(shape)}."
            )

    def read(self) -> Tensor:
        """All of it; `check` comes before."""
        return self.tensor[()]


@dataclass(frozen=True)
class ModuleTensors:
    """What the file has of one module, or of one of the parameters of a module."""

    module: str
    wrappers: int  # `base_layer`s in their names
    parts: dict[str, Named] = field(default_factory=dict)

    @property
    def first(self) -> str:
        """The name of one of them."""
        return next(iter(self.parts.values())).name

    def __getitem__(self, part: str) -> Named:
        if part not in self.parts:
            raise ModelError(f"The adapter has {shorten(self.first)}, and no {part} beside it.")
        return self.parts[part]


def open_tensors(folder: Path) -> list[ModuleTensors]:
    """All tensors of the file, by module; none is read."""
    path = folder / TENSORS
    if not path.is_file():
        why = f": convert {PICKLE}, which can run code, to it" if (folder / PICKLE).exists() else ""
        raise ModelError(f"{folder} has no {TENSORS}, so it is not a whole adapter{why}.")
    header, file = read_header(path), TensorFile(path)
    found: dict[tuple[str, int], ModuleTensors] = {}
    for name in sorted(header.tensors):
        tensor = header.tensor(file, name)
        parsed = KEY.fullmatch(name) if len(name) <= MOST_NAME_CHARS else None
        if parsed is None:
            raise ModelError(f"{path} has {shorten(name)}, which is no tensor of a LoRA.")
        if tensor.dtype not in FLOATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"{path} has {shorten(name)} in {kind}: save it in float32.")
        key = (parsed["module"], parsed["wrappers"].count("."))
        found.setdefault(key, ModuleTensors(*key)).parts[parsed["part"]] = Named(name, tensor)
    return list(found.values())


def as_bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
