"""The store of block images below the device, for this engine or another.

    match = store.match(token_ids)        which tier has each block of this prefix
    load = match.load(block_ids)          bring them into these blocks of the device
    put = store.put(token_ids, block_ids) keep what these blocks hold

With several KV groups `match_tables` and `put_tables` do the same with a table for each group.

None of these waits. Loads and puts are handles with `done()`, `wait(timeout)` and `cancel()`; their
blocks belong to them until they are over. The code that opens a store closes it: `with` does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat, takewhile
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from quire.errors import KVError
from quire.kv import open_stores
from quire.kv.arguments import (
    TokenIds,
    check_salt,
    check_timeout,
    checked_tokens,
    count_of,
    lengths_of,
)
from quire.kv.block_log import BlockLog
from quire.kv.control import CacheControl
from quire.kv.foreground import Foreground
from quire.kv.grouped_match import GroupedMatch, OnDevice, nothing_there
from quire.kv.hit_rule import Window
from quire.kv.image import BlockName
from quire.kv.job_queue import Handle, JobQueue, OpenHandles
from quire.kv.kept_windows import asked_keys
from quire.kv.keys import Namespace, block_names, chain_keys, group_name, tenant_tag
from quire.kv.layer_loads import LayerLoad, LayerLoader
from quire.kv.loads import Found, Load
from quire.kv.pools.block_pool import BlockPool, Blocks
from quire.kv.puts import Names, Put, Putter
from quire.kv.rates import Rates
from quire.kv.tier_match import Answer, Keys, TierMatch
from quire.kv.tiers.host import HostTier
from quire.kv.tiers.tier import Tier

log = logging.getLogger("quire")

_Load = TypeVar("_Load", bound=Load)

CLOSED = "This store is closed; open another with open_store."
FORKED = "This store belongs to the process that opened it; open one in this process, too."
SLOW = (
    "A KV store was closed after %g s with %d transfers under way: what they had is dropped; "
    "call close with a longer timeout to keep it."
)
LET_GO_S = 2.0  # for threads to end that are busy when the time to write is over
LEAST_S = 0.1  # for one that has nothing to do any more

ASK_DEADLINE_S = 0.25  # for a far tier to say what it has, before it counts as having nothing


class KVStore:
    """Host memory and the tiers below it, nearest first."""

    clock = staticmethod(time.monotonic)

    def __init__(
        self,
        pool: BlockPool[Any],
        namespace: Namespace,
        host: HostTier,
        tiers: Sequence[Tier] = (),
        windows: Sequence[Window] = (None,),
    ) -> None:
        """`windows`: of each KV group; None where a token sees all before it."""
        self.namespace = namespace
        self.windows = tuple(windows)
        self.host = host
        self._pool = pool
        self.tiers = list(tiers)
        self._tier_names = [host.name, *(tier.name for tier in tiers)]
        self.rates = Rates()
        self.handles = OpenHandles(self)
        self._loader = LayerLoader(pool, host, tiers, self.rates)
        self.foreground = Foreground()
        self._putter = Putter(pool, host, tiers, self.handles, self.foreground)
        self._near = [tier for tier in tiers if tier.is_local]
        self._far = [tier for tier in tiers if not tier.is_local]
        self._questions = {tier.name: JobQueue(f"{tier.name} questions") for tier in self._far}
        self._uses = JobQueue("uses")
        self.control = CacheControl(self)
        self._refusal = ""  # why calls are refused
        self._closing = threading.RLock()
        open_stores.add(self)

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- for any engine -------------------------------------------------------------------------

    def match(self, token_ids: TokenIds, salt: str = "") -> TierMatch:
        """The full blocks at the start of `token_ids` that some tier holds.

        It counts as a use of all of them, those that no tier has too: tiers keep what is asked for.
        """
        names = self.names(token_ids, salt)
        match = self.match_names(names)
        self.use([name.key for name in names])
        return match

    def put(self, token_ids: TokenIds, blocks: Blocks, salt: str = "") -> Put:
        """Keep the full blocks of `token_ids`, which are in `blocks` of the device.

        There may be more blocks than full ones: the last may be half filled, and is not kept.
        """
        self.check_open()
        names = self.names(token_ids, salt)
        if (count := count_of(blocks)) < len(names):
            raise KVError(
                f"{len(names)} full blocks of tokens came with {count} block ids; "
                "give an id for each."
            )
        return self.put_names(names, self._pool.checked(blocks)[: len(names)])

    def match_tables(self, token_ids: TokenIds, salt: str = "") -> GroupedMatch:
        """The longest prefix of `token_ids` of which the tiers have what each group needs.

        It counts as a use, as `match` does.
        """
        names = self.names(token_ids, salt)
        match = self.match_groups(self.windows, names)
        keys, size = [name.key for name in names], self.namespace.block_size
        self.use(asked_keys(keys, self.windows, size, len(token_ids), len(match)))
        return match

    def put_tables(self, token_ids: TokenIds, tables: Sequence[Blocks], salt: str = "") -> Put:
        """Keep the full blocks of `token_ids`: a table for each group, whose last block is theirs.

        A table may be shorter than the tokens: a window needs no more than its last blocks.
        """
        self.check_open()
        names = self.names(token_ids, salt)
        lengths = lengths_of(tables)
        if len(lengths) != len(self.windows) or max(lengths) > len(names):
            raise KVError(
                f"Tables of {', '.join(map(str, lengths))} blocks came with "
                f"{len(names)} full blocks of tokens; give one for each of {len(self.windows)} KV "
                "groups, of the last full blocks at most that many."
            )
        blocks = self._pool.checked([block for table in tables for block in table])
        wanted = [
            group_name(name, group)
            for group, table in enumerate(tables)
            for name in names[len(names) - len(table) :]
        ]
        return self.put_names(wanted, blocks)

    def names(self, token_ids: TokenIds, salt: str = "") -> list[BlockName]:
        """The names of the full blocks of `token_ids`; each salt is a tenant."""
        packed = checked_tokens(token_ids).tobytes()
        width = 4 * self.namespace.block_size
        tokens = [packed[at : at + width] for at in range(0, len(packed) - width + 1, width)]
        root = self.root(salt)
        return block_names(root, root, tokens, tenant_tag(salt))

    def root(self, salt: str) -> bytes:
        check_salt(salt)
        return self.namespace.root_of(salt)

    # --- by name --------------------------------------------------------------------------------

    def match_names(self, names: Sequence[BlockName], patience: float | None = None) -> TierMatch:
        """A far tier has `patience` seconds to say what it has, or the usual time."""
        self.check_open()
        return TierMatch(self, names, ASK_DEADLINE_S if patience is None else patience)

    def match_groups(
        self,
        windows: Sequence[Window],
        names: Sequence[BlockName],
        first: int = 0,
        reached: int = 0,
        on_device: OnDevice = nothing_there,
        patience: float | None = None,
    ) -> GroupedMatch:
        """As `match_names`, with several KV groups: `names` of the chain from place `first` on.

        The device has the blocks of full groups at all places before `reached`.
        """
        self.check_open()
        seconds, size = ASK_DEADLINE_S if patience is None else patience, self.namespace.block_size
        return GroupedMatch(self, windows, size, names, first, reached, on_device, seconds)

    def put_names(self, names: Names, blocks: Blocks, *, is_computed: bool = False) -> Put:
        """Keep what `blocks` hold, after all that is queued on the device now.

        Where they are known to be `is_computed`, nothing is waited for.
        """
        self.check_open()
        put = Put(len(blocks), self._tier_names)
        if not callable(names) and self._putter.note_if_everywhere(put, names):
            put.end()
            return put
        self.handles.follow(put)
        after = None if is_computed else self._pool.mark()
        self._putter.start(put, names, blocks, after)
        return put

    def prefetch(self, names: Sequence[BlockName]) -> None:
        """Bring what only a lower tier has into host memory, if there is room to keep it."""
        self.check_open()
        found = self.locate([name.key for name in names], hold=False)
        self.fetch(names[: len(found)], [each.place for each in found])

    def fetch(self, names: Sequence[BlockName], places: Sequence[str]) -> None:
        """Bring blocks that are in these tiers into host memory, if there is room to keep them."""
        self.check_open()
        if not self.host.capacity:
            return
        wanted: dict[str, list[BlockName]] = {}
        for name, place in zip(names, places, strict=True):
            if place != self.host.name:
                wanted.setdefault(place, []).append(name)
        for place, lacking in wanted.items():
            self._loader.fetch(lacking, place)

    def use(
        self,
        keys: Sequence[bytes],
        parent: bytes = b"",
        behind: Sequence[bytes] = (),
        of_groups: Callable[[list[bytes]], list[bytes]] | None = None,
    ) -> None:
        """A request asked for these, from its first block on: tiers keep what is asked for.

        And for those with the tokens `behind` them, the first of which is behind `parent`: their
        keys are computed in a thread of their own. `of_groups` makes of the chain's keys those of
        all KV groups, where there are several.
        """
        self.check_open()

        def tell() -> None:
            self.foreground.give_way()
            asked = [*keys, *chain_keys(parent, behind)]
            if of_groups is not None:
                asked = of_groups(asked)
            self.host.use(asked)
            for tier in self.tiers:
                tier.use(asked)

        self._uses.submit(tell)

    # --- for matches ------------------------------------------------------------------------------

    def may_have(self, key: bytes) -> bool:
        """Whether to look for what begins with this block: tiers at hand have none, or have it, and
        those that are far away have to be asked."""
        return bool(self._far or self.locate([key], hold=False))

    def locate(self, keys: Sequence[bytes], hold: bool = True) -> list[Found]:
        """The nearest of the tiers at hand for each block, up to the first that none of them has.

        With `hold`, those in host memory are held.
        """
        found: list[Found] = []
        while len(found) < len(keys):
            rest = keys[len(found) :]
            here = self._here(rest, hold) or self._nearby(rest)
            if not here:
                break
            found += here
        return found

    def _here(self, keys: Sequence[bytes], hold: bool) -> list[Found]:
        """The first blocks, as far as host memory has them."""
        if hold:
            return list(map(Found, repeat(self.host.name), self.host.hold(keys)))
        return [Found(self.host.name) for _ in takewhile(bool, self.host.contains(keys))]

    def _nearby(self, keys: Sequence[bytes]) -> list[Found]:
        """The first blocks, as far as the nearest tier that has the first has them, and the host
        does not."""
        for tier in self._near:
            if any(tier.contains(keys[:1])):
                absent = list(takewhile(lambda key: not self.host.contains([key])[0], keys))
                held = list(takewhile(bool, tier.contains(absent)))
                return [Found(tier.name)] * len(held)
        return []

    def ask(self, keys: Keys, first: int, patience: float) -> list[Answer]:
        """Ask the tiers that are far away, all keys at once, each in its own queue."""
        deadline = time.monotonic() + patience
        answers = [Answer(tier.name, first, deadline) for tier in self._far]
        for tier, answer in zip(self._far, answers, strict=True):
            self.handles.follow(answer)
            self._questions[tier.name].submit(partial(_ask, tier, keys, answer))
        return answers

    def load(
        self,
        names: Sequence[BlockName],
        found: Sequence[Found],
        blocks: Blocks,
        places: Sequence[int] | None = None,
    ) -> Load:
        """Bring `names[i]`, which is at `found[i]` and held, into `blocks[i]` of the device.

        `places`: of the chain, where there are several KV groups; blocks of a group come together.
        """
        load = Load(len(names), places)
        self._start(self._loader.start, load, names, found, blocks)
        return load

    def load_by_layer(self, match: TierMatch, blocks: Blocks) -> LayerLoad:
        """As `match.load(blocks)`; what host memory has comes layer by layer, behind the rest.

        So a model can begin before all of it is there: see `LayerLoad`.
        """
        names, found = match.take(blocks)
        load = LayerLoad(len(names), self._pool.num_layers)
        self._start(self._loader.start_by_layer, load, names, found, blocks[: len(names)])
        return load

    def _start(
        self,
        start: Callable[[_Load, Sequence[BlockName], Sequence[Found], Blocks], None],
        load: _Load,
        names: Sequence[BlockName],
        found: Sequence[Found],
        blocks: Blocks,
    ) -> None:
        """Check what was given, and start."""
        try:
            self.check_open()
            checked = self._pool.checked(blocks)
            if len(checked) < len(names):
                raise KVError(
                    f"{len(names)} blocks came with {len(checked)} ids to load them into; "
                    "give an id for each."
                )
        except KVError:
            self.release(found)
            raise
        if not names:
            load.end()
            return
        self.handles.follow(load)
        start(load, names, found, checked)

    def follow_last(self, load: Load, most: int) -> bool:
        """Whether no more than so many blocks of a load are left, all of them on their way.

        Then what this thread has the device do from now on is behind them, as if they were there.
        """
        transfers = load.last_transfers(most)
        for transfer in transfers or ():
            self._pool.follow(transfer)
        return transfers is not None

    def withdraw(self, load: Load) -> Handle:
        """Cancel a load; its blocks are free when the handle is over, even if the load is not."""
        gone = Handle()
        self.handles.follow(gone)
        self._loader.withdraw(load, gone)
        return gone

    def release(self, found: Sequence[Found]) -> None:
        self.host.release([each.slot for each in found if each.place == self.host.name])

    # --- as a whole -----------------------------------------------------------------------------

    def leave_device(self, timeout: float) -> bool:
        """See to it that nothing touches the device's blocks; False if that takes longer.

        A load that still waits for a slow tier ends later, but copies nothing any more.
        """
        for load in self.handles.of(Load):
            load.cancel()
        return self._loader.leave_device(timeout) and self._putter.leave_device(timeout)

    def flush(self, timeout: float) -> bool:
        """Wait until all that was put is where it is to be; False if that takes longer."""
        check_timeout(timeout)
        self.check_open()
        return self.settle(timeout)

    def settle(self, timeout: float) -> bool:
        """As `flush`, also for those who do something while the store is being closed."""
        return self.handles.wait_for_all(timeout)

    def publish_events(self, log: BlockLog) -> None:
        """Let `log` know what is held here, and what becomes of it."""
        self.host.publish_events(log)
        for tier in self.tiers:
            tier.publish_events(log)

    def stats(self) -> dict[str, Any]:
        below = {tier.name: tier.stats() for tier in self.tiers}
        return {self.host.name: self.host.stats(), **below}

    def slot_states(self) -> dict[str, npt.NDArray[np.uint8]]:
        """Slot by slot, the tiers that know their slots."""
        below = {tier.name: tier.slot_states() for tier in self.tiers}
        known = {name: states for name, states in below.items() if states is not None}
        return {self.host.name: self.host.slot_states(), **known}

    def close(self, timeout: float = 30.0) -> None:
        """Write what waits to be written, for so long; drop the rest, and let go of everything.

        Handles that are open end, calls are refused from now on; to close again does nothing.
        """
        if self._refusal == FORKED:
            return  # a lock may be held by a thread that this process does not have
        with self._closing:
            if self._refusal:
                return
            self._refusal = CLOSED
            open_stores.discard(self)
            until = time.monotonic() + timeout
            try:
                if not self.settle(timeout):
                    log.warning(SLOW, timeout, len(self.handles.of()))
            finally:
                self._let_go(max(until, time.monotonic() + LET_GO_S))

    def check_open(self) -> None:
        """Raise a KVError if it is closed."""
        if self._refusal:
            raise KVError(self._refusal)

    def disown(self) -> None:
        """This process is a child of the one that opened the store, and has none of its threads."""
        self._refusal = FORKED

    def _let_go(self, until: float) -> None:
        """End threads and handles, about by then; files and connections behind them."""

        def left() -> float:
            return max(LEAST_S, until - time.monotonic())

        for handle in self.handles.of():
            handle.cancel()
        self._putter.close(left())
        self._loader.close(left())
        self.handles.end_all()  # what no thread has ended, and what nobody waits for any more
        for queue in (*self._questions.values(), self._uses):
            queue.close(left())
        self.control.close(left())
        for tier in self.tiers:
            tier.close()
        self.host.memory.close()


def _ask(tier: Tier, keys: Keys, answer: Answer) -> None:
    try:
        if time.monotonic() < answer.deadline:
            answer.holds = tier.contains(keys() if callable(keys) else keys)
    finally:
        answer.end()
