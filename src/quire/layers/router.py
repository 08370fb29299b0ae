"""Which experts each token goes to, and what each one's result counts.

A router scores all experts. Families differ in what they make of the scores:

    Mixtral, Qwen   softmax over all ─ the top k ─ renormalised, or not
    gpt-oss         the top k ─ softmax over those
    DeepSeek V2     softmax over all ─ the best groups ─ the top k of those ─ scaled
    DeepSeek V3     sigmoid ─ corrected for the choice alone ─ groups, top k ─ renormalised, scaled
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from quire.kernels.backend import Backend
from quire.kernels.experts import NOWHERE, RouterProducts, RouterScores, Routing
from quire.kernels.linear import is_few, linear, linear_in_float32
from quire.layers.adapters.matrix_adapters import MatrixAdapters
from quire.layers.attention import Step
from quire.layers.norm import RMSNorm
from quire.layers.weights import FinitePlace, Layer, Weight, parameter

TINY = 1e-20  # what keeps a sum of scores that are all 0 from being divided by


class Scores(Enum):
    """What the router's products become before the choice."""

    SOFTMAX = "softmax over all experts"
    SIGMOID = "sigmoid of each"
    NONE = "nothing: the weights are the softmax over the chosen ones"


@dataclass(frozen=True)
class Groups:
    """Experts in groups of equal size, of which only the best are chosen from."""

    count: int
    kept: int
    best: int = 1  # how many of a group's best experts are its score, added up


@dataclass(frozen=True)
class RoutingRule:
    """From the router's products `[tokens, experts]` to the experts of each token."""

    top_k: int
    scores: Scores = Scores.SOFTMAX
    renormalised: bool = False  # the weights of a token add up to one
    groups: Groups | None = None
    scale: float = 1.0
    rounded: bool = False  # weights are rounded to the type that the model computes in

    def __call__(self, products: Tensor, correction: Tensor | None = None) -> Routing:
        """`correction` is added to the scores for the choice, and not for the weights."""
        scores = self._scores(products.float())
        ranked = scores if correction is None else scores + correction
        if self.groups is not None:
            ranked = in_best_groups(ranked, self.groups)
        experts = ranked.topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.scores is Scores.NONE:
            weights = weights.softmax(-1)
        if self.renormalised:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        if self.scale != 1.0:
            weights = weights * self.scale
        return Routing(experts, weights.to(products.dtype) if self.rounded else weights)

    @property
    def is_of_products(self) -> bool:
        """Whether all it says is what `RouterProducts` says of a choice."""
        return self == RoutingRule(self.top_k, Scores.NONE, rounded=True)

    def on_gpu(self, products: Tensor, correction: Tensor | None, is_padding: Tensor) -> Routing:
        """The same without groups, in one launch; what only pads a step goes nowhere."""
        from quire.kernels.triton.experts.route import route

        return route(
            products,
            correction,
            is_padding,
            self.top_k,
            softmax=self.scores is Scores.SOFTMAX,
            sigmoid=self.scores is Scores.SIGMOID,
            renormalised=self.renormalised,
            scale=self.scale,
            dtype=products.dtype if self.rounded else torch.float32,
        )

    def _scores(self, products: Tensor) -> Tensor:
        if self.scores is Scores.SOFTMAX:
            return products.softmax(-1)
        return products.sigmoid() if self.scores is Scores.SIGMOID else products


def in_best_groups(ranked: Tensor, groups: Groups) -> Tensor:
    """The same scores, those of other groups so low that they are not chosen."""
    grouped: Tensor = ranked.unflatten(-1, (groups.count, -1))
    of_groups = grouped.topk(groups.best, dim=-1).values.sum(-1)
    kept = of_groups.topk(groups.kept, dim=-1).indices
    is_kept = torch.zeros_like(of_groups, dtype=torch.bool).scatter_(-1, kept, True)
    return grouped.masked_fill(~is_kept.unsqueeze(-1), -math.inf).flatten(-2)


class Router(Layer):
    """Scores experts for each token. It is small and decides much: no format quantises it."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        rule: RoutingRule,
        bias: bool = False,
        in_float32: bool = False,
        corrected: bool = False,
    ) -> None:
        """`in_float32`: its products are not rounded, whatever the model computes in: DeepSeek's.
        `corrected`: it has learned what is added to the scores for the choice."""
        super().__init__()
        self.rule, self.in_float32 = rule, in_float32
        self.weight = parameter(num_experts, hidden_size)
        self.bias = parameter(num_experts) if bias else None
        self.correction = parameter(num_experts) if corrected else None
        self.adapters: MatrixAdapters | None = None

    def make_room(self, dtype: torch.dtype, device: torch.device) -> None:
        super().make_room(dtype, device)
        if self.correction is not None:  # near ties are decided by it
            size = len(self.correction)
            self.correction = parameter(size, dtype=torch.float32, device=device)

    def behind(
        self, norm: RMSNorm, stream: Tensor, delta: Tensor | None, backend: Backend
    ) -> tuple[Tensor, Tensor | None]:
        """What `norm` makes of the stream, and this router of that, if one launch finds both."""
        if delta is None and self.adapters is None:
            dtype = torch.float32 if self.in_float32 else stream.dtype
            found = backend.norm_products(
                stream, norm.weight, norm.eps, self.weight, self.bias, dtype
            )
            if found is not None:
                return found
        normed: Tensor = norm(stream, delta, backend)
        return normed, None

    def forward(self, x: Tensor, step: Step, products: Tensor | None = None) -> Routing:
        """`products`: what `behind` found."""
        if products is not None:
            return self.choose(products, step.is_padding)
        if self.rule.groups is None and self.adapters is None:
            routing = step.backend.route(x, self.scores, step.batches[0])
            if routing is not None:
                return routing
        return self.route(x, step.is_padding)

    def route(self, x: Tensor, is_padding: Tensor) -> Routing:
        """By torch, or on a GPU by a launch behind torch's product."""
        return self.choose(self.products(x), is_padding)

    def products_of_few(
        self, x: Tensor, step: Step, products: Tensor | None = None
    ) -> RouterProducts | None:
        """What kernels choose from that multiply a few tokens by experts, if the rule is theirs."""
        is_theirs = self.correction is None and self.rule.is_of_products
        if not is_theirs or not is_few(x, self.weight):
            return None
        if products is None:
            products = self.products(x)
        return RouterProducts(products, step.is_padding, self.rule.top_k)

    def products(self, x: Tensor) -> Tensor:
        if self.in_float32:
            products = linear_in_float32(x, self.weight)
        else:
            products = linear(x, self.weight, self.bias, None)
        if self.adapters is not None:
            self.adapters.add(x, products)
        return products

    def choose(self, products: Tensor, is_padding: Tensor) -> Routing:
        if products.is_cuda and self.rule.groups is None:
            return self.rule.on_gpu(products, self.correction, is_padding)
        routing = self.rule(products, self.correction)
        routing.experts.masked_fill_(is_padding.unsqueeze(-1), NOWHERE)
        return routing

    @cached_property
    def scores(self) -> RouterScores:
        """Once it has its memory."""
        rule = self.rule
        return RouterScores(
            self.weight,
            self.bias,
            self.correction,
            rule.top_k,
            rule.scores is Scores.SOFTMAX,
            rule.scores is Scores.SIGMOID,
            rule.renormalised,
            rule.scale,
        )

    def weights(self, path: str) -> Iterator[Weight]:
        """Of what is not a number some expert would be chosen, and answers be as good as random."""
        parts = {
            "weight": self.weight,
            "bias": self.bias,
            "e_score_correction_bias": self.correction,
        }
        for ending, numbers in parts.items():
            if numbers is not None:
                name = f"{path}.{ending}"
                yield Weight(name, tuple(numbers.shape), FinitePlace(numbers, name))
