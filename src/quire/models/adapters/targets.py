"""The matrices of a model that adapters can change, by the names that checkpoints have for them.

They are found in a model without memory, all of whose matrices are stored as numbers: the names,
shapes, parts and orders are those of the model that runs, whatever format its checkpoint has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from quire.layers.embedding import Vocabulary
from quire.layers.experts import Experts
from quire.layers.formats import AllDense
from quire.layers.linear import RowLinear
from quire.layers.tp import TensorParallel
from quire.layers.weights import Layer, Weight, ranges, span
from quire.models.adapters.adapter import EMBEDDING, HEAD
from quire.models.causal_lm import CausalLM
from quire.models.config import ModelConfig
from quire.models.source import shapes

ENDING = ".weight"


@dataclass(frozen=True)
class Target:
    """One of the checkpoint's matrices, and the output of a layer that it becomes."""

    layer: str  # as in `Adapter.layers`
    output: int
    weight: Weight  # its whole shape, this rank's part of it, and the order of its rows
    expert: int | None = None
    adds_bias: bool = True  # of ranks whose results are added up, one does


class Rows(NamedTuple):
    """Rows of a matrix that an adapter names, which are all of a target's."""

    of: slice
    target: Target


@dataclass(frozen=True)
class StackedExperts:
    """The experts of a layer, whose matrices `transformers` has as parameters of three dimensions.

    `parameters` are in the order in which it defines them.
    """

    parameters: dict[str, Sequence[Sequence[Rows]]]  # of each, for each expert

    @property
    def defined(self) -> Iterator[str]:
        """The names of all that there may be."""
        for parameter in self.parameters:
            yield from (parameter, f"{parameter}_bias")


class Targets:
    """All of them, for one rank."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        self.model: CausalLM = shapes(replace(config, formats=AllDense()), tp)
        self.outputs: dict[str, int] = {}  # of each layer
        self.experts: dict[str, StackedExperts] = {}
        self.held_experts: dict[str, range] = {}  # of each layer of experts
        self.vocabulary: dict[str, Weight] = {}  # of EMBEDDING and of HEAD
        self._modules: dict[str, list[Rows]] = {}
        for path, module in self.model.named_modules():
            if isinstance(module, Experts):
                self._add_experts(path, module)
            elif isinstance(module, Layer) and not isinstance(module, Vocabulary):
                self._add_layer(path, module)
        for weight in self.model.weights():
            name = weight.name.removesuffix(ENDING)
            if name in (EMBEDDING, HEAD):
                self.vocabulary[name] = weight
        self._add(Target(HEAD, 0, self.vocabulary[HEAD]))
        self._add(Target(EMBEDDING, 0, transposed(self.vocabulary[EMBEDDING])))

    def name(self, module: str) -> str | None:
        """What this model calls a module of an adapter; None: it is not of the language model."""
        found = self.model.text_tensor(module + ENDING)
        return found and found.removesuffix(ENDING)

    def find(self, name: str) -> Sequence[Rows]:
        return self._modules.get(name, ())

    @property
    def linear(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the matrices outside of experts and vocabulary, as checkpoints name them."""
        return {
            name: rows[0].target.weight.shape
            for name, rows in self._modules.items()
            if name not in (EMBEDDING, HEAD)
            and rows[0].target.expert is None
            and name == rows[0].target.weight.name.removesuffix(ENDING)
        }

    def _add_layer(self, path: str, layer: Layer) -> None:
        adds_bias = not isinstance(layer, RowLinear) or layer.tp.rank == 0
        for output, weight in enumerate(matrices(layer, path)):
            self._add(Target(path, output, weight, adds_bias=adds_bias))

    def _add_experts(self, path: str, layer: Experts) -> None:
        both, down = f"{path}.gate_up", f"{path}.down"
        self.held_experts |= {both: layer.mine, down: layer.mine}
        gate_up: list[list[Rows]] = []
        downs: list[list[Rows]] = []
        weights = list(matrices(layer, path))
        for expert in range(layer.count):
            of_gate, of_up, of_down = weights[3 * expert : 3 * expert + 3]
            gate, up = Target(both, 0, of_gate, expert), Target(both, 1, of_up, expert)
            last = Target(down, 0, of_down, expert, layer.adds_down_bias)
            gate_up.append([rows_in_fused(gate), rows_in_fused(up)])
            downs.append([Rows(slice(None), last)])
            for target in (gate, up, last):
                self._add(target)
        self.experts[path] = StackedExperts({"gate_up_proj": gate_up, "down_proj": downs})

    def _add(self, target: Target) -> None:
        weight = target.weight
        self.outputs[target.layer] = max(self.outputs.get(target.layer, 0), target.output + 1)
        self._modules[weight.name.removesuffix(ENDING)] = [Rows(slice(None), target)]
        if weight.fused is not None:
            fused = weight.fused.name.removesuffix(ENDING)
            self._modules.setdefault(fused, []).append(rows_in_fused(target))


def matrices(layer: Layer, path: str) -> Iterator[Weight]:
    for weight in layer.weights(path):
        if len(weight.shape) == 2 and weight.name.endswith(ENDING):
            yield weight


def transposed(weight: Weight) -> Weight:
    """The embedding as the matrix of a product with one-hot rows, which is what adapters see."""
    rows, columns = ranges(weight.shape, weight.part)
    return replace(weight, shape=weight.shape[::-1], part=(span(columns), span(rows)), fused=None)


def rows_in_fused(target: Target) -> Rows:
    """Where the target's rows are in the matrix that some checkpoints have it in."""
    fused, count = target.weight.fused, target.weight.shape[0]
    assert fused is not None
    if fused.interleaved:
        return Rows(slice(fused.start, None, fused.rows // count), target)
    return Rows(slice(fused.start, fused.start + count), target)
