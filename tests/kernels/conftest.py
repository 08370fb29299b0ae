"""Steps made up at random for the kernels, with every slot that may not be read set to NaN."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from quire.kernels.backend import Backend
from quire.kernels.batch import AttentionBatch
from quire.kernels.pages import LayerPages, pages_of
from quire.kernels.reference import ReferenceBackend
from quire.kernels.scoring import Scoring

interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="needs Triton, and no GPU (its kernels are tested there)",
)

compiled = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None,
    reason="needs Numba",
)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many threads torch has, and Numba's kernels with it."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Subject:
    """A backend under test, and where it runs."""

    backend: Backend
    device: str

    @property
    def is_interpreted(self) -> bool:
        return self.backend.name == "triton" and self.device == "cpu"


on_triton = [
    pytest.param(("triton", "cpu"), id="interpreter", marks=interpreted),
    pytest.param(("triton", "cuda"), id="cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(
    params=[
        pytest.param(("cpu", "cpu"), id="cpu"),
        pytest.param(("numba", "cpu"), id="numba", marks=compiled),
        *on_triton,
    ]
)
def subject(request: pytest.FixtureRequest) -> Subject:
    name, device = request.param
    if name == "triton":
        from quire.kernels.triton import TritonBackend

        return Subject(TritonBackend(), device)
    if name == "numba":
        from quire.kernels.numba import NumbaBackend

        return Subject(NumbaBackend(), device)
    from quire.kernels.cpu import CpuBackend

    return Subject(CpuBackend(), device)


@pytest.fixture(params=on_triton)
def triton_device(request: pytest.FixtureRequest) -> str:
    """Where a kernel of Triton's is tested that is no part of a backend's contract."""
    _, device = request.param
    return str(device)


@dataclass(frozen=True)
class Step:
    """New tokens with their q, k and v, and a pool that holds the KV of the tokens before them.

    The pool is `[blocks, layers, K and V, kv_heads, block_size, width]`, or, where V is not as wide
    as K, `[blocks, layers, numbers]`: those of K, then those of V.
    """

    batch: AttentionBatch
    cache: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    layer: int = 1
    scale: float = 0.2
    block_size: int = 8
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def pages(self) -> LayerPages:
        if self.cache.dim() == 6:
            return pages_of(self.cache)[self.layer]
        sizes = [x.shape[1] * self.block_size * x.shape[2] for x in (self.k, self.v)]
        k, v = self.cache[:, self.layer].split(sizes, dim=1)
        heads = self.k.shape[1], self.block_size
        return LayerPages(k.unflatten(1, (*heads, -1)), v.unflatten(1, (*heads, -1)))

    def on(self, device: str) -> Step:
        batch = replace(
            self.batch,
            slot_mapping=self.batch.slot_mapping.to(device),
            block_tables=self.batch.block_tables.to(device),
            query_starts=self.batch.query_starts.to(device),
            context_lens=self.batch.context_lens.to(device),
        )
        cache = self.cache.to(device, copy=True)
        return replace(
            self,
            batch=batch,
            cache=cache,
            q=self.q.to(device),
            k=self.k.to(device),
            v=self.v.to(device),
            sinks=None if self.sinks is None else self.sinks.to(device),
        )

    def run(self, backend: Backend, window: int | None = None) -> Tensor:
        """Write and attend, as a pass does; the result comes back to the CPU in float32."""
        return self.launch(backend, window).float().cpu()

    def launch(self, backend: Backend, window: int | None = None) -> Tensor:
        backend.begin(self.batch)
        backend.write_kv(self.pages, self.k, self.v, self.batch)
        return self.attend(backend, window)

    def attend(self, backend: Backend, window: int | None = None) -> Tensor:
        scoring = Scoring(self.scale, window, self.softcap, self.sinks)
        return backend.paged_attention(self.q, self.pages, self.batch, scoring)

    def expected(self, window: int | None = None) -> Tensor:
        """The reference's answer to the same numbers, in float32."""
        return replace(
            self.on("cpu"),
            cache=self.cache.cpu().float(),
            q=self.q.cpu().float(),
            k=self.k.cpu().float(),
            v=self.v.cpu().float(),
        ).run(ReferenceBackend(), window)


def make_step(
    lengths: Sequence[tuple[int, int]],
    *,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 16,
    v_dim: int | None = None,
    block_size: int = 8,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Step:
    """Sequences of `(query_len, context)`. Block 0 is NaN, like all that is unread."""
    order = random.Random(seed)
    torch.manual_seed(seed)
    counts = [-(-context // block_size) for _, context in lengths]
    num_blocks = 1 + sum(counts) + 2
    free = list(range(1, num_blocks))
    order.shuffle(free)
    tables = [[free.pop() for _ in range(count)] for count in counts]

    widths = head_dim, v_dim or head_dim
    k_pool, v_pool = (
        torch.full((num_blocks, 2, kv_heads, block_size, width), torch.nan) for width in widths
    )
    slots: list[int] = []
    for (query_len, context), table in zip(lengths, tables, strict=True):
        oldest = 0 if window is None else max(0, context - max(query_len, 1) - window + 1)
        for position in range(oldest, context):
            block, offset = table[position // block_size], position % block_size
            k_pool[block, :, :, offset] = torch.randn(2, kv_heads, widths[0])
            v_pool[block, :, :, offset] = torch.randn(2, kv_heads, widths[1])
            if position >= context - query_len:
                slots.append(block * block_size + offset)
        slots += [-1] * (query_len if context == 0 else 0)

    tokens = len(slots)
    if v_dim is None:
        cache = torch.stack((k_pool, v_pool), dim=2)
    else:
        cache = torch.cat((k_pool.flatten(2), v_pool.flatten(2)), dim=2)
    return Step(
        batch=make_batch(lengths, tables, slots),
        cache=cache.to(dtype),
        q=torch.randn(tokens, kv_heads * group, head_dim).to(dtype),
        k=torch.randn(tokens, kv_heads, widths[0]).to(dtype),
        v=torch.randn(tokens, kv_heads, widths[1]).to(dtype),
        block_size=block_size,
    )


def make_batch(
    lengths: Sequence[tuple[int, int]], tables: list[list[int]], slots: list[int]
) -> AttentionBatch:
    """Tables have two columns to spare, which hold 0 as all padding does."""
    width = max(map(len, tables), default=0) + 2
    query_lens = [query_len for query_len, _ in lengths]
    contexts = [context for _, context in lengths]
    starts = [sum(query_lens[:i]) for i in range(len(query_lens) + 1)]
    return AttentionBatch(
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        block_tables=torch.tensor(
            [table + [0] * (width - len(table)) for table in tables], dtype=torch.int32
        ),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        query_lens=query_lens,
        contexts=contexts,
    )


@pytest.fixture
def step() -> Callable[..., Step]:
    return make_step


@pytest.fixture
def batch_of() -> Callable[..., AttentionBatch]:
    return make_batch
