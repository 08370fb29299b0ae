"""A model that pools: a body that reads texts, a way to one vector each, and a head behind it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import Tensor, nn

from quire.kernels.packed import PackedTexts
from quire.layers.linear import ColumnLinear, Output, RowLinear
from quire.layers.tp import SINGLE
from quire.layers.weights import Layer, Weight
from quire.models.causal_lm import CausalLM, CheckpointModel
from quire.models.config import CheckpointConfig
from quire.models.encoders.activations import ACTIVATIONS
from quire.models.encoders.encoder import Encoder
from quire.models.pooling.pooler import pool

LM_HEAD = "lm_head."


class HeadLayer(Layer):
    """One product of the vectors, which checkpoints have under `name`."""

    def __init__(
        self, name: str, inputs: int, outputs: int, bias: bool = True, activation: str | None = None
    ) -> None:
        super().__init__()
        self.name = name
        self.activation = None if activation is None else ACTIVATIONS[activation]
        self.linear = ColumnLinear(inputs, [Output(name, outputs)], bias, SINGLE)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out if self.activation is None else self.activation(out)

    def weights(self, path: str) -> Iterator[Weight]:
        return self.linear.weights("")


class PoolingModel(CheckpointModel):
    """`prefix` may stand before the names of the body's tensors, or be missing."""

    def __init__(
        self,
        config: CheckpointConfig,
        body: Encoder | CausalLM,
        modes: Sequence[str],
        head: Sequence[HeadLayer] = (),
        prefix: str = "",
        yes_and_no: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(config)
        self.body = body
        self.transposed_experts = isinstance(body, CausalLM) and body.transposed_experts
        self.modes = tuple(modes)
        self.head = nn.ModuleList(head)
        self.yes_and_no = yes_and_no  # tokens; where their logits are compared, there is no head
        self._prefix = prefix
        weights = list(self.weights())
        self._names = {weight.name for weight in weights}
        self._names |= {weight.fused.name for weight in weights if weight.fused is not None}

    def pooled(self, hidden: Tensor, texts: PackedTexts) -> Tensor:
        """`[tokens, hidden]` to `[texts, size]`, in float32."""
        vectors = pool(hidden, texts, self.modes)
        if self.yes_and_no is not None:
            assert isinstance(self.body, CausalLM)
            logits = self.body.logits(vectors.to(hidden.dtype))[:, list(self.yes_and_no)].float()
            return logits[:, :1] - logits[:, 1:]
        for layer in self._head_layers():
            vectors = layer.forward(vectors.to(hidden.dtype)).float()
        return vectors

    def weights(self) -> Iterator[Weight]:
        for weight in self.body.weights():
            if self.yes_and_no is not None or not weight.name.startswith(LM_HEAD):
                yield weight
        for layer in self._head_layers():
            yield from layer.weights("")

    def _head_layers(self) -> Iterator[HeadLayer]:
        return (layer for layer in self.head if isinstance(layer, HeadLayer))

    def text_tensor(self, name: str) -> str | None:
        """Checkpoints have heads that are of no use here, and tables that are computed anyway."""
        if isinstance(self.body, CausalLM):
            return self._decoder_tensor(self.body.text_tensor(name))
        name = name.removeprefix(self._prefix)
        name = name.replace(".LayerNorm.gamma", ".LayerNorm.weight")  # as older ones call them
        name = name.replace(".LayerNorm.beta", ".LayerNorm.bias")
        layers = f"{self.body.names.layers}."
        return name if name in self._names or name.startswith(layers) else None

    def _decoder_tensor(self, name: str | None) -> str | None:
        if name is None or name in self._names:
            return name
        if name.startswith(LM_HEAD):
            return None
        prefixed = self._prefix + name
        return prefixed if prefixed in self._names else name

    def unexpected(self, left_out: Collection[str]) -> list[str]:
        if not isinstance(self.body, CausalLM):
            return []
        return self.body.unexpected([n for n in left_out if self.body.text_tensor(n) is None])

    def left_out(self, count: int) -> str | None:
        return None

    def pack(self) -> None:
        """All matrices but those that are read by the row."""
        for module in self.modules():
            if isinstance(module, ColumnLinear | RowLinear):
                module.pack()
