"""The MTP layer of DeepSeek V3 checkpoints, which guesses the token after the next one.

    token i + 1 ── embedding ── enorm ─┐
                                       ├─ eh_proj ─ a decoder layer ─ norm ─┬─ head ─ token i + 2
    hidden state i of the model ─ hnorm┘                                    └─ hidden state i + 1

Hidden states are those that a head multiplies, after the last norm. Checkpoints have it behind the
model's last layer, with a copy of the model's embedding and head. For the token after that one, it
goes on from its own guess and its own hidden state.

Its KV of token i depends on token i + 1, which the name of a block does not cover if i is the last
of it. Where another text goes on otherwise, one vector of a prefix that is found is not quite the
right one: a guess may be worse then, and an answer never is.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quire.kernels.plain import Rotation
from quire.layers.attention import Step
from quire.layers.embedding import Vocabulary
from quire.layers.linear import Linear
from quire.layers.matrix import DenseMatrix
from quire.layers.norm import RMSNorm
from quire.layers.rope import RotaryEmbedding
from quire.layers.tp import SINGLE
from quire.layers.weights import Block, Layer, Weight
from quire.models.causal_lm import CheckpointModel
from quire.models.deepseek_v2 import DeepseekConfig, DeepseekMLP, deepseek_attention
from quire.models.deepseek_v3 import layer_of
from quire.models.sparse import SparseLayer


class DeepseekMTP(CheckpointModel):
    """Whole on rank 0, which drafts alone; names of its parts are those of checkpoints."""

    config: DeepseekConfig

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__(config, SINGLE)
        self.rope = RotaryEmbedding(config.latent.rope, config.rope)
        self.model = nn.ModuleDict(
            {"layers": nn.ModuleDict({str(config.num_layers): MTPLayer(config)})}
        )

    @property
    def layer(self) -> MTPLayer:
        (layer,) = self.model["layers"].children()
        assert isinstance(layer, MTPLayer)
        return layer

    def forward(self, next_ids: Tensor, positions: Tensor, hidden: Tensor, step: Step) -> Tensor:
        """Of tokens with these hidden states `[tokens, hidden]`, and with these tokens behind them:
        the hidden states of the tokens behind them."""
        rotation = self.rope(positions, step.max_context_len, hidden.dtype)
        found: Tensor = self.layer.next_hidden(next_ids, hidden, rotation, step)
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        return self.layer.shared_head.head.logits(hidden)

    def text_tensor(self, name: str) -> str | None:
        return name if layer_of(name) == self.config.num_layers else None

    def left_out(self, count: int) -> str | None:
        return None  # they are the model's

    def weights(self) -> Iterator[Weight]:
        for path, module in self.named_modules():
            if isinstance(module, Layer):
                yield from module.weights(path)


class MTPLayer(SparseLayer):
    def __init__(self, config: DeepseekConfig) -> None:
        assert config.experts is not None
        attention = deepseek_attention(config, config.num_layers, SINGLE)
        mlp = DeepseekMLP(config, config.experts, SINGLE, corrected=True)
        super().__init__(config, attention, mlp)
        self.embed_tokens = Vocabulary(config.vocab_size, config.hidden_size, SINGLE)
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = JoiningProjection(config.hidden_size)
        self.shared_head = SharedHead(config)

    def next_hidden(
        self, next_ids: Tensor, hidden: Tensor, rotation: Rotation, step: Step
    ) -> Tensor:
        backend = step.backend
        embedded = self.enorm(self.embed_tokens.embed(next_ids), None, backend)
        stream = self.eh_proj(embedded, self.hnorm(hidden, None, backend))
        delta = self(stream, None, rotation, step)
        found: Tensor = self.shared_head.norm(stream, delta, backend)
        return found


class JoiningProjection(Linear):
    """What the decoder layer begins with, from a token and a hidden state. DeepSeek's checkpoints
    have it in 16 bits, whatever their other matrices are in; others may have quantised it."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.shape = (hidden_size, 2 * hidden_size)
        self.matrix = DenseMatrix(*self.shape)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return self.multiply(torch.cat((embedded, hidden), dim=1), None)

    def weights(self, path: str) -> Iterator[Weight]:
        yield from self.matrix.weights(Weight(path, self.shape), slice(None))


class SharedHead(Block):
    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Vocabulary(config.vocab_size, config.hidden_size, SINGLE)
