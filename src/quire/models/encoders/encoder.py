"""The encoder that BERT, RoBERTa and DistilBERT share; they differ in names and in positions.

token ids ─ words + positions (+ types) ─ norm ─┬─ attention ─ + ─ norm ─┬─ MLP ─ + ─ norm ─ …
                                                └─────────────╯          └───────╯
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from quire.kernels.packed import PackedTexts, packed_attention
from quire.layers.embedding import Vocabulary
from quire.layers.layer_norm import LayerNorm
from quire.layers.linear import ColumnLinear, Output, RowLinear
from quire.layers.tp import SINGLE
from quire.layers.weights import Block, Layer, Weight
from quire.models.encoders.activations import ACTIVATIONS
from quire.models.encoders.config import EncoderConfig


@dataclass(frozen=True)
class EncoderNames:
    """What checkpoints of one family call the parts of an encoder."""

    layers: str
    qkv: tuple[str, str, str]
    attention_output: str
    attention_norm: str
    up: str
    down: str
    output_norm: str


class Encoder(Block):
    def __init__(self, config: EncoderConfig, names: EncoderNames) -> None:
        super().__init__()
        self.names = names
        self.first_position = config.first_position
        size = config.hidden_size
        self.words = Vocabulary(config.vocab_size, size, SINGLE)
        self.positions = Vocabulary(config.num_positions, size, SINGLE)
        self.types = Vocabulary(config.num_types, size, SINGLE) if config.num_types else None
        self.norm = LayerNorm(size, config.layer_norm_eps, "LayerNorm")
        self.layers = nn.ModuleList(EncoderLayer(config, names) for _ in range(config.num_layers))

    def forward(
        self, token_ids: Tensor, positions: Tensor, types: Tensor | None, texts: PackedTexts
    ) -> Tensor:
        """`[tokens]` to `[tokens, hidden]`; without `types` every token is of the first."""
        x = self.words.embed(token_ids)
        x += self.positions.embed(positions + self.first_position)
        if self.types is not None:
            x += self.types.embed(positions.new_zeros(1) if types is None else types)
        x = self.norm.forward(x)
        for layer in self.layers:
            x = layer(x, texts)
        return x

    def weights(self) -> Iterator[Weight]:
        yield from self.words.weights("embeddings.word_embeddings")
        yield from self.positions.weights("embeddings.position_embeddings")
        if self.types is not None:
            yield from self.types.weights("embeddings.token_type_embeddings")
        yield from self.norm.weights("embeddings.norm")
        for i, layer in enumerate(self.layers):
            for name, part in layer.named_children():
                if isinstance(part, Layer):
                    yield from part.weights(f"{self.names.layers}.{i}.{name}")


class EncoderLayer(Block):
    def __init__(self, config: EncoderConfig, names: EncoderNames) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.activation = ACTIVATIONS[config.activation]
        hidden, eps = config.hidden_size, config.layer_norm_eps
        width = hidden // config.num_heads
        outputs = [Output(name, config.num_heads, width) for name in names.qkv]
        self.qkv = ColumnLinear(hidden, outputs, True, SINGLE)
        self.attention_output = RowLinear(hidden, hidden, True, SINGLE, name=names.attention_output)
        self.attention_norm = LayerNorm(hidden, eps, names.attention_norm)
        self.up = ColumnLinear(hidden, [Output(names.up, config.intermediate_size)], True, SINGLE)
        self.down = RowLinear(config.intermediate_size, hidden, True, SINGLE, name=names.down)
        self.output_norm = LayerNorm(hidden, eps, names.output_norm)

    def forward(self, x: Tensor, texts: PackedTexts) -> Tensor:
        attended = packed_attention(self.qkv(x), texts, self.heads)
        x = self.attention_norm(self.attention_output(attended).add_(x))
        out: Tensor = self.output_norm(self.down(self.activation(self.up(x))).add_(x))
        return out
