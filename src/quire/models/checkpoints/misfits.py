"""Saying exactly which tensors of a checkpoint do not fit a model, by the names in its files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from quire.checks import shorten
from quire.errors import ModelError
from quire.layers.weights import Weight
from quire.models.checkpoints.lazy_tensor import FileTensor, LazyTensor
from quire.models.checkpoints.tensor_views import Inner

NAMES_SHOWN = 3  # of each list
LAYER = re.compile(r"\b(layers\.|blk\.)(\d+)")
EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
Names = dict[str, None]  # each once, in order


@dataclass
class Misfits:
    """Names that keep a checkpoint from being that of a model which has the tensors `wanted`."""

    wanted: Mapping[str, Weight] = field(default_factory=dict)
    missing: Names = field(default_factory=dict)
    unexpected: Names = field(default_factory=dict)
    unfit: Names = field(default_factory=dict)
    found: dict[str, LazyTensor] = field(default_factory=dict)  # all, as the model calls them

    def not_wanted(self, given: str, name: str, tensor: LazyTensor) -> None:
        inner = of_stack(tensor)
        if inner is not None and 0 < (count := self._experts(name)) <= inner.index:
            self._other_experts(inner, given, count)
        else:
            self.unexpected[name_in_file(tensor, given)] = None

    def does_not_fit(self, given: str, tensor: LazyTensor, shape: Sequence[int] | None) -> None:
        """It has another shape than this one; None: it is of another type."""
        if shape is None:
            kind = str(tensor.dtype).removeprefix("torch.")
            self.unfit[f"{name_in_file(tensor, given)} is {kind}"] = None
        else:
            self.unfit[f"{with_shape(tensor, given)}, not {list(shape)}"] = None

    def differs(self, name: str, tensor: LazyTensor) -> None:
        self.unfit[f"{name_in_file(tensor, name)} differs from the tensor it is tied to"] = None

    def lack(self, weights: Iterable[Weight], stored_name: Callable[[str], str]) -> None:
        """The checkpoint has no tensors for these weights, which it would call so."""
        lacking = {weight.identity: weight for weight in weights}
        for identity, weight in sorted(lacking.items()):
            names = [weight.name, *([weight.fused.name] if weight.fused else [])]
            if (stack := self._stack_without(names)) is not None:
                self._other_experts(stack, identity, self._experts(weight.name))
            else:
                self.missing[self._as_in_other_layers(names) or stored_name(identity)] = None

    def refuse(self, architecture: str) -> None:
        lists = ("missing", self.missing), ("unexpected", self.unexpected), ("unfit", self.unfit)
        if found := "; ".join(f"{what}: {some_of(list(names))}" for what, names in lists if names):
            raise ModelError(
                f"The weights are not those of the {architecture} that the config describes "
                f"({found}): download both again, or choose another model."
            )

    def _experts(self, name: str) -> int:
        """How many there are in the layer that a tensor is of; 0: it is of none."""
        found = EXPERT.fullmatch(name)
        return len(self._experts_wanted.get(found[1], ())) if found is not None else 0

    @cached_property
    def _experts_wanted(self) -> dict[str, set[str]]:
        """The numbers of the experts of each layer."""
        layers: dict[str, set[str]] = {}
        for name in self.wanted:
            if (found := EXPERT.fullmatch(name)) is not None:
                layers.setdefault(found[1], set()).add(found[2])
        return layers

    def _stack_without(self, names: Iterable[str]) -> Inner | None:
        """The tensor of all experts of a layer that lacks this one."""
        for of_expert in filter(None, map(EXPERT.fullmatch, names)):
            first = self.found.get(f"{of_expert[1]}0{of_expert[3]}")
            stack = None if first is None else of_stack(first)
            if stack is not None and stack.stored.shape[0] <= int(of_expert[2]):
                return stack
        return None

    def _as_in_other_layers(self, names: Iterable[str]) -> str | None:
        """What the files would call a tensor of which other layers have the like."""
        for name in names:
            layer = LAYER.search(name)
            like = layer and self._by_place.get(LAYER.sub("", name, 1))
            if layer and like:
                return LAYER.sub(rf"\g<1>{layer[2]}", name_in_file(self.found[like], like), 1)
        return None

    @cached_property
    def _by_place(self) -> dict[str, str]:
        """What is found, by names without the layer's number."""
        return {LAYER.sub("", name, 1): name for name in self.found}

    def _other_experts(self, stack: Inner, name: str, wanted: int) -> None:
        count = stack.stored.shape[0]
        self.unfit[f"{name_in_file(stack, name)} is of {count:,} experts, not {wanted:,}"] = None


def some_of(names: Sequence[str]) -> str:
    shown = ", ".join(shorten(name) for name in names[:NAMES_SHOWN])
    rest = len(names) - NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


def name_in_file(tensor: LazyTensor, otherwise: str) -> str:
    """That of a tensor, or of the one that it is a part of; `otherwise` where it is in no file."""
    stored = in_file(tensor)
    return stored.name if stored is not None and stored.name else otherwise


def with_shape(tensor: LazyTensor, name: str) -> str:
    """The beginning of a sentence: what shape is wrong, which may not be that of its file."""
    called, shape, stored = name_in_file(tensor, name), list(tensor.shape[:4]), in_file(tensor)
    if of_stack(tensor) is not None:
        return f"{called} has {shape} for an expert"
    is_as_stored = stored is None or tuple(stored.shape) == tuple(tensor.shape)
    return f"{called} {'is' if is_as_stored else 'stands for'} {shape}"


def in_file(tensor: LazyTensor) -> FileTensor | None:
    return next((view for view in views(tensor) if isinstance(view, FileTensor)), None)


def of_stack(tensor: LazyTensor) -> Inner | None:
    """The view that takes an expert's out of a tensor of all of them."""
    return next((view for view in views(tensor) if isinstance(view, Inner)), None)


def views(tensor: LazyTensor) -> Iterator[LazyTensor]:
    """A tensor, what it looks into, and so on."""
    found: LazyTensor | None = tensor
    while found is not None:
        yield found
        found = getattr(found, "stored", None)
