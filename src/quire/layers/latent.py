"""Latent attention (MLA): a token's K and V, of all heads, are products of one small vector.

    x ─┬─ q_proj, or q_a ─ norm ─ q_b ───────────── q of each head: nope | rope, turned
       └─ kv_a ─┬─ norm ─ latent ──────────┐
                └─ rope, turned ───────────┴─────── what is cached, one vector for all heads

    K of a head: kv_b · latent | rope               V of a head: kv_b · latent

Few new tokens attend in the space of latents: a head's part of `kv_b` is multiplied with q instead
of K, and with the sum instead of V (it is "absorbed"), so that nothing but latents is read. For
many new tokens of a sequence that is more work than computing its K and V, which are then forgotten
("expanded"). Both are the same numbers in another order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.backend import Backend
from quire.kernels.batch import AttentionBatch
from quire.kernels.codes import Activations, CodeFormat
from quire.kernels.pages import LatentPages
from quire.kernels.plain import HeadScale, Rotation
from quire.kv_groups import KVStream
from quire.layers.attention import Step
from quire.layers.batch_parts import BatchPart
from quire.layers.kv_layer import KVLayer
from quire.layers.linear import ColumnLinear, Output, RowLinear
from quire.layers.norm import RMSNorm
from quire.layers.rope import RopeConfig, rotation_order
from quire.layers.tp import TensorParallel
from quire.layers.up_projection import UpProjection

# New tokens of a sequence up to which its attention is absorbed. Expanding is less work from 170 on
# behind a long prefix, from 340 without one; but steps in graphs, of up to 512 tokens, are recorded
# before their lengths are known.
MOST_ABSORBED = 512
ROOM_BYTES = 1 << 28  # for K and V of a prompt; where all heads need more, they take turns
EPS = 1e-6  # of the norms of both small vectors, whatever that of the others is


@dataclass(frozen=True)
class LatentShape:
    """Features of the parts of a head, and of the vectors they are computed from."""

    rank: int  # of the latent
    nope: int  # features of a head of q and k that do not turn
    rope: int  # those that do; of k they are the same for all heads
    values: int  # of a head of v
    q_rank: int | None = None  # of the vector that q is computed from; None: from x itself

    @property
    def width(self) -> int:
        """The width of what is cached for a token."""
        return self.rank + self.rope


class LatentAttention(KVLayer):
    """Names of its parts are those of DeepSeek's checkpoints."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        shape: LatentShape,
        rope: RopeConfig,
        neighbours: bool,
        scale: float,
        layer: int,
        tp: TensorParallel,
    ) -> None:
        """`neighbours`: the checkpoint turns a feature with the next one (`layers/rope.py`)."""
        super().__init__()
        self.layer, self.window = layer, None
        self.shape, self.scale = shape, scale
        heads = "attention heads"
        turned = rotation_order(shape.rope, rope, neighbours)
        q = Output(
            "q_proj", num_heads, shape.nope + shape.rope, heads, order=behind(shape.nope, turned)
        )
        kv_order = behind(shape.rank, turned)
        kv = Output("kv_a_proj_with_mqa", 1, shape.width, shared=True, order=kv_order)
        if shape.q_rank is None:
            self.q_a_layernorm = None
            self.down = ColumnLinear(hidden_size, (q, kv), False, tp)
        else:
            q_a = Output("q_a_proj", 1, shape.q_rank, shared=True)
            self.down = ColumnLinear(hidden_size, (q_a, kv), False, tp)
            self.q_a_layernorm = RMSNorm(shape.q_rank, EPS)
            q_b = Output("q_b_proj", q.units, q.width, heads, order=q.order)
            self.q_b = ColumnLinear(shape.q_rank, (q_b,), False, tp)
        self.kv_a_layernorm = RMSNorm(shape.rank, EPS)
        self.up = UpProjection(shape.rank, num_heads, shape.nope, shape.values, tp)
        self.o_proj = RowLinear(num_heads, hidden_size, False, tp, width=shape.values, what=heads)

    def takes(self, rows: int, dtype: torch.dtype) -> CodeFormat | None:
        return self.down.takes(rows, dtype)

    def streams(self, tp: TensorParallel) -> tuple[KVStream, ...]:
        """The same on each rank, since every head reads all of it."""
        return (KVStream(1, self.shape.width, self.shape.rank),)

    def heads(self, x: Activations, rotation: Rotation, step: Step) -> Tensor:
        pages = step.pages[self.layer]
        assert isinstance(pages, LatentPages)
        q, kv = self._project(x, step.backend)
        parts = step.parts(pages.group, MOST_ABSORBED)
        if parts.many is None:
            out = self._absorbed(q, kv, rotation, pages, step.batches[pages.group], step.backend)
        else:
            out = self._apart(q, kv, rotation, pages, step)
        return out.flatten(1)

    def _project(self, x: Activations, backend: Backend) -> tuple[Tensor, Tensor]:
        """q `[tokens, heads, nope + rope]` and kv `[tokens, rank + rope]`, neither turned yet."""
        q, kv = self.down(x).split(self.down.sizes, dim=1)
        if self.q_a_layernorm is not None:
            q = self.q_b(self.q_a_layernorm(q.contiguous(), None, backend, self.q_b))
        return q.unflatten(1, (-1, self.shape.nope + self.shape.rope)), kv

    def _write(
        self,
        q_rope: Tensor,
        kv: Tensor,
        rotation: Rotation,
        pages: LatentPages,
        batch: AttentionBatch,
        backend: Backend,
        out: Tensor,
    ) -> None:
        norm = HeadScale(self.kv_a_layernorm.weight, EPS)
        backend.rotate_and_write_latents(q_rope, kv, norm, rotation, pages, batch, out)

    def _absorbed(
        self,
        q: Tensor,
        kv: Tensor,
        rotation: Rotation,
        pages: LatentPages,
        batch: AttentionBatch,
        backend: Backend,
    ) -> Tensor:
        shape = self.shape
        absorbed = q.new_empty((*q.shape[:2], shape.width))
        q_nope, q_rope = q.split((shape.nope, shape.rope), dim=2)
        self._write(q_rope, kv, rotation, pages, batch, backend, absorbed[..., shape.rank :])
        self.up.absorb(q_nope, absorbed[..., : shape.rank])
        sums = backend.latent_attention(absorbed, pages, batch, self.scale)
        return self.up.values_of(sums)

    def _apart(
        self, q: Tensor, kv: Tensor, rotation: Rotation, pages: LatentPages, step: Step
    ) -> Tensor:
        """Some sequences absorbed, some expanded; what one reads, another may have written."""
        shape, backend = self.shape, step.backend
        q_rope = q[..., shape.nope :]
        self._write(q_rope, kv, rotation, pages, step.batches[pages.group], backend, q_rope)
        parts = step.parts(pages.group, MOST_ABSORBED)
        out = q.new_zeros((*q.shape[:2], shape.values))
        if parts.few is not None:
            own = parts.few.of(q)
            absorbed = torch.cat(
                (own.new_empty((*own.shape[:2], shape.rank)), own[..., shape.nope :]), 2
            )
            self.up.absorb(own[..., : shape.nope], absorbed[..., : shape.rank], parts.few)
            sums = backend.latent_attention(absorbed, pages, parts.few.batch, self.scale)
            out[parts.few.rows] = self.up.values_of(sums, parts.few)
        assert parts.many is not None
        found = self._expanded(parts.many.of(q), pages, parts.many, backend)
        if parts.many.rows is None:
            return found
        out[parts.many.rows] = found
        return out

    def _expanded(self, q: Tensor, pages: LatentPages, part: BatchPart, backend: Backend) -> Tensor:
        latents = pages.read(*part.slots(pages.block_size), q.dtype)
        latents, k_rope = latents.split((pages.rank, pages.rope), dim=1)
        heads = q.shape[1]
        one_head = len(latents) * self.up.width * q.element_size()
        together = max(1, min(heads, ROOM_BYTES // max(1, one_head)))
        found = [
            backend.expanded_attention(
                q[:, first : first + together],
                self.up.expand(latents, range(first, min(first + together, heads)), part),
                k_rope,
                part.batch,
                self.scale,
            )
            for first in range(0, heads, together)
        ]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def behind(features: int, order: tuple[int, ...]) -> tuple[int, ...]:
    """The order of a row whose first `features` stay, and the others are put in `order`."""
    return (*range(features), *(features + i for i in order)) if order else ()
