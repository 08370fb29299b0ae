"""An adapter's tensors as layers hold them: scaled, split by output, this rank's part, in order.

A tensor of the file may be of several outputs of a layer (a fused matrix), of all experts of a
layer (a stacked parameter), or of one expert, of which a layer has many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from quire.checks import shorten
from quire.errors import ModelError
from quire.layers.low_rank import LowRank
from quire.layers.weights import ranges
from quire.models.adapters.adapter import Outputs
from quire.models.adapters.changes import Change
from quire.models.adapters.fingerprint import ContentDigest
from quire.models.adapters.targets import Rows, Target, Targets
from quire.models.adapters.tensors import Named


class Pieces:
    """What is added to each output, as the changes of an adapter are read one after the other."""

    def __init__(self, targets: Targets, dtype: torch.dtype) -> None:
        self._targets, self._dtype = targets, dtype
        self._found: dict[tuple[str, int], LowRank] = {}
        self._of_experts: dict[tuple[str, int], dict[int, LowRank]] = {}

    def add(self, change: Change, digest: ContentDigest) -> None:
        whole = self._read(change, digest)
        experts = len(change.rows)
        for output, rows in enumerate(change.rows[0]):
            target = rows.target
            held = self._targets.held_experts.get(target.layer, range(1))
            if experts > 1:
                rows = change.rows[held.start][output]
                self._put(change, target, part_of(whole, rows, held))
            elif target.expert is None:
                self._put(change, target, first(part_of(whole, rows, range(1))))
            elif target.expert in held:
                self._put(change, target, first(part_of(whole, rows, range(1))), target.expert)

    def by_layer(self) -> dict[str, Outputs]:
        for output, experts in self._of_experts.items():
            held = self._targets.held_experts[output[0]]
            self._found[output] = stack(experts, held)
        layers = dict.fromkeys(layer for layer, _ in self._found)
        return {layer: self._outputs(layer) for layer in layers}

    def _outputs(self, layer: str) -> Outputs:
        return tuple(self._found.get((layer, i)) for i in range(self._targets.outputs[layer]))

    def _put(
        self, change: Change, target: Target, piece: LowRank, expert: int | None = None
    ) -> None:
        output = (target.layer, target.output)
        experts = self._of_experts.setdefault(output, {}) if expert is not None else {}
        if output in self._found or expert in experts:
            raise ModelError(
                f"The adapter changes {shorten(target.weight.name)} twice, and "
                f"{shorten(change.a.name)} is the second."
            )
        if expert is None:
            self._found[output] = piece
        else:
            experts[expert] = piece

    def _read(self, change: Change, digest: ContentDigest) -> LowRank:
        """With a dimension of experts in front, which is 1 where there are none."""
        experts, name, scale = len(change.rows), change.name, change.scale
        a = self._numbers(change.a, digest.read(f"{name}.a", scale, change.a))
        b = self._numbers(change.b, digest.read(f"{name}.b", scale, change.b).float() * scale)
        bias = None
        if change.bias is not None:
            read = digest.read(f"{name}.bias", scale, change.bias)
            bias = self._numbers(change.bias, read.float() * scale)[None]
        # Ranks of an expert are neighbours in A, and every so many columns of B.
        of_experts = b.unflatten(1, (change.rank, experts)).permute(2, 0, 1)
        return LowRank(a.unflatten(0, (experts, change.rank)), of_experts, bias)

    def _numbers(self, named: Named, read: Tensor) -> Tensor:
        return finite(named, read.to(self._dtype))


def part_of(whole: LowRank, rows: Rows, experts: range) -> LowRank:
    """This rank's part of some of the rows of these experts."""
    target, own = rows.target, slice(experts.start, experts.stop)
    columns = ranges(target.weight.shape, target.weight.part)[1]
    a = whole.a[own, :, columns.start : columns.stop].contiguous()
    b = own_rows(whole.b[own], rows).contiguous()
    if whole.bias is None or not target.adds_bias:
        return LowRank(a, b)
    return LowRank(a, b, own_rows(whole.bias[own, :, None], rows)[..., 0].contiguous())


def own_rows(whole: Tensor, rows: Rows) -> Tensor:
    """`[experts, outputs, …]`: the target's rows in the layer's order, and of those this rank's."""
    weight = rows.target.weight
    found = whole[:, rows.of]
    if weight.order:
        found = found.unflatten(1, (-1, len(weight.order)))[:, :, list(weight.order)].flatten(1, 2)
    kept = ranges(weight.shape, weight.part)[0]
    return found[:, kept.start : kept.stop]


def first(of_one: LowRank) -> LowRank:
    bias = None if of_one.bias is None else of_one.bias[0]
    return LowRank(of_one.a[0], of_one.b[0], bias)


def stack(experts: Mapping[int, LowRank], held: range) -> LowRank:
    """Those of single experts; ranks that an expert does not have, and experts that the adapter
    does not change, are zeros."""
    any_one = next(iter(experts.values()))
    rank = max(each.rank for each in experts.values())
    a = any_one.a.new_zeros((len(held), rank, any_one.a.shape[1]))
    b = any_one.b.new_zeros((len(held), any_one.b.shape[0], rank))
    has_bias = any(each.bias is not None for each in experts.values())
    bias = b.new_zeros(b.shape[:2]) if has_bias else None
    for expert, each in experts.items():
        index = expert - held.start
        a[index, : each.rank] = each.a
        b[index, :, : each.rank] = each.b
        if bias is not None and each.bias is not None:
            bias[index] = each.bias
    return LowRank(a, b, bias)


def finite(named: Named, numbers: Tensor) -> Tensor:
    if not all(map(math.isfinite, torch.aminmax(numbers))):  # a NaN is least and greatest
        kind = str(numbers.dtype).removeprefix("torch.")
        raise ModelError(f"The adapter's {shorten(named.name)} is not finite in {kind}.")
    return numbers
