"""Layers with experts: what families of mixtures share.

x ─┬─ router ─ routing ─┐
   ├────────────── experts ──────── + ─ all-reduce
   └─ shared expert ─ its gate ─────┘      if there is one
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from quire.kernels.backend import Backend
from quire.kernels.linear import linear
from quire.kernels.plain import Rotation
from quire.layers.adapters.matrix_adapters import MatrixAdapters
from quire.layers.attention import Step
from quire.layers.experts import USUAL_NAMES, ExpertNames, Experts
from quire.layers.kv_layer import KVLayer
from quire.layers.norm import RMSNorm
from quire.layers.router import Router, RoutingRule
from quire.layers.tp import TensorParallel
from quire.layers.weights import Block, Layer, TensorPlace, Weight, parameter
from quire.models.blocks import GatedMLP
from quire.models.config import ExpertsConfig, ModelConfig


class RoutedMLP(Block):
    """A router and the experts it chooses from. It takes tokens, the step, and what the router made
    of those tokens, if that is there already."""

    @property
    def chooser(self) -> Router:
        raise NotImplementedError


class SparseMLP(RoutedMLP):
    """One whose parts have the names of most checkpoints."""

    def __init__(
        self,
        config: ModelConfig,
        shape: ExpertsConfig,
        rule: RoutingRule,
        tp: TensorParallel,
        names: ExpertNames = USUAL_NAMES,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.gate = Router(config.hidden_size, shape.count, rule)
        self.experts = Experts(config.hidden_size, shape.features, shape.count, tp, names)
        self.shared_expert: GatedMLP | None = None
        if shape.shared_features:
            self.shared_expert = GatedMLP(config, tp, features=shape.shared_features)
            self.shared_expert_gate = TokenGate(config.hidden_size)

    @property
    def chooser(self) -> Router:
        return self.gate

    def forward(self, x: Tensor, step: Step, products: Tensor | None = None) -> Tensor:
        routing = self.gate(x, step, products)
        out: Tensor = self.experts(x, routing, step.backend)
        if self.shared_expert is not None:
            out.addcmul_(self.shared_expert_gate(x), self.shared_expert.partial(x, step.backend))
        return self.tp.all_reduce(out)


class TokenGate(Layer):
    """How much of the shared expert each token takes."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = parameter(1, hidden_size)
        self.adapters: MatrixAdapters | None = None

    def forward(self, x: Tensor) -> Tensor:
        """`[tokens, 1]`, from 0 to 1."""
        product = linear(x, self.weight, None, None)
        if self.adapters is not None:
            self.adapters.add(x, product)
        return product.sigmoid()

    def weights(self, path: str) -> Iterator[Weight]:
        yield Weight(f"{path}.weight", tuple(self.weight.shape), TensorPlace(self.weight))


class SparseLayer(Block):
    """A decoder layer with experts, and a norm before them and before its attention.

    `name` is what checkpoints call the router and its experts.
    """

    def __init__(
        self, config: ModelConfig, attention: KVLayer, experts: RoutedMLP, name: str = "mlp"
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.name = name
        self.add_module(name, experts)

    def forward(
        self, stream: Tensor, delta: Tensor | None, rotation: Rotation, step: Step
    ) -> Tensor:
        """What to add to `stream` next, once `delta` has been added to it."""
        backend: Backend = step.backend
        normed = self.input_layernorm(stream, delta, backend, self.self_attn)
        delta = self.self_attn.onto(stream, normed, rotation, step)
        mlp = self._modules[self.name]
        assert isinstance(mlp, RoutedMLP)
        norm = self.post_attention_layernorm
        x, products = mlp.chooser.behind(norm, stream, delta, backend)
        out: Tensor = mlp(x, step, products)
        return out
