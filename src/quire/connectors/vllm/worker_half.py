"""The half beside a worker: it has the tiers, and moves blocks between them and vLLM's memory.

vLLM keeps a request's blocks for a load until the request is reported as received, and for saves
until it is reported as sent; those of a preempted request only until `before_step` returns.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.connectors.vllm.hits import Hit, look_up
from quire.connectors.vllm.lookup import Message
from quire.connectors.vllm.orders import NO_BLOCK, Orders, Prompt, SaveOrder, Tables
from quire.errors import KVError
from quire.kv.image import BlockName
from quire.kv.job_queue import Handle
from quire.kv.kept_windows import asked_keys
from quire.kv.keys import block_names, group_name, tenant_tag
from quire.kv.loads import Load
from quire.kv.puts import Put
from quire.kv.store import KVStore

log = logging.getLogger("quire")

# Of a load, that vLLM need not wait for: until it has asked, planned the request again and launched
# its step, which takes 10 ms, these bytes have come. If not, that step waits on the device.
LAST_BYTES = 512 << 20
CLOSE_S = 2.0  # for what still waits to be written: vLLM kills a worker that takes five seconds


@dataclass
class Chain:
    """The names of a request's blocks, as far as they are known."""

    root: bytes
    tenant: bytes
    names: list[BlockName]

    def extend(self, first: int, tokens: Sequence[bytes]) -> list[BlockName]:
        """The names of the blocks from `first` on, which hold these tokens."""
        new = tokens[len(self.names) - first :]
        parent = self.names[-1].key if self.names else self.root
        self.names += block_names(self.root, parent, new, self.tenant)
        return self.names[first : first + len(tokens)]


@dataclass
class LoadUnderWay:
    load: Load
    tables: Tables
    withdrawn: Handle | None = None


class WorkerHalf:
    """vLLM's worker calls, with each step, `before_step`, `begin_loads`, `begin_saves`, `results`.

    `answer` is called by the thread of the look-ups.
    """

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self.counts: Counter[str] = Counter()
        self._chains: dict[str, Chain] = {}
        self._hits: dict[str, Hit] = {}
        self._loads: dict[str, LoadUnderWay] = {}
        self._puts: dict[str, list[Put]] = {}
        self._held: set[str] = set()
        self._received: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._lock = threading.Lock()  # of chains and matches

    # --- look-ups -------------------------------------------------------------------------------

    def answer(self, question: Message, tokens: bytes) -> Message:
        """`{"request": …, "salt": …, "adapter": …, "first": …}` asks what the tiers have of these
        tokens, behind the blocks before `first`; without tokens, it asks again. `{"drop": …}`
        releases what was found."""
        with self._lock:
            if "drop" in question:
                self._drop(question["drop"])
                return {}
            request = question["request"]
            if tokens:
                self._drop(request)
                self._hits[request] = self._look_up(question, tokens)
            hit = self._hits.get(request)
            if hit is None:
                return {"ready": True, "blocks": 0}
            return {"ready": hit.ready(), "blocks": len(hit)}

    def _look_up(self, question: Message, tokens: bytes) -> Hit:
        prompt = Prompt(question["salt"], question["adapter"])
        chain = self._chains[question["request"]] = self._new_chain(prompt)
        names = chain.extend(0, self._split(tokens))
        windows, size = self.store.windows, self.store.namespace.block_size
        hit = look_up(self.store, names, question["first"])
        found = question["first"] + len(hit)

        def of_groups(keys: list[bytes]) -> list[bytes]:
            return asked_keys(keys, windows, size, len(keys) * size, found)

        self.store.use([name.key for name in names], of_groups=of_groups)
        return hit

    def _drop(self, request: str) -> None:
        hit = self._hits.pop(request, None)
        if hit is not None:
            hit.drop()

    def _new_chain(self, prompt: Prompt) -> Chain:
        namespace = replace(self.store.namespace, adapter=prompt.adapter)
        return Chain(namespace.root_of(prompt.salt), tenant_tag(prompt.salt), [])

    def _split(self, tokens: bytes) -> list[bytes]:
        width = 4 * self.store.namespace.block_size
        return [tokens[at : at + width] for at in range(0, len(tokens), width)]

    # --- steps ----------------------------------------------------------------------------------

    def before_step(self, orders: Orders) -> None:
        """Let no save read blocks that this step may write for others; forget what has ended."""
        for request in orders.preempted:
            for put in self._puts.pop(request, []):
                put.wait()
        if self.store.windows != (None,):  # windows leave blocks behind while a request runs
            for put in itertools.chain.from_iterable(self._puts.values()):
                put.wait()
        for request in orders.withdrawn:
            under_way = self._loads.get(request)
            if under_way is not None:
                under_way.withdrawn = self.store.withdraw(under_way.load)
        self._held.update(orders.held)
        with self._lock:
            for request in (*orders.withdrawn, *orders.held, *orders.ended):
                self._drop(request)
                self._chains.pop(request, None)
        self.store.foreground.begin()  # the device waits for vLLM's thread; copies can wait

    def begin_loads(self, orders: Orders) -> None:
        for order in orders.loads:
            with self._lock:
                hit = self._hits.pop(order.request, None)
            if hit is None:  # it answered before it was restarted, or never
                self._fail(order.request, order.tables[0])
                continue
            self._loads[order.request] = LoadUnderWay(hit.load(order.tables), order.tables)

    def begin_saves(self, orders: Orders) -> None:
        """Behind all that this thread has queued on the device.

        All requests' blocks are one put: while many decode, each has a block now and then, and a
        kernel and a copy for every one of them would keep Python's lock from vLLM's own thread.
        """
        saved = [(order.request, self._named(order)) for order in orders.saves]
        new = [each for _, named in saved for each in named]
        if not new:
            return
        put = self.store.put_names([name for name, _ in new], [block for _, block in new])
        self.counts["saved_blocks"] += put.num_blocks
        for request, named in saved:
            if named:
                before = [each for each in self._puts.get(request, []) if not each.done()]
                self._puts[request] = [*before, put]

    def _named(self, order: SaveOrder) -> list[tuple[BlockName, int]]:
        """The blocks to be kept, with their names."""
        with self._lock:
            chain = self._chains.get(order.request)
            if chain is None:
                chain = self._chains[order.request] = self._new_chain(order.prompt)
            if len(chain.names) < order.named:
                log.warning("Blocks of %s are not kept: those before are unknown.", order.request)
                return []
            names = chain.extend(order.named, self._split(order.tokens))
        names = names[order.first - order.named :]
        return [
            (group_name(name, group), block)
            for group, table in enumerate(order.tables)
            for name, block in zip(names, table, strict=True)
            if block != NO_BLOCK
        ]

    def results(self) -> tuple[set[str], set[str]]:
        """Requests whose saves, and whose loads, are over since the last call."""
        self.store.foreground.end()
        sent = {request for request in self._held if self._is_saved(request)}
        self._held -= sent
        received, self._received = self._received, set()
        for request, under_way in list(self._loads.items()):
            if self._is_loaded(under_way):
                del self._loads[request]
                received.add(request)
        return sent, received

    def take_failed_blocks(self) -> set[int]:
        """Blocks that no load has filled, since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_counts(self) -> dict[str, int]:
        """What was done since the last call."""
        counts, self.counts = self.counts, Counter()
        return dict(counts)

    def close(self) -> None:
        self.store.close(CLOSE_S)

    def _is_saved(self, request: str) -> bool:
        if not all(put.done() for put in self._puts.get(request, [])):
            return False
        self._puts.pop(request, None)
        return True

    def _is_loaded(self, under_way: LoadUnderWay) -> bool:
        """Whether vLLM may have the blocks, or never will."""
        load, withdrawn = under_way.load, under_way.withdrawn
        if withdrawn is None and not load.done():
            most = LAST_BYTES // self.store.host.image_bytes
            if not self.store.follow_last(load, most):
                return False
            self.counts["loaded_blocks"] += len(load.arrived)
            return True
        if withdrawn is not None and not withdrawn.done():
            return False
        self._count_load(under_way)
        return True

    def _count_load(self, under_way: LoadUnderWay) -> None:
        load = under_way.load
        self.counts["loaded_blocks"] += sum(load.arrived)
        if load.is_whole or under_way.withdrawn is not None:
            return
        if self.store.windows != (None,):
            raise KVError("KV blocks in host memory could not be copied; the log has the reason.")
        failed = under_way.tables[0][load.num_loaded :]
        self.counts["failed_blocks"] += len(failed)
        self._failed_blocks.update(failed)

    def _fail(self, request: str, blocks: list[int]) -> None:
        self.counts["failed_blocks"] += len(blocks)
        self._failed_blocks.update(blocks)
        self._received.add(request)
