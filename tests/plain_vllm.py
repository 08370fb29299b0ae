"""As much of vLLM as the connector's halves see: requests, blocks, and plans of steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from patience import eventually

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

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_tokens


class Engine:
    """Both halves with a real store, and vLLM's memory between them."""

    def __init__(
        self, folder: Path, num_blocks: int = 64, windows: tuple = (None,), **tiers: Any
    ) -> None:
        """Of three layers the last are each a KV group with a window, if there are windows."""
        sizes = (num_blocks, 2, BLOCK, 2 * 8)  # heads, tokens, K and V side by side
        self.caches = {f"layer {at}": torch.randn(sizes).half() for at in range(3)}
        names = list(self.caches)
        rest = len(names) + 1 - len(windows)
        self.groups = [names[:rest], *([name] for name in names[rest:])]
        pool = layer_pool(self.caches, dict.fromkeys(self.caches, 0), num_blocks, self.groups)
        tiers = {"host_cache_bytes": "1MiB", "windows": windows} | tiers
        self.worker = WorkerHalf(open_store(pool, NAMESPACE, **tiers))
        self._server = LookupServer(folder / "socket", self.worker.answer)
        self.scheduler = SchedulerHalf(
            [LookupClient(folder / "socket")], BLOCK, Prompts().of, windows
        )
        self.free = list(range(1, num_blocks))  # the first is vLLM's own
        self.received: set[str] = set()
        self.sent: set[str] = set()
        self.failed: set[int] = set()

    def close(self) -> None:
        self._server.close()
        self.worker.close()

    def values(self, blocks: list[int], group: int = 0) -> torch.Tensor:
        return torch.stack([self.caches[name][blocks] for name in self.groups[group]])

    def blocks_for(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // BLOCK)
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def tables_for(self, num_tokens: int) -> list[list[int]]:
        return [self.blocks_for(num_tokens) for _ in self.groups]

    def find(self, request: Request, computed: int = 0) -> int:
        """Ask until all tiers have answered."""
        found: list[int | None] = []

        def is_known() -> bool:
            found.append(self.scheduler.num_found_tokens(request, computed))
            return found[-1] is not None

        eventually(is_known)
        return found[-1] or 0

    def step(
        self,
        new: tuple[tuple[Request, list[list[int]], int], ...] = (),
        running: tuple[tuple[Request, int, int], ...] = (),
        preempted: tuple[str, ...] = (),
        resumed: tuple[tuple[Request, list[list[int]], int], ...] = (),
    ) -> None:
        """`new` and `resumed`: request, its tables, tokens computed before; all others follow.
        `running`: request, tokens computed before, and in this step."""
        scheduled = {r.request_id: r.num_tokens - done for r, _, done in (*new, *resumed)}
        scheduled |= {r.request_id: count for r, _, count in running}
        cached = [(r.request_id, done, None) for r, done, _ in running]
        cached += [(r.request_id, done, tables) for r, tables, done in resumed]
        plan = SimpleNamespace(
            preempted_req_ids=set(preempted),
            num_scheduled_tokens=scheduled,
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=request.request_id, block_ids=tables, num_computed_tokens=done
                )
                for request, tables, done in new
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

    def compute(self, request: Request) -> list[list[int]]:
        """Run a prompt to its end, as if it were computed, and wait until its blocks are saved."""
        tables = self.tables_for(request.num_tokens)
        assert self.find(request) == 0
        self.scheduler.allocated(request, tables, 0)
        self.step(new=((request, tables, 0),))
        if self.scheduler.ended(request):
            self.wait_for(self.sent, request)
        return tables

    def load(self, request: Request, computed: int = 0) -> list[list[int]]:
        """Find what is there and load it into new blocks."""
        found = self.find(request, computed)
        assert found
        tables = self.tables_for(request.num_tokens)
        self.scheduler.allocated(request, tables, found)
        self.wait_for(self.received, request)
        return tables

    def wait_for(self, told: set[str], request: Request) -> None:
        """Step until a request has been reported: `told` is `sent` or `received`."""

        def is_told() -> bool:
            self.step()
            return request.request_id in told

        eventually(is_told)
