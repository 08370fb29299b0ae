"""What every quantised checkpoint says of its matrices, and hands over of its tensors.

Methods differ in names and packing. Each has a `CheckpointFormats` that shows the tensors of a
layer, lazily, under the names that Quire's matrices ask for:

    NAME.weight        the codes [outputs, inputs], of four bits two a byte
    NAME.weight_scale  [outputs, 1], [outputs, groups], or one for each block
    NAME.weight_zero   the code of zero [outputs, groups]
    NAME.g_idx         the group of each input
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

import torch

from quire.errors import ModelError
from quire.layers.formats import Dense, MatrixFormat
from quire.models.checkpoints.lazy_tensor import LazyTensor
from quire.models.quantization.names import is_embedding, is_head, is_named, spellings
from quire.models.quantization.numbers import as_numbers
from quire.models.quantization.views import check_unneeded

F = TypeVar("F", bound="CheckpointFormats")

# Scales of activations and of KV, which Quire works out itself: by token, and by token and head.
UNNEEDED = re.compile(
    r"\.(input_scale|input_global_scale|input_zero_point|output_scale|act_scale|activation_scale"
    r"|(q|k|v|kv|prob|prob_output)_scale|(q|k|v)_zero_point|input_scale_ub|activation_scale_ub)$"
)
EXPERT = re.compile(r"\.experts\.\d+\.")
SCALE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class CheckpointFormats(ABC):
    """The formats of one method's checkpoints. `ignored` names the layers that it left dense."""

    codes: ClassVar[str] = "weight"  # what a quantised layer's codes are called
    scales: ClassVar[str] = "weight_scale"

    ignored: tuple[str, ...] = ()
    head: bool = False  # whether the head is quantised, too
    scale_dtype: torch.dtype = torch.float32  # of scales by group
    # Layers whose tensors show otherwise than the config. What follows from the model's files need
    # not be in the names of its KV.
    dense: frozenset[str] = field(default=frozenset(), repr=False)
    coded: frozenset[str] = field(default=frozenset(), repr=False)

    def of(self, *names: str) -> MatrixFormat:
        if self.dense or self.coded:
            full = spellings(names)
            if not self.coded.isdisjoint(full):
                return self.format_of(*names)
            if not self.dense.isdisjoint(full):
                return Dense()
        is_dense = is_embedding(names) or (is_head(names) and not self.head)
        if is_dense or is_named(names, self.ignored):
            return Dense()
        return self.format_of(*names)

    @abstractmethod
    def format_of(self, *names: str) -> MatrixFormat:
        """That of a layer which is quantised."""

    @abstractmethod
    def layer(self, name: str, tensors: Mapping[str, LazyTensor]) -> Mapping[str, LazyTensor]:
        """The tensors of one layer by their endings, as Quire's matrices ask for them."""

    def fitted_to(self: F, tensors: Mapping[str, LazyTensor]) -> F:
        """The same, with what the tensors say and the config may not: the type of scales, which
        they have in memory too, and here and there whether groups are in order. Which layers are
        quantised they say, too: libraries differ in how they take the config's names."""
        found = {t.dtype for name, t in tensors.items() if name.endswith(f".{self.scales}")}
        only = found.pop() if len(found) == 1 else torch.float32
        kept = only if only in SCALE_DTYPES.values() else torch.float32
        other = {True: set[str](), False: set[str]()}
        said: dict[str, bool] = {}  # experts have what the first of them has
        for name, of_layer in by_layer(tensors).items():
            is_coded = self.is_quantised(of_layer)
            if is_embedding([name]) or not (is_coded or is_plain_matrix(of_layer)):
                continue
            alike = EXPERT.sub(".experts.0.", name)
            if alike not in said:
                said[alike] = not isinstance(self.of(alike), Dense)
            if said[alike] != is_coded:
                other[is_coded].add(name)
        return replace(
            self, scale_dtype=kept, dense=frozenset(other[False]), coded=frozenset(other[True])
        )

    def as_a_cpu_multiplies(self: F) -> F:
        """The same, in the order of a CPU's kernels where there are some."""
        return self

    def canonical(self, tensors: Mapping[str, LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
        """All tensors of the checkpoint under the names above; what is not needed is checked."""
        needed: dict[str, LazyTensor] = {}
        for name, tensor in tensors.items():
            if UNNEEDED.search(name):
                check_unneeded(tensor, name)
            else:
                needed[name] = tensor
        for name, of_layer in by_layer(needed).items():
            if self.is_quantised(of_layer):
                of_layer = dict(as_numbers(name, self.of(name), self.layer(name, of_layer)))
            yield from ((f"{name}.{end}" if name else end, t) for end, t in of_layer.items())

    def is_quantised(self, of_layer: Mapping[str, LazyTensor]) -> bool:
        return self.codes in of_layer


def by_layer(tensors: Mapping[str, LazyTensor]) -> dict[str, dict[str, LazyTensor]]:
    """Each layer's tensors by their endings."""
    layers: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        layer, _, ending = name.rpartition(".")
        layers.setdefault(layer, {})[ending] = tensor
    return layers


def is_plain_matrix(of_layer: Mapping[str, LazyTensor]) -> bool:
    weight = of_layer.get("weight")
    has_scales = any("scale" in ending for ending in of_layer)
    return weight is not None and len(weight.shape) == 2 and not has_scales


def check_words(name: str, stored: LazyTensor) -> int:
    """As `matrix_rows`, of codes that are packed in words."""
    if stored.dtype != torch.int32:
        kind = str(stored.dtype).removeprefix("torch.")
        raise ModelError(f"{name} is {kind}, not int32: download the model again.")
    return matrix_rows(name, stored)


def matrix_rows(name: str, stored: LazyTensor) -> int:
    """How many rows a matrix has; it has to be one."""
    if len(stored.shape) != 2:
        raise ModelError(f"{name} is {list(stored.shape[:4])}, not a matrix: download it again.")
    return stored.shape[0]
