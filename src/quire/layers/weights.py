"""How a checkpoint's tensors find their way into the layers that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Weight:
    """One tensor of a checkpoint, and the place that this rank's part of it is copied to."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    place: Tensor  # a view into a parameter; a smaller part is repeated to fill it
    part: tuple[slice, ...] = ()
    same_as: str | None = None  # the name of another tensor that fills the same place

    @property
    def identity(self) -> str:
        """One name for all tensors that fill the same place."""
        return self.same_as or self.name

    def load(self, tensor: Tensor) -> None:
        self.place.copy_(tensor[self.part])

    def holds(self, tensor: Tensor) -> bool:
        """Whether this rank's part of `tensor` is what the place holds already."""
        part = tensor[self.part].to(self.place)
        return torch.equal(self.place, part)


class Block(nn.Module):
    """A module without torch's hooks, whose machinery costs more than a small layer's work."""

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def settle(self) -> None:
        """Loaded for good: find parameters and parts as plain attributes, which is quicker."""
        for module in self.modules():
            module.__dict__.update(module._parameters)
            module.__dict__.update(module._modules)


class Layer(Block):
    """A block with parameters of its own, which knows their names in a checkpoint."""

    def weights(self, path: str) -> Iterator[Weight]:
        """The tensors to load, where `path` is this layer's own place in the model."""
        raise NotImplementedError


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def span(part: range) -> slice:
    return slice(part.start, part.stop)


def sibling(path: str, name: str) -> str:
    """The path of `name` beside `path`: checkpoints keep apart what a merged layer joins."""
    parent, dot, _ = path.rpartition(".")
    return parent + dot + name
