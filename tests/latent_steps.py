"""Steps over latents, made up at random, with every slot that may not be read set to NaN."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quire.kernels.backend import Backend
from quire.kernels.batch import AttentionBatch
from quire.kernels.pages import LatentPages
from quire.kernels.plain import HeadScale, Rotation
from quire.kernels.reference import ReferenceBackend

LAYERS = 2


@dataclass(frozen=True)
class LatentStep:
    """New tokens, and a pool `[blocks, layers, block_size, rank + rope]` with those before them.
    Slots that may not be read hold NaN."""

    batch: AttentionBatch
    pool: Tensor
    rank: int
    q: Tensor  # [tokens, heads, rank + rope]
    latents: Tensor  # [tokens, rank + rope]
    scale: float = 0.1

    @property
    def pages(self) -> LatentPages:
        return LatentPages.of(self.pool[:, 1], self.rank)

    def on(self, device: str, dtype: torch.dtype) -> LatentStep:
        names = ("slot_mapping", "block_tables", "query_starts", "context_lens")
        batch = replace(
            self.batch, **{name: getattr(self.batch, name).to(device) for name in names}
        )
        q, latents = (x.to(device, dtype) for x in (self.q, self.latents))
        pool = self.pool.to(device, dtype, copy=True)
        return replace(self, batch=batch, pool=pool, q=q, latents=latents)

    def write(self, backend: Backend, rotation: Rotation, weight: Tensor) -> Tensor:
        """Where the queries' rotated features are."""
        backend.begin(self.batch)
        out = torch.empty_like(self.q)
        scale = HeadScale(weight, 1e-6)
        rope = slice(self.rank, None)
        backend.rotate_and_write_latents(
            self.q[..., rope], self.latents, scale, rotation, self.pages, self.batch, out[..., rope]
        )
        return out[..., rope]

    def attend(self, backend: Backend) -> Tensor:
        """What was written before, and the new tokens' latents as they are."""
        backend.begin(self.batch)
        for latent, slot in zip(self.latents, self.batch.slot_mapping.tolist(), strict=True):
            if slot >= 0:
                size = self.pages.block_size
                self.pages.values[slot // size, slot % size] = latent
        return backend.latent_attention(self.q, self.pages, self.batch, self.scale)

    def expected(self) -> Tensor:
        return self.on("cpu", torch.float32).attend(ReferenceBackend())


def make_step(batch_of, lengths, heads=4, rank=16, rope=8, block_size=4, seed=0) -> LatentStep:
    torch.manual_seed(seed)
    counts = [-(-context // block_size) for _, context in lengths]
    blocks = random.Random(seed).sample(range(1, sum(counts) + 3), sum(counts))
    tables = [[blocks.pop() for _ in range(count)] for count in counts]
    pool = torch.full((sum(counts) + 3, LAYERS, block_size, rank + rope), torch.nan)
    slots = []
    for (new, context), table in zip(lengths, tables, strict=True):
        places = [table[i // block_size] * block_size + i % block_size for i in range(context)]
        for slot in places[: context - new]:
            pool[slot // block_size, :, slot % block_size] = torch.randn(LAYERS, rank + rope)
        slots += places[context - new :] if context else [-1] * new
    width = rank + rope
    q, latents = torch.randn(len(slots), heads, width), torch.randn(len(slots), width)
    return LatentStep(batch_of(lengths, tables, slots), pool, rank, q, latents)
