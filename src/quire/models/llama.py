"""The decoder that Llama made common, and on which every other family here builds.

    token ids ─ embedding ─┬─ norm ─ attention ─┬─ norm ─ MLP ─┬─ … ─ norm ─ head ─ logits
                           └────────────────────+──────────────+     the residual stream

The stream is one tensor that blocks add to. A block hands its result on, and the next norm adds
it to the stream and normalises the sum, which are then one pass over memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
from quire.models.checkpoints.json_fields import Raw, flag
from quire.models.checkpoints.lazy_tensor import LazyTensor
from quire.models.checkpoints.weights import assign, copy_weights
from quire.models.config import ModelConfig


class CausalLM(Block):
    """A language model over a paged KV cache; names of its parts are those of checkpoints."""

    def __init__(self, config: ModelConfig, tp: TensorParallel = SINGLE) -> None:
        super().__init__()
        self.config = config
        self.tp = tp
        self.model = Decoder(config, tp)
        self.lm_head = (
            self.model.embed_tokens
            if config.tie_word_embeddings
            else Vocabulary(config.vocab_size, config.hidden_size, tp)
        )

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> ModelConfig:
        """Add what this family's config.json says, or leaves unsaid, beyond the common fields."""
        return config

    def forward(self, token_ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        """`[tokens]` ids and positions to `[tokens, hidden]`, after the last norm."""
        hidden: Tensor = self.model(token_ids, positions, step)
        return hidden

    def reserve(self, max_len: int, device: torch.device) -> None:
        """Have tables for positions below `max_len`, so that no step has to make them longer."""
        self.model.rope.reserve(max_len, device)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` to `[rows, vocab]`, on rank 0."""
        return self.lm_head.logits(hidden)

    def weights(self) -> Iterator[Weight]:
        """Every tensor that a checkpoint of this model has."""
        for path, module in self.named_modules():
            if isinstance(module, Layer):
                yield from module.weights(path)
        if self.config.tie_word_embeddings:  # which some checkpoints store under either name
            for weight in self.lm_head.weights("lm_head"):
                yield replace(weight, same_as="model.embed_tokens.weight")

    def check_weights(self, tensors: Iterable[tuple[str, LazyTensor]]) -> None:
        """Raise `ModelError` unless these are the tensors of this model; none is read."""
        assign(self, tensors)

    def load_weights(
        self, tensors: Iterable[tuple[str, LazyTensor]], progress: bool = False
    ) -> None:
        """Fill the model from tensors of these names; what does not fit is a `ModelError`."""
        copy_weights(self, tensors, progress)

    def pack(self) -> None:
        """Keep a second copy of the matrices, in the order a CPU's kernels read them."""
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
        rotation = self.rope(positions, step.max_context_len, stream.dtype)
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
        out: Tensor = self.o_proj(self.attend(self.qkv(x), self.qk_norm, rotation, step).flatten(1))
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


class LlamaForCausalLM(CausalLM):
    """Llama, and what is built like it, such as SmolLM2."""

    @classmethod
    def adapt(cls, config: ModelConfig, raw: Raw) -> ModelConfig:
        bias = flag(raw, "attention_bias")
        mlp_bias = flag(raw, "mlp_bias")
        return replace(config, attention_bias=bias, output_bias=bias, mlp_bias=mlp_bias)
