"""From a folder in 16 or 32 bits to one in four, which other engines read, too.

    texts ─ the model, whose matrices note their inputs ─┐
    checkpoint ─ its matrices ───────────────────────────┴─ rounding ─ codes and scales
               ─ all else ──────────────────────────────────────── as it is

The notes of all matrices of a large model are more than memory has: it runs over the texts again
for each few of its matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.layers.formats import AllDense
from quire.layers.quantized.grouped import HALVES, MADE_GROUP
from quire.models.checkpoints.json_file import read_json
from quire.models.checkpoints.lazy_tensor import LazyTensor
from quire.models.checkpoints.safetensors import folder_tensors
from quire.models.quantization.names import is_embedding
from quire.models.source import find, open_model
from quire.quantize.calibrate import WatchedLLM
from quire.quantize.compressed import config_of, tensors_of
from quire.quantize.rounding import round_to_groups
from quire.quantize.settings import CalibrationConfig
from quire.quantize.texts import texts_for
from quire.quantize.watched import WatchedMatrix
from quire.quantize.writer import TensorWriter, copy_others, new_folder, write_json

ENDING = ".weight"
FEWEST_IN_GROUP = 32  # with fewer, scales would take more than an eighth of the codes' bits


@dataclass(frozen=True)
class Summary:
    matrices: int
    unseen: int  # of them, to which no token came: their numbers are rounded one by one
    bytes_before: int
    bytes: int


def quantize(model: str, out: Path, config: CalibrationConfig, progress: bool = True) -> Summary:
    folder = folder_of(model, progress)
    with new_folder(out) as partial:
        with WatchedLLM(folder, config, progress) as llm:
            rounding = Rounding(llm, folder, TensorWriter(partial), progress)
            summary = rounding.run(texts_for(llm, config))
        copy_others(folder, partial)
        described = {**read_json(folder / "config.json"), "quantization_config": rounding.config()}
        write_json(partial / "config.json", described)
    return summary


def folder_of(model: str, progress: bool) -> Path:
    path = find(model, weights=True, progress=progress)
    if not path.is_dir():
        raise ModelError(
            f"{model} is a GGUF file, and quire quantize reads Hugging Face folders: name one with "
            f"the model's weights in 16 or 32 bits."
        )
    if open_model(str(path), progress=progress).config.formats != AllDense():
        raise ModelError(
            f"{model} is quantised already: name the model's weights in 16 or 32 bits."
        )
    return path


class Rounding:
    """The tensors of a folder, written in four bits or as they are."""

    def __init__(self, llm: WatchedLLM, folder: Path, writer: TensorWriter, progress: bool) -> None:
        self._llm, self._writer, self._progress = llm, writer, progress
        self._names: dict[str, str] = {}  # that the folder has, by what the model calls them
        self._tensors: dict[str, LazyTensor] = {}
        for name, tensor in folder_tensors(folder):
            self._tensors[name] = tensor
            self._names[llm.model.text_tensor(name) or name] = name
        self._groups: dict[str, int] = {}
        self._unseen = 0

    def run(self, texts: Sequence[list[int]]) -> Summary:
        from tqdm import tqdm

        before = sum(math.prod(t.shape) * t.dtype.itemsize for t in self._tensors.values())
        with tqdm(desc="rounding", unit=" matrices", disable=not self._progress) as bar:
            for turn in self._llm.turns():
                self._llm.watch(turn, texts)
                for matrix in turn:
                    bar.update(self._round(matrix))
                    matrix.notes.hessians.clear()
        if not self._groups:
            raise ModelError(
                "The model has no matrices that are stored one by one, so none can be rounded."
            )
        for name, tensor in self._tensors.items():
            if name.removesuffix(ENDING) not in self._groups:
                self._writer.add(name, tensor[()])
        self._writer.end()
        return Summary(len(self._groups), self._unseen, before, self._writer.bytes)

    def _round(self, matrix: WatchedMatrix) -> int:
        """Write what the checkpoint has of a matrix; how many tensors of it."""
        layers = [
            (layer, self._names[layer + ENDING])
            for layer in matrix.notes.rows_of
            if layer + ENDING in self._names
        ]
        group = math.gcd(MADE_GROUP, matrix.in_features)
        if group < FEWEST_IN_GROUP:
            return 0
        for layer, name in layers:
            stored = self._tensors[name]
            scale_dtype = stored.dtype if stored.dtype in HALVES else torch.bfloat16
            hessian = matrix.notes.hessian(layer)
            self._unseen += hessian is None
            weights = stored[()].to(self._llm.device, torch.float32)
            codes, scales = round_to_groups(weights, hessian, group, scale_dtype)
            self._write(name.removesuffix(ENDING), codes, scales, group)
        return len(layers)

    def _write(self, layer: str, codes: Tensor, scales: Tensor, group: int) -> None:
        for name, tensor in tensors_of(layer, codes, scales).items():
            self._writer.add(name, tensor)
        self._groups[layer] = group

    def config(self) -> dict[str, object]:
        """`quantization_config` of what was written."""
        layers = {name.removesuffix(ENDING): t for name, t in self._tensors.items()}
        dense = [
            layer
            for layer, tensor in layers.items()
            if len(tensor.shape) == 2 and layer not in self._groups and not is_embedding([layer])
        ]
        return config_of(self._groups, dense)
