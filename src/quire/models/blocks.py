"""Building blocks that several families share.

    token ids ─ embedding ─┬─ norm ─ attention ─┬─ norm ─ MLP ─┬─ … ─ norm ─ head ─ logits
                           └────────────────────+──────────────+     the residual stream

The stream is one tensor that blocks add to. A block hands its result on, and the next norm adds
it to the stream and normalises the sum, which are then one pass over memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.activation import Activation
from quire.kernels.backend import Backend
from quire.kernels.codes import Activations, CodeFormat
from quire.kernels.experts import SharedExperts
from quire.kernels.plain import Rotation
from quire.kv_groups import KVStream
from quire.layers.attention import Attention, Sinks, Step
from quire.layers.kv_layer import KVLayer
from quire.layers.linear import ColumnLinear, Output, RowLinear
from quire.layers.matrix import DenseMatrix
from quire.layers.norm import HeadNorm, RMSNorm
from quire.layers.tp import TensorParallel
from quire.layers.weights import Block
from quire.models.config import ModelConfig


class GQAttention(KVLayer):
    """Grouped-query attention: several heads of q share one of k and v.

    `order` is that of the features of each head of q and k, where rotation needs another than the
    checkpoint's (`layers/rope.py`).
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        tp: TensorParallel,
        qkv_bias: bool = False,
        output_bias: bool = False,
        scale: float | None = None,
        order: tuple[int, ...] = (),
        softcap: float | None = None,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        self.layer, self.window = layer, config.windows[layer]
        self.num_kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        q = Output("q_proj", config.num_heads, config.head_dim, "attention heads", order=order)
        k = Output("k_proj", config.num_kv_heads, config.head_dim, "KV heads", True, order)
        v = replace(k, name="v_proj", order=())
        self.qkv = ColumnLinear(config.hidden_size, (q, k, v), qkv_bias, tp, fused="qkv_proj")
        self.qk_norm: HeadNorm | None = None
        scale = config.head_dim**-0.5 if scale is None else scale
        self.sinks = Sinks(config.num_heads, tp) if sinks else None
        self.attend = Attention(layer, scale, self.window, softcap, self.sinks)
        self.o_proj = RowLinear(
            config.num_heads,
            config.hidden_size,
            output_bias,
            tp,
            width=config.head_dim,
            what="attention heads",
        )

    def takes(self, rows: int, dtype: torch.dtype) -> CodeFormat | None:
        return self.qkv.takes(rows, dtype)

    def heads(self, x: Activations, rotation: Rotation, step: Step) -> Tensor:
        found: Tensor = self.attend(self.qkv(x), self.qk_norm, rotation, step)
        return found.flatten(1)

    def streams(self, tp: TensorParallel) -> tuple[KVStream, ...]:
        heads = len(tp.split_or_share(self.num_kv_heads, "KV heads"))
        return (KVStream(heads, self.head_dim),) * 2


class GatedMLP(Block):
    """`down(activation(gate(x)) * up(x))`."""

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        bias: bool = False,
        activation: Activation = Activation.SILU,
        features: int | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        features = config.intermediate_size if features is None else features
        gate = Output("gate_proj", features, what="MLP features")
        up = replace(gate, name="up_proj")
        self.gate_up = ColumnLinear(config.hidden_size, (gate, up), bias, tp, fused="gate_up_proj")
        self.down_proj = RowLinear(features, config.hidden_size, bias, tp, what="MLP features")

    def takes(self, rows: int, dtype: torch.dtype) -> CodeFormat | None:
        return self.gate_up.takes(rows, dtype)

    def forward(self, x: Activations, backend: Backend) -> Tensor:
        out: Tensor = self.down_proj(self._gated(x, backend))
        return out

    def partial(self, x: Activations, backend: Backend) -> Tensor:
        """What this rank adds to the sum."""
        return self.down_proj.partial(self._gated(x, backend))

    def add_partial(self, x: Activations, out: Tensor, backend: Backend) -> None:
        """Add that to `out`."""
        self.down_proj.add_partial(self._gated(x, backend), out)

    def as_shared_experts(self) -> SharedExperts | None:
        """Its matrices, where they are stored as numbers and nothing is added to products."""
        gate_up, down = self.gate_up.matrix, self.down_proj.matrix
        if not (isinstance(gate_up, DenseMatrix) and isinstance(down, DenseMatrix)):
            return None
        if self.gate_up.bias is not None or self.down_proj.bias is not None:
            return None
        return SharedExperts(gate_up.weight, down.weight)

    def _gated(self, x: Activations, backend: Backend) -> Activations:
        return self.gate_up.gated(x, backend, self.activation, self.down_proj)


class PreNormLayer(Block):
    """A decoder layer whose attention and MLP each have a norm before them."""

    def __init__(self, config: ModelConfig, attention: Block, mlp: Block) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(
        self, stream: Tensor, delta: Tensor | None, rotation: Rotation, step: Step
    ) -> Tensor:
        """What to add to `stream` next, once `delta` has been added to it."""
        backend = step.backend
        delta = self.self_attn(
            self.input_layernorm(stream, delta, backend, self.self_attn), rotation, step
        )
        delta = self.mlp(self.post_attention_layernorm(stream, delta, backend, self.mlp), backend)
        return delta
