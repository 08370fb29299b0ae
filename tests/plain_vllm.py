"""As much of vLLM as the connector's halves see: requests, blocks, and plans of steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from quire.connectors.vllm.cache_views import layer_pool
from quire.connectors.vllm.lookup import LookupClient, LookupServer
from quire.connectors.vllm.naming import Prompts
from quire.connectors.vllm.scheduler_half import SchedulerHalf
from quire.connectors.vllm.worker_half import WorkerHalf
from quire.kv import Namespace, open_store

BLOCK = 4
NAMESPACE = Namespace("model", "", "", BLOCK, "layout", "rope")


@dataclass
class Request:
    request_id: str
    all_token_ids: list[int]
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list = field(default_factory=list)
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class Engine:
    """Both halves with a real store, and vLLM's memory between them."""

    def __init__(self, folder: Path, num_blocks: int = 32, **tiers: Any) -> None:
        sizes = (num_blocks, 2, BLOCK, 2 * 8)  # heads, tokens, K and V side by side
        self.caches = {f"layer {at}": torch.randn(sizes).half() for at in range(3)}
        pool = layer_pool(self.caches, dict.fromkeys(self.caches, 0), num_blocks)
        tiers = {"host_cache_bytes": "1MiB"} | tiers
        self.worker = WorkerHalf(open_store(pool, NAMESPACE, **tiers))
        self._server = LookupServer(folder / "socket", self.worker.answer)
        self.scheduler = SchedulerHalf([LookupClient(folder / "socket")], BLOCK, Prompts().of)
        self.free = list(range(num_blocks))
        self.received: set[str] = set()
        self.sent: set[str] = set()
        self.failed: set[int] = set()

    def close(self) -> None:
        self._server.close()
        self.worker.close()

    def values(self, blocks: list[int]) -> torch.Tensor:
        return torch.stack([cache[blocks] for cache in self.caches.values()])

    def blocks_for(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // BLOCK)
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def find(self, request: Request, computed: int = 0) -> int:
        """Ask until all tiers have answered."""
        while (found := self.scheduler.num_found_tokens(request, computed)) is None:
            pass
        return found

    def step(
        self,
        new: tuple[tuple[Request, list[int], int], ...] = (),
        running: tuple[tuple[Request, int, int], ...] = (),
        preempted: tuple[str, ...] = (),
        resumed: tuple[tuple[Request, list[int], int], ...] = (),
    ) -> None:
        """`new` and `resumed`: request, its blocks, tokens computed before; all others follow.
        `running`: request, tokens computed before, and in this step."""
        scheduled = {r.request_id: r.num_tokens - done for r, _, done in (*new, *resumed)}
        scheduled |= {r.request_id: count for r, _, count in running}
        cached = [(r.request_id, done, None) for r, done, _ in running]
        cached += [(r.request_id, done, (blocks,)) for r, blocks, done in resumed]
        plan = SimpleNamespace(
            preempted_req_ids=set(preempted),
            num_scheduled_tokens=scheduled,
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=request.request_id, block_ids=(blocks,), num_computed_tokens=done
                )
                for request, blocks, done in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[name for name, _, _ in cached],
                resumed_req_ids={request.request_id for request, _, _ in resumed},
                new_block_ids=[blocks for _, _, blocks in cached],
                num_computed_tokens=[done for _, done, _ in cached],
            ),
        )
        orders = self.scheduler.plan_step(plan)
        self.worker.before_step(orders)
        self.worker.begin_loads(orders)
        self.worker.begin_saves(orders)
        sent, received = self.worker.results()
        self.sent |= sent
        self.received |= received
        self.failed |= self.worker.take_failed_blocks()
        self.scheduler.received(sorted(received))

    def compute(self, request: Request) -> list[int]:
        """Run a prompt to its end, as if it were computed, and wait until its blocks are saved."""
        blocks = self.blocks_for(request.num_tokens)
        assert self.find(request) == 0
        self.scheduler.allocated(request, blocks, 0)
        self.step(new=((request, blocks, 0),))
        if self.scheduler.ended(request):
            self.wait_for(self.sent, request)
        return blocks

    def wait_for(self, told: set[str], request: Request) -> None:
        """Step until a request has been reported."""
        self.step()
        while request.request_id not in (self.sent if told is self.sent else self.received):
            self.step()
