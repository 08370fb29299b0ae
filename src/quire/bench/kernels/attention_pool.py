"""A pool of random KV, and the backend's attention over blocks taken from anywhere in it."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from quire.bench.kernels.attention_case import Case, Heads
from quire.bench.report.machine_rates import GPU_ROOM
from quire.bench.report.stopwatch import Call, replayable, seconds_per_call
from quire.errors import ConfigError
from quire.kernels.backend import backend_for
from quire.kernels.batch import AttentionBatch
from quire.kernels.pages import LatentPages
from quire.kernels.scoring import Scoring
from quire.kv.layout import KVLayout
from quire.kv.pool import PagedKVCache
from quire.kv_groups import KVGroup, KVStream
from quire.runner.inputs import step_inputs
from quire.runner.plan import GroupTables, StepPlan

MOST_PREFILL_LAYERS = 4  # a prompt's attention is long enough, and no cache holds what it reads
BLOCKS_AT_ONCE = 1024


def free_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[0])


class Pool:
    """Block-major, as the engine's; `size` is in bytes."""

    def __init__(
        self,
        heads: Heads,
        layers: int,
        block_size: int,
        size: int,
        device: torch.device,
        dtype: torch.dtype,
        window: int | None = None,
        sinks: bool = False,
    ) -> None:
        self.heads, self.device, self.dtype = heads, device, dtype
        learned = torch.randn(heads.query, device=device) if sinks else None
        self.scoring = Scoring(heads.dim**-0.5, window, sinks=learned)
        streams = (KVStream(heads.kv, heads.dim, heads.rank),) * (1 if heads.rank else 2)
        self.layout = KVLayout((KVGroup(tuple(range(layers)), streams),), block_size, dtype)
        self.backend = backend_for(device)
        self.num_blocks = size // self.layout.block_bytes
        if device.type == "cuda" and size + GPU_ROOM > free_bytes(device):
            raise ConfigError(f"A pool of {size / 1e9:.1f} GB does not fit; give a smaller --pool.")

    @cached_property
    def cache(self) -> PagedKVCache:
        """Made when it is first used: cases that do not fit are refused before."""
        cache = PagedKVCache(self.layout, self.num_blocks, self.device, self.backend)
        for part in cache.tensor.split(BLOCKS_AT_ONCE):
            part.normal_()  # a GPU that multiplies zeros draws less power and runs faster
        return cache

    @property
    def says(self) -> str:
        heads, layout, scoring = self.heads, self.layout, self.scoring
        gigabytes = self.num_blocks * layout.block_bytes / 1e9
        window = "" if scoring.window is None else f"a window of {scoring.window:,}, "
        sinks = "" if scoring.sinks is None else "sinks, "
        return (
            f"{heads.kv} KV heads, {heads.query // heads.kv} query heads each, head {heads.dim}, "
            f"{window}{sinks}"
            f"blocks of {layout.block_size} scattered over {gigabytes:.2g} GB, backend "
            f"{self.backend.name}"
        )

    def check_room(self, case: Case) -> None:
        needed = sum(map(self.layout.blocks_for, case.contexts))
        if needed > self.num_blocks:
            raise ConfigError(
                f"The case {case} needs {needed:,} blocks and the pool has "
                f"{self.num_blocks:,}; raise --pool, or lower --layers or the case."
            )

    def seconds(self, case: Case) -> float:
        """The time of one call: the median round over the layers, divided by them."""
        call = self.prepared(case)
        return seconds_per_call(call, self.device).median / self.layers_of(case)

    def prepared(self, case: Case) -> Call:
        """A round: attention of each layer in turn."""
        heads, batch = self.heads, self._batch(case)
        q = torch.randn(case.sequences * case.new, heads.query, heads.dim, device=self.device)
        q = q.to(self.dtype)
        scoring, layers = self.scoring, self.layers_of(case)

        @torch.inference_mode()
        def call() -> None:
            self.backend.begin(batch)
            for pages in self.cache.layers[:layers]:
                if isinstance(pages, LatentPages):
                    self.backend.latent_attention(q, pages, batch, scoring.scale)
                else:
                    self.backend.paged_attention(q, pages, batch, scoring)

        return replayable(call, self.device) if case.kind == "decode" else call

    def layers_of(self, case: Case) -> int:
        """How many a round goes over."""
        layers = len(self.layout.group_of)
        return layers if case.kind == "decode" else min(layers, MOST_PREFILL_LAYERS)

    def _batch(self, case: Case) -> AttentionBatch:
        """As the runner makes it for such a step, with blocks that lie anywhere in the pool."""
        contexts = np.array(case.contexts, dtype=np.int32)
        blocks = -(-contexts // self.layout.block_size)
        order = np.random.default_rng(0).permutation(self.num_blocks)
        tables = np.zeros((case.sequences, blocks.max()), dtype=np.int32)
        tables[np.arange(blocks.max()) < blocks[:, None]] = order[: blocks.sum()]
        plan = StepPlan(
            token_ids=np.zeros(case.sequences * case.new, dtype=np.int32),
            starts=contexts - case.new,
            counts=np.full(case.sequences, case.new, dtype=np.int32),
            tables=(GroupTables(tables),),
            samples=[],
            sample_rows=np.zeros(0, dtype=np.int32),
        )
        return step_inputs(plan, self.layout.block_size, self.device).batches[0]
