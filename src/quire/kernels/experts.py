"""Mixtures of experts, as a backend sees them: which experts a token goes to, and what they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from quire.kernels.activation import Gating
from quire.kernels.adapter_slots import AdapterBatch, AdapterSlots
from quire.kernels.codes import BlockScales
from quire.kernels.four_bits import FourBitExperts

if TYPE_CHECKING:  # there may be no Numba
    from quire.kernels.numba.float_product import FloatProduct

NOWHERE = -1  # the expert of rows that only pad a step


class Routing(NamedTuple):
    """The experts of each token. A number that is none of theirs stands for no expert."""

    experts: Tensor  # int64 [tokens, top_k]
    weights: Tensor  # [tokens, top_k]: what each of their results counts


class RouterProducts(NamedTuple):
    """What a router multiplied, for kernels that make the choice themselves: the largest, weighted
    by the softmax over them, rounded to the type of these numbers. Padding goes nowhere."""

    numbers: Tensor  # [tokens, experts]
    is_padding: Tensor  # bool [tokens]
    top_k: int


class RouterScores(NamedTuple):
    """How a router scores all experts, and what it makes of the scores of those it chooses."""

    weight: Tensor  # [experts, hidden]
    bias: Tensor | None
    correction: Tensor | None  # added to the scores for the choice, and not for the weights
    top_k: int
    is_softmax: bool  # over all experts
    is_sigmoid: bool  # of each; with neither, the weights are the softmax over the chosen ones
    is_renormalised: bool
    scale: float


class CodedExperts(NamedTuple):
    """One matrix of each expert, in codes of eight bits."""

    codes: Tensor  # [experts, outputs, inputs]
    scales: BlockScales  # of all rows, those of the experts one below the other


PackedExperts = CodedExperts | FourBitExperts


@dataclass(frozen=True, eq=False)
class ExpertMatrices:
    """One matrix of each expert."""

    multiply: Callable[[int, Tensor], Tensor]  # some tokens, with that of one expert; and its bias
    dense: Tensor | None  # [experts, outputs, inputs], where they are stored as numbers
    bias: Tensor | None = None  # [experts, outputs]
    packed: PackedExperts | None = None  # how else they are stored, where kernels know it
    interleaved: FloatProduct | None = None  # a copy that a CPU multiplies few tokens with


@dataclass(frozen=True, eq=False)
class ExpertAdapters:
    """What adapters add to the two products of experts, for tokens that have one."""

    gate_up: AdapterSlots
    down: AdapterSlots
    batch: AdapterBatch  # of the tokens


class SharedExperts(NamedTuple):
    """An MLP beside the experts that all tokens go through, as wide as a few of them."""

    gate_up: Tensor  # [2 * features, hidden]
    down: Tensor  # [hidden, features]


@dataclass(frozen=True, eq=False)
class ExpertMLPs:
    """The experts of a layer, or those of them that this rank has.

    The rows of `gate_up` are those of the gate, then those of up, however a checkpoint has them.
    """

    count: int
    gate_up: ExpertMatrices
    activation: Gating
    down: ExpertMatrices
    adapters: ExpertAdapters | None = None  # of a pass in which some token has one
    shared: SharedExperts | None = None  # whose result is added, where a backend is given them
    own_tokens: bool = False  # no expert may be given others' tokens, whose results do not count


def weighted_sum(results: Tensor, weights: Tensor) -> Tensor:
    """Each token's `results` `[tokens, top_k, hidden]`, summed in float32 and rounded once."""
    summed = results.float().mul(weights.float().unsqueeze(-1)).sum(1)
    return summed.to(results.dtype)
