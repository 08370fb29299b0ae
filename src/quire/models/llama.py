"""The decoder that Llama made common, and on which every other family here builds.

    token ids ─ embedding ─┬─ norm ─ attention ─┬─ norm ─ MLP ─┬─ … ─ norm ─ head ─ logits
                           └────────────────────+──────────────+     the residual stream

The stream is one tensor that blocks add to. A block hands its result on, and the next norm adds
it to the stream and normalises the sum, which are then one pass over memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from quire.kernels.backend import Backend
from quire.kernels.plain import Rotation
from quire.layers.attention import Attention, Step
from quire.layers.embedding import Vocabulary
from quire.layers.linear import ColumnLinear, Linear, Output, RowLinear
from quire.layers.norm import HeadNorm, RMSNorm
from quire.layers.rope import RotaryEmbedding
from quire.layers.tp import SINGLE, TensorParallel
from quire.layers.weights import Block, Layer, Weight
from quire.models.causal_lm import CausalLM
from quire.models.checkpoints.json_fields import Raw, flag
from quire.models.config import ModelConfig


class DecoderForCausalLM(CausalLM):
    """A `Decoder` and its head; names of its parts are those of checkpoints."""

    def __init__(self, config: ModelConfig, tp: TensorParallel = SINGLE) -> None:
        super().__init__(config, tp)
        self.model = Decoder(config, tp)
        self.lm_head = (
            self.model.embed_tokens
            if config.tie_word_embeddings
            else Vocabulary(config.vocab_size, config.hidden_size, tp)
        )

    def forward(self, token_ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        hidden: Tensor = self.model(token_ids, positions, step)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head.logits(hidden)

    def reserve(self, max_len: int, device: torch.device) -> None:
        self.model.rope.reserve(max_len, device)

    def weights(self) -> Iterator[Weight]:
        for path, module in self.named_modules():
            if isinstance(module, Layer):
                yield from module.weights(path)
        if self.config.tie_word_embeddings:  # which some checkpoints store under either name
            for weight in self.lm_head.weights("lm_head"):
                yield replace(weight, same_as="model.embed_tokens.weight")

    def pack(self) -> None:
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()


class Decoder(Block):
    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = Vocabulary(config.vocab_size, config.hidden_size, tp)
        self.layers = nn.ModuleList(DecoderLayer(config, i, tp) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rope = RotaryEmbedding(config.head_dim, config.rope)

    def forward(self, token_ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        stream = self.embed_tokens.embed(token_ids)
        rotation = self.rope(positions, step.batch.max_context_len, stream.dtype)
        delta: Tensor | None = None
        for layer in self.layers:
            delta = layer(stream, delta, rotation, step)
        normed: Tensor = self.norm(stream, delta, step.backend)
        return normed


class DecoderLayer(Block):
    def __init__(self, config: ModelConfig, index: int, tp: TensorParallel) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, index, tp)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, tp)

    def forward(
        self, stream: Tensor, delta: Tensor | None, rotation: Rotation, step: Step
    ) -> Tensor:
        """What to add to `stream` next, once `delta` has been added to it."""
        backend = step.backend
        delta = self.self_attn(self.input_layernorm(stream, delta, backend), rotation, step)
        delta = self.mlp(self.post_attention_layernorm(stream, delta, backend), backend)
        return delta


class SelfAttention(Block):
    def __init__(self, config: ModelConfig, index: int, tp: TensorParallel) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q = Output("q_proj", config.num_heads, config.head_dim, "attention heads")
        k = Output("k_proj", config.num_kv_heads, config.head_dim, "KV heads", shared=True)
        v = replace(k, name="v_proj")
        self.qkv = ColumnLinear(config.hidden_size, (q, k, v), config.attention_bias, tp)
        heads, kv_heads, _ = (size // config.head_dim for size in self.qkv.sizes)
        self.qk_norm = (
            HeadNorm(heads, kv_heads, config.head_dim, config.rms_norm_eps)
            if config.qk_norm
            else None
        )
        self.attend = Attention(index, config.head_dim**-0.5, config.windows[index])
        self.o_proj = RowLinear(
            config.num_heads,
            config.hidden_size,
            config.output_bias,
            tp,
            width=config.head_dim,
            what="attention heads",
        )

    def forward(self, x: Tensor, rotation: Rotation, step: Step) -> Tensor:
        qkv = self.qkv(x).view(len(x), -1, self.head_dim)
        out: Tensor = self.o_proj(self.attend(qkv, self.qk_norm, rotation, step).flatten(1))
        return out


class MLP(Block):
    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        gate = Output("gate_proj", config.intermediate_size, what="MLP features")
        up = replace(gate, name="up_proj")
        self.gate_up = ColumnLinear(config.hidden_size, (gate, up), config.mlp_bias, tp)
        self.down_proj = RowLinear(
            config.intermediate_size, config.hidden_size, config.mlp_bias, tp, what="MLP features"
        )

    def forward(self, x: Tensor, backend: Backend) -> Tensor:
        out: Tensor = self.down_proj(self.gate_up.gated(x, backend))
        return out


class LlamaForCausalLM(DecoderForCausalLM):
    """Llama, and what is built like it, such as SmolLM2."""

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> ModelConfig:
        bias = flag(raw, "attention_bias")
        mlp_bias = flag(raw, "mlp_bias")
        return replace(config, attention_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
