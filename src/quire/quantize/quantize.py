"""From a folder in 16 or 32 bits to one in four, which other engines read, too.

    texts ─ the model, whose matrices add up their Hessians ─┐
    checkpoint ─ its matrices ───────────────────────────────┴─ rounding ─ codes and scales
               ─ all else ──────────────────────────────────────────────── as it is

The Hessians of all matrices of a large model are more than memory has: the model runs over the
texts once for each group of matrices whose Hessians fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.errors import ConfigError, ModelError
from quire.layers.formats import AllDense
from quire.layers.quantized.grouped import MADE_GROUP
from quire.models.checkpoints.json_file import read_json
from quire.models.checkpoints.lazy_tensor import LazyTensor
from quire.models.checkpoints.safetensors import folder_tensors
from quire.models.quantization.names import is_embedding
from quire.models.source import find, open_model
from quire.progress import draws_bars, human_bytes, say_step
from quire.quantize.calibrate import WatchedLLM
from quire.quantize.compressed import config_of, tensors_of
from quire.quantize.rounding import round_to_groups, tells_something
from quire.quantize.settings import CalibrationConfig
from quire.quantize.texts import texts_for
from quire.quantize.watched import WatchedMatrix
from quire.quantize.writer import TensorWriter, copy_others, new_folder, write_json

ENDING = ".weight"
FEWEST_IN_GROUP = 32  # with fewer, scales would take more than an eighth of the codes' bits
SCALE_DTYPE = torch.bfloat16  # the scales of small numbers are too small for float16


@dataclass(frozen=True)
class Summary:
    matrices: int
    unseen: int  # of them, to which no token came: each number has the nearest code
    bytes_before: int
    bytes: int
    left: tuple[str, ...]  # layers with matrices that stay as they were, by the checkpoint's names
    left_bytes: int

    def __str__(self) -> str:
        sizes = f"{human_bytes(self.bytes)} instead of {human_bytes(self.bytes_before)}"
        told = [f"{self.matrices:,} matrices in 4 bits, {sizes}"]
        if self.unseen:
            told.append(f"{self.unseen:,} of them got no token and are rounded to nearest")
        if self.left:
            told.append(
                f"{len(self.left):,} layers ({human_bytes(self.left_bytes)}) stay as they were, "
                f"{self.left[0]} for one"
            )
        return "; ".join(told)


def quantize(model: str, out: Path, config: CalibrationConfig, progress: bool = True) -> Summary:
    if config.text is not None and not Path(config.text).is_file():
        raise ConfigError(f"{config.text} cannot be read: it is not a file.")
    with new_folder(out) as partial:
        folder = folder_of(model, progress)
        with WatchedLLM(folder, config, progress) as llm:
            rounding = Rounding(llm, folder, TensorWriter(partial), progress)
            if progress:
                say_step("reading the text" if config.text else "letting the model write texts")
            texts = texts_for(llm, config)
            if progress:
                say_step(f"running the model over {sum(map(len, texts)):,} tokens")
            summary = rounding.run(texts)
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
        self._tensors: dict[str, LazyTensor] = dict(folder_tensors(folder))
        self._others: set[str] = set()  # tensors that are not of the language model
        self._names: dict[str, str] = {}  # that the folder has, by what the model calls them
        for name in self._tensors:
            known = llm.model.text_tensor(name)
            if known is None:
                self._others.add(name)
            else:
                self._names[known] = name
        # transformers has one size of groups for all matrices of a mixture of experts.
        matrices = llm.matrices()
        is_mixture = any(matrix.is_of_experts for matrix in matrices)
        sizes = {matrix.in_features for matrix in matrices} if is_mixture else set()
        self._largest_group = math.gcd(MADE_GROUP, *sizes)
        if self._largest_group < FEWEST_IN_GROUP:
            narrow = next(size for size in sorted(sizes) if size % FEWEST_IN_GROUP)
            raise ModelError(
                f"All matrices of a mixture of experts have groups of one size, and rows of "
                f"{narrow} numbers have none of {FEWEST_IN_GROUP} or more: serve it with "
                f"quantization=int4 instead, which has groups of any size."
            )
        self._groups: dict[str, int] = {}
        self._unseen = 0
        if not any(self._layers(matrix) for matrix in matrices):
            raise ModelError(
                f"No matrix of the model can be had in four bits: their rows are no multiple of "
                f"{FEWEST_IN_GROUP}, or all experts of a layer lie in one tensor."
            )

    def run(self, texts: Sequence[list[int]]) -> Summary:
        from tqdm import tqdm

        count = sum(len(self._layers(matrix)) for matrix in self._llm.matrices())
        hidden = not (self._progress and draws_bars())
        with tqdm(total=count, desc="rounding", unit=" matrices", disable=hidden) as bar:
            for turn in self._llm.turns():
                self._llm.watch(turn, texts)
                for matrix in turn:
                    for layer, name in self._layers(matrix).items():
                        self._round(matrix, layer, name)
                        bar.update()
                    matrix.notes.hessians.clear()
        for name, tensor in self._tensors.items():
            if name.removesuffix(ENDING) not in self._groups:
                self._writer.add(name, tensor[()])
        self._writer.end()
        left = self._left()
        return Summary(
            len(self._groups),
            self._unseen,
            sum(map(num_bytes, self._tensors.values())),
            self._writer.bytes,
            tuple(left),
            sum(map(num_bytes, left.values())),
        )

    def _layers(self, matrix: WatchedMatrix) -> dict[str, str]:
        """What the checkpoint has of a matrix that can be rounded: its tensors, by layers."""
        if self._group(matrix) < FEWEST_IN_GROUP:
            return {}
        names = ((layer, self._names.get(layer + ENDING)) for layer in matrix.notes.rows_of)
        return {layer: name for layer, name in names if name is not None}

    def _group(self, matrix: WatchedMatrix) -> int:
        """How many inputs share a scale."""
        return math.gcd(self._largest_group, matrix.in_features)

    def _round(self, matrix: WatchedMatrix, layer: str, name: str) -> None:
        hessian, group = matrix.notes.hessian(layer), self._group(matrix)
        self._unseen += not tells_something(hessian)
        weights = self._tensors[name][()].to(self._llm.device, torch.float32)
        if not bool(weights.isfinite().all()):
            raise ModelError(f"{name} has numbers that are not finite: download the model again.")
        codes, scales = round_to_groups(weights, hessian, group, SCALE_DTYPE)
        stored = name.removesuffix(ENDING)
        for each, tensor in tensors_of(stored, codes, scales).items():
            self._writer.add(each, tensor)
        self._groups[stored] = group

    def _left(self) -> dict[str, LazyTensor]:
        """The layers that keep their matrices: all that were not rounded, but for the embedding and
        the head, which never are."""
        layers = {name.removesuffix(ENDING): t for name, t in self._tensors.items()}
        return {
            layer: tensor
            for layer, tensor in layers.items()
            if len(tensor.shape) > 1
            and layer not in self._groups
            and not layer.endswith(("_bias", ".bias"))
            and not is_embedding([layer])
            and layer != "lm_head"
        }

    def config(self) -> dict[str, object]:
        """`quantization_config` of what was written."""
        others = {name.removesuffix(ENDING) for name in self._others}
        return config_of(self._groups, self._left(), others)


def num_bytes(tensor: LazyTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize
