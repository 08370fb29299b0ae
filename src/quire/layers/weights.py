"""How a checkpoint's tensors find their way into the layers that hold them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from quire.errors import ModelError
from quire.kernels.codes import CodeFormat

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Place(Protocol):
    """Memory that takes a tensor of a checkpoint, row by row, in whatever form it keeps it."""

    @property
    def nbytes(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """The type of numbers that it takes without a loss beyond its own."""
        ...

    def rows(self, start: int, stop: int) -> Place: ...

    def store(self, numbers: Tensor) -> None: ...

    def holds(self, numbers: Tensor) -> bool:
        """Whether it has just these, or what it would make of them."""
        ...


@dataclass(frozen=True)
class TensorPlace:
    """A view into a parameter, which takes numbers as they are; fewer are repeated to fill it."""

    tensor: Tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def rows(self, start: int, stop: int) -> TensorPlace:
        return TensorPlace(self.tensor[start:stop])

    def store(self, numbers: Tensor) -> None:
        self.tensor.copy_(numbers)

    def holds(self, numbers: Tensor) -> bool:
        return torch.equal(self.tensor, numbers.to(self.tensor))


class BadNumbers(ModelError):
    """The tensor `name` of a checkpoint holds what it cannot."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(name, problem)
        self.name, self.problem = name, problem

    def __str__(self) -> str:
        return f"{self.name} {self.problem}: download the model again."


@dataclass(frozen=True)
class FinitePlace(TensorPlace):
    """One that takes the tensor `name`, all of whose numbers have to be finite."""

    name: str
    what: ClassVar[str] = "numbers"

    def rows(self, start: int, stop: int) -> FinitePlace:
        return replace(self, tensor=self.tensor[start:stop])

    def store(self, numbers: Tensor) -> None:
        if not bool(numbers.float().isfinite().all()):
            raise BadNumbers(self.name, f"has {self.what} that are no finite numbers")
        self.tensor.copy_(numbers)


NOWHERE = TensorPlace(torch.empty(0, device="cpu"))


@dataclass(frozen=True)
class Fused:
    """A tensor that holds several others, one below the other, as some checkpoints store them."""

    name: str
    start: int  # the row at which ours begins
    rows: int  # of all of them
    interleaved: bool = False  # their rows take turns (`layers/interleaved.py`)


@dataclass(frozen=True)
class Weight:
    """One tensor of a checkpoint, and the place that this rank's part of it is copied to."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    place: Place = NOWHERE
    part: tuple[slice, ...] = ()
    same_as: str | None = None  # the name of another tensor that fills the same place
    fused: Fused | None = None  # where a checkpoint may have it instead
    order: tuple[int, ...] = ()  # which row of each head comes first, second, …; (): as stored
    offset: float = 0.0  # what is added to the checkpoint's numbers
    dtypes: tuple[torch.dtype, ...] = FLOATS  # that the checkpoint may have it in

    @property
    def identity(self) -> str:
        """One name for all tensors that fill the same place."""
        return self.same_as or self.name

    def placed(self, place: Place, ending: str) -> Weight:
        """The tensor of a layer or matrix whose name ends so, and where it goes."""
        fused = self.fused and replace(self.fused, name=self.fused.name + ending)
        return replace(self, name=self.name + ending, place=place, fused=fused)

    def stored_as(self, *dtypes: torch.dtype) -> Weight:
        """The same, of a tensor that the checkpoint has in one of these types."""
        return replace(self, dtypes=dtypes)

    def fill(self, numbers: Tensor) -> None:
        """Take what the checkpoint has of this rank's part."""
        if self.offset:
            numbers = numbers.to(self.place.dtype) + self.offset
        self.place.store(numbers)

    def pieces(self, most: int) -> Iterator[Weight]:
        """The same, in parts by the first dimension of at most about `most` numbers."""
        if len(self.shape) == 1:
            yield self
            return
        first, *others = ranges(self.shape, self.part)
        step = max(1, most // max(1, math.prod(len(other) for other in others)))
        for start in range(0, len(first), step):
            part = (span(first[start : start + step]), *(span(other) for other in others))
            yield replace(self, place=self.place.rows(start, start + step), part=part)


class Block(nn.Module):
    """A module without torch's hooks, whose machinery costs more than a small layer's work."""

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def takes(self, rows: int, dtype: torch.dtype) -> CodeFormat | None:
        """What it wants of an input of so many rows instead of numbers of this type, if codes."""
        return None

    def dtype_in_memory(self, dtype: torch.dtype, declared: torch.dtype) -> torch.dtype:
        """The type of one of this block's own parameters, in a model that computes in `dtype`."""
        return dtype

    def make_room(self, dtype: torch.dtype, device: torch.device) -> None:
        """Give this block's own parameters, which are only shapes, their memory, with whatever is
        in it."""
        for name, shape in self._parameters.items():
            if shape is not None:
                kept = self.dtype_in_memory(dtype, shape.dtype)
                self._parameters[name] = parameter(*shape.shape, dtype=kept, device=device)

    def freeze(self) -> None:
        """Make parameters and submodules plain attributes, which are found faster; none may be
        replaced any more."""
        for module in self.modules():
            module.__dict__.update(module._parameters)
            module.__dict__.update(module._modules)


class Layer(Block):
    """A block with parameters of its own, which knows their names in a checkpoint."""

    def weights(self, path: str) -> Iterator[Weight]:
        """The tensors to load, where `path` is this layer's own place in the model."""
        raise NotImplementedError


def make_room(model: Block, dtype: torch.dtype, device: torch.device) -> None:
    """Give all of a model its memory, each block by its own format.

    `nn.Module.to_empty` does so too, and for shapes alone imports all of sympy: seconds.
    """
    for module in model.modules():
        if isinstance(module, Block):
            module.make_room(dtype, device)


def room_needed(model: Block, dtype: torch.dtype) -> int:
    """The bytes that `make_room` takes."""
    sizes = {
        id(shape): shape.numel() * module.dtype_in_memory(dtype, shape.dtype).itemsize
        for module in model.modules()
        if isinstance(module, Block)
        for shape in module._parameters.values()
        if shape is not None
    }
    return sum(sizes.values())


def parameter(
    *shape: int, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def view(part: Tensor) -> nn.Parameter:
    """Part of a parameter, in its memory."""
    return nn.Parameter(part, requires_grad=False)


def ranges(shape: Sequence[int], part: tuple[slice, ...]) -> tuple[range, ...]:
    """What `part` takes of each dimension; of those it does not name, all."""
    every = (*part, *[slice(None)] * (len(shape) - len(part)))
    return tuple(range(size)[taken] for size, taken in zip(shape, every, strict=True))


def span(part: range) -> slice:
    return slice(part.start, part.stop)


def sibling(path: str, name: str) -> str:
    """The path of `name` beside `path`: checkpoints keep apart what a merged layer joins."""
    parent, dot, _ = path.rpartition(".")
    return parent + dot + name
