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
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quire.errors import ConfigError, ModelError
from quire.layers.formats import AllDense
from quire.models.checkpoints.folder import read_tokenizer
from quire.models.checkpoints.json_file import read_json
from quire.models.checkpoints.lazy_tensor import LazyTensor
from quire.models.checkpoints.safetensors import folder_tensors
from quire.models.config import ModelConfig
from quire.models.quantization.names import is_embedding
from quire.models.source import find, open_model, shapes
from quire.progress import draws_bars, human_bytes, say_step
from quire.quantize.calibrate import WatchedLLM
from quire.quantize.compressed import config_of, tensors_of
from quire.quantize.plan import ENDING, Plan
from quire.quantize.rounding import round_to_groups, tells_something
from quire.quantize.settings import CalibrationConfig
from quire.quantize.texts import texts_for
from quire.quantize.watched import WatchedFormats, WatchedMatrix
from quire.quantize.writer import TensorWriter, copy_others, new_folder, write_json

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
        if config.text is not None and read_tokenizer(folder) is None:
            raise ConfigError(
                f"{model} has no tokenizer to read the text with: leave the text out."
            )
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
    source = open_model(str(path), progress=progress)
    if source.config.formats != AllDense():
        raise ModelError(
            f"{model} is quantised already: name the model's weights in 16 or 32 bits."
        )
    check_plan(path, source.config)
    return path


def check_plan(folder: Path, config: ModelConfig) -> None:
    """Refuse a model of which nothing can be had in four bits before its weights are read."""
    model = shapes(replace(config, formats=WatchedFormats()))
    for _ in model.weights():  # which tell matrices the names of their layers
        pass
    Plan(model, (name for name, _ in folder_tensors(folder)))


class Rounding:
    """The tensors of a folder, written in four bits or as they are."""

    def __init__(self, llm: WatchedLLM, folder: Path, writer: TensorWriter, progress: bool) -> None:
        self._llm, self._writer, self._progress = llm, writer, progress
        self._tensors: dict[str, LazyTensor] = dict(folder_tensors(folder))
        self._plan = Plan(llm.model, self._tensors)
        self._groups: dict[str, int] = {}
        self._unseen = 0

    def run(self, texts: Sequence[list[int]]) -> Summary:
        from tqdm import tqdm

        count = sum(len(self._plan.layers(matrix)) for matrix in self._plan.matrices)
        hidden = not (self._progress and draws_bars())
        with tqdm(total=count, desc="rounding", unit=" matrices", disable=hidden) as bar:
            for turn in self._llm.turns():
                self._llm.watch(turn, texts)
                for matrix in turn:
                    for layer, name in self._plan.layers(matrix).items():
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

    def _round(self, matrix: WatchedMatrix, layer: str, name: str) -> None:
        hessian, group = matrix.notes.hessian(layer), self._plan.group(matrix)
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
        others = {name.removesuffix(ENDING) for name in self._plan.others}
        return config_of(self._groups, self._left(), others)


def num_bytes(tensor: LazyTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize
