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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

import torch

from quire.errors import ModelError
from quire.layers.formats import Dense, MatrixFormat
from quire.layers.weights import FLOATS
from quire.models.checkpoints.lazy_tensor import LazyTensor
from quire.models.quantization.names import is_embedding, is_named, spellings, stays_dense
from quire.models.quantization.numbers import as_numbers, is_gate
from quire.models.quantization.views import check_unneeded

F = TypeVar("F", bound="CheckpointFormats")

# Scales of activations and of KV, which Quire works out itself: by token, and by token and head.
UNNEEDED = re.compile(
    r"(\.|_proj_)(input_scale|input_global_scale|input_zero_point|output_scale|act_scale"
    r"|activation_scale|(q|k|v|kv|prob|prob_output)_scale|(q|k|v)_zero_point|input_scale_ub"
    r"|activation_scale_ub)$"
)
EXPERT, FIRST_EXPERT = re.compile(r"\.experts\.\d+\."), ".experts.0."
OF_ALL_EXPERTS = re.compile(r".*\.experts\.[a-z]\w*_proj")  # parameters without an ending
SCALE_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class CheckpointFormats(ABC):
    """The formats of one method's checkpoints. `ignored` names the layers that it left dense."""

    codes: ClassVar[str] = "weight"  # what a quantised layer's codes are called
    scales: ClassVar[str] = "weight_scale"

    ignored: tuple[str, ...] = ()
    head: bool = False  # whether the head is quantised, too
    scale_dtype: torch.dtype = torch.float32  # of scales by group
    # The layers that the tensors show to be so; of experts the first, and others that differ. What
    # follows from the model's files need not be in the names of its KV.
    coded: frozenset[str] = field(default=frozenset(), repr=False)
    dense: frozenset[str] = field(default=frozenset(), repr=False)

    def of(self, *names: str) -> MatrixFormat:
        is_coded = self._seen(names)
        if is_coded is None:
            is_coded = self.is_said_of(names)
        return self.format_of(*names) if is_coded else Dense()

    def _seen(self, names: Sequence[str]) -> bool | None:
        """Whether the tensors of such a layer are codes; None: there are no such tensors."""
        if (not self.coded and not self.dense) or is_embedding(names):
            return None
        full = spellings(names)
        for each in (full, [EXPERT.sub(FIRST_EXPERT, name) for name in full]):
            if not self.coded.isdisjoint(each):
                return True
            if not self.dense.isdisjoint(each):
                return False
        return None

    def is_said_of(self, names: Sequence[str]) -> bool:
        """Whether the config says that a layer is quantised."""
        is_dense = is_embedding(names) or (stays_dense(names) and not self.head)
        return not is_dense and not is_named(names, self.ignored)

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
        tensors = self.by_expert(tensors)
        found = {t.dtype for name, t in tensors.items() if name.endswith(f".{self.scales}")}
        only = found.pop() if len(found) == 1 else torch.float32
        kept = only if only in SCALE_DTYPES.values() else torch.float32
        is_coded = self._kinds(tensors)
        both = {True: set[str](), False: set[str]()}
        for name, kind in is_coded.items():
            first = EXPERT.sub(FIRST_EXPERT, name)
            if name == first or is_coded.get(first) != kind:
                both[kind].add(name)
        coded, dense = frozenset(both[True]), frozenset(both[False])
        return replace(self, scale_dtype=kept, coded=coded, dense=dense)

    def _kinds(self, tensors: Mapping[str, LazyTensor]) -> dict[str, bool]:
        """The layers that have matrices, and whether those are codes."""
        needed = {name: t for name, t in tensors.items() if not UNNEEDED.search(name)}
        found = {
            name: False
            for name, tensor in needed.items()
            if OF_ALL_EXPERTS.fullmatch(name) and is_of_numbers(tensor)
        }
        for name, of_layer in by_layer(needed).items():
            if self.is_quantised(of_layer):
                found[name] = True
            elif is_of_numbers(of_layer.get("weight")) and not has_scales(of_layer):
                found[name] = False
        return found

    def as_a_cpu_multiplies(self: F) -> F:
        """The same, in the order of a CPU's kernels where there are some."""
        return self

    def canonical(self, tensors: Mapping[str, LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
        """All tensors of the checkpoint under the names above; what is not needed is checked."""
        needed: dict[str, LazyTensor] = {}
        for name, tensor in self.by_expert(tensors).items():
            if UNNEEDED.search(name):
                check_unneeded(tensor, name)
            else:
                needed[name] = tensor
        for name, of_layer in by_layer(needed).items():
            if self.is_quantised(of_layer):
                of_layer = dict(self.layer(name, of_layer))
                if is_gate(name):
                    of_layer = as_numbers(name, self.of(name), of_layer)
            yield from ((f"{name}.{end}" if name else end, t) for end, t in of_layer.items())

    def by_expert(self, tensors: Mapping[str, LazyTensor]) -> Mapping[str, LazyTensor]:
        """The same tensors, each expert's scales beside its codes."""
        return tensors

    def is_quantised(self, of_layer: Mapping[str, LazyTensor]) -> bool:
        return self.codes in of_layer


def by_layer(tensors: Mapping[str, LazyTensor]) -> dict[str, dict[str, LazyTensor]]:
    """Each layer's tensors by their endings."""
    layers: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in tensors.items():
        layer, _, ending = name.rpartition(".")
        layers.setdefault(layer, {})[ending] = tensor
    return layers


def is_of_numbers(tensor: LazyTensor | None) -> bool:
    """Of a matrix, or of one for each expert."""
    return tensor is not None and len(tensor.shape) in (2, 3) and tensor.dtype in FLOATS


def has_scales(of_layer: Mapping[str, LazyTensor]) -> bool:
    return any("scale" in ending for ending in of_layer)


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
