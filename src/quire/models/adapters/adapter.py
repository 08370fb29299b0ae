"""An adapter in host memory, as the layers of a model take it.

Adapters name the checkpoint's matrices, and layers hold several of them merged. So an adapter has,
for each layer, what is added to each of its outputs in order:

    model.layers.0.self_attn.qkv         q, k, v      a `Linear`; an output without one has None
    model.layers.0.mlp.down_proj         down
    model.layers.0.mlp.experts.gate_up   gate, up     one of the two matrices of `Experts`
    model.layers.0.mlp.experts.down      down
    model.layers.0.mlp.gate              a `Router`, or another small layer with a `weight`
    lm_head                              the head, also where it shares the embedding's matrix

The embedding reads columns of A by token: `LowRank.a` is `[rank, tokens of this rank]` there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from quire.layers.low_rank import LowRank

Outputs: TypeAlias = tuple[LowRank | None, ...]

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


@dataclass(frozen=True)
class Adapter:
    """One rank's part of an adapter, in the type that the model computes in."""

    fingerprint: str  # of its contents: neither its name nor its path; the same on all ranks
    rank: int  # the largest of its matrices
    layers: Mapping[str, Outputs] = field(repr=False)  # by the path of the layer
    embedding: LowRank | None = field(default=None, repr=False)
    # Whole matrices in place of the model's own (`modules_to_save`): of EMBEDDING, of HEAD.
    # This rank's rows, as `Vocabulary` holds them, without padding.
    replaced: Mapping[str, Tensor] = field(default_factory=dict, repr=False)

    def tensors(self) -> Iterator[Tensor]:
        """All of them; one that several outputs share comes several times."""
        for outputs in self.layers.values():
            for output in outputs:
                if output is not None:
                    yield from output.tensors()
        if self.embedding is not None:
            yield from self.embedding.tensors()
        yield from self.replaced.values()

    @property
    def num_bytes(self) -> int:
        """What it takes of host memory."""
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in self.tensors()}.values())
