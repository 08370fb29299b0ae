"""An archive as a store of values: what there is comes from listings, what is moved are packs."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

from quire.kv.image import name_in
from quire.kv.tiers.remote.archive.codec import Codec
from quire.kv.tiers.remote.archive.index import PackIndex
from quire.kv.tiers.remote.archive.keeper import Keeper
from quire.kv.tiers.remote.archive.objects import Bytes, Objects, StoreFull
from quire.kv.tiers.remote.archive.pack import (
    Span,
    cut_into_packs,
    pack_name,
    read_name,
    root_folder,
    short_key,
)
from quire.kv.tiers.remote.archive.workers import Results, Work, Workers
from quire.kv.tiers.remote.client import Client, ClientError, Value
from quire.kv.tiers.remote.deadline import Deadline

FIRST_LISTING_S = 3.0  # a start waits so long for the first listing
MEND_S = 2.0  # so long, at most, the end waits for packs that are being mended
TOUCH_S = 600.0  # to be used more often than this is to be used once

Piece = tuple[int, Bytes | None]  # the value at an index, as it is stored; None if it is gone
Answer = tuple[list[int], str]  # which values were written, and if not, why


class ArchiveClient(Client):
    """`quota`: bytes that packs may take in all, or None."""

    def __init__(
        self,
        objects: Objects,
        timeout: float,
        refresh: float,
        quota: int | None = None,
        codec: Codec | None = None,
    ) -> None:
        super().__init__()
        self.connect_seconds = timeout + FIRST_LISTING_S
        self.index = PackIndex()
        self._objects, self._timeout, self._quota = objects, timeout, quota
        self._codec = codec or Codec()
        self._workers = Workers()
        self._keeper = Keeper(objects, self.index, refresh, quota)
        self._writing = [threading.Lock() for _ in range(64)]  # each for some of all names
        self._touched: dict[str, float] = {}
        self._came_from: dict[int, str] = {}  # by key: the pack that was read for it last
        self._mending: deque[Iterator[None]] = deque(maxlen=64)

    def connect(self) -> None:
        self._finish([lambda results: self._objects.check()], Deadline(self._timeout))
        self._keeper.start()
        self._keeper.listed.wait(FIRST_LISTING_S)

    def exists(self, keys: Sequence[str], deadline: Deadline) -> list[bool]:
        return [pack is not None for pack in self.index.find([*map(short_key, keys)])]

    def fetch(
        self, keys: Sequence[str], values: Sequence[Value], deadline: Deadline
    ) -> Iterator[tuple[int, int]]:
        wanted: dict[str, list[int]] = defaultdict(list)
        for i, pack in enumerate(self.index.find([*map(short_key, keys)])):
            if pack is None:
                yield i, 0
            else:
                wanted[pack].append(i)
        self._note_origins(keys, wanted)
        jobs = [partial(self._read_pack, pack, at, keys) for pack, at in wanted.items()]
        if jobs:
            self.count_round_trip()
        for i, stored in self._workers.run(jobs, deadline):
            yield i, 0 if stored is None else self._codec.unpack(stored, values[i])

    def store(
        self, keys: Sequence[str], values: Sequence[Value], deadline: Deadline
    ) -> Iterator[tuple[int, str]]:
        first = {key: i for i, key in reversed([*enumerate(keys)])}  # a key may come twice
        jobs: list[Work[Answer]] = []
        for folder, members in _by_root(values, sorted(first.values())).items():
            for cut in cut_into_packs([len(values[i]) for i in members]):
                at = members[cut]
                # Copied here: a writer that is left behind must not read its caller's memory.
                raw = b"".join(part for i in at for part in (values[i].head, values[i].image))
                sizes = [len(values[i]) for i in at]
                shorts = [short_key(keys[i]) for i in at]
                jobs.append(partial(self._write_pack, folder, at, shorts, raw, sizes))
        if jobs:
            self.count_round_trip()
        for at, refusal in self._workers.run(jobs, deadline):
            for i in at:
                yield i, refusal
        for i, key in enumerate(keys):
            if first[key] != i:
                yield i, ""

    def delete(self, keys: Sequence[str], deadline: Deadline) -> None:
        """Values that are not what they should be; the others of their packs stay.

        They go into new packs: else each engine would meet the wrong ones anew.
        """
        packs: dict[str, None] = {}
        for key in map(short_key, keys):
            pack = self._came_from.pop(key, None) or self.index.find([key])[0]
            if pack is not None:
                self.index.mark_bad(pack, key)
                packs[pack] = None
        for pack in packs:
            self._mending.append(self._workers.run([partial(self._mend, pack)], Deadline(MEND_S)))

    def remove(self, keys: Sequence[str], deadline: Deadline) -> None:
        """With whole packs: what else these have is of the same namespace, and may come again."""
        self._delete_packs(self._packs_of(keys), deadline)

    def pin(self, keys: Sequence[str], until: float, deadline: Deadline) -> int | None:
        if not self._objects.keeps_uses:
            return None
        self._finish([partial(self._touch, pack, until) for pack in self._packs_of(keys)], deadline)
        return sum(self.exists(keys, deadline))

    def blocks_by_root(self) -> dict[str, int] | None:
        counts: Counter[str] = Counter()
        for pack in self.index.packs():
            counts[pack.partition("/")[0]] += len(read_name(pack) or ())
        return dict(counts)

    def remove_roots(self, roots: Sequence[bytes], deadline: Deadline) -> int | None:
        """After a listing: what other machines have written goes, too."""
        self._finish([lambda results: self._keeper.list()], deadline)
        folders = {root_folder(root) for root in roots}
        packs = [pack for pack in self.index.packs() if pack.partition("/")[0] in folders]
        self._delete_packs(packs, deadline)
        return sum(len(read_name(pack) or ()) for pack in packs)

    def close(self) -> None:
        self._keeper.close()
        for mending in self._mending:  # else a short life would leave each pack as it found it
            with suppress(OSError):
                deque(mending, maxlen=0)
        self._workers.close()

    def _finish(self, jobs: Sequence[Work[None]], deadline: Deadline) -> None:
        """Do these, which have no results."""
        for _ in self._workers.run(jobs, deadline):
            pass

    def _packs_of(self, keys: Sequence[str]) -> list[str]:
        found = self.index.find([*map(short_key, keys)])
        return list(dict.fromkeys(pack for pack in found if pack is not None))

    def _delete_packs(self, packs: Sequence[str], deadline: Deadline) -> None:
        self._finish([partial(self._delete_pack, pack) for pack in packs], deadline)

    def _read_pack(
        self, pack: str, at: Sequence[int], keys: Sequence[str], results: Results[Piece]
    ) -> None:
        spans = read_name(pack) or {}
        places: dict[Span, list[int]] = defaultdict(list)  # a value may be asked for twice
        for i in at:
            places[spans[short_key(keys[i])]].append(i)
        left = dict.fromkeys(at)
        try:
            order = sorted(places)
            for span, piece in zip(order, self._objects.read(pack, order), strict=True):
                if not results.wanted:
                    return
                for i in places[span]:
                    results.put((i, piece))
                    del left[i]
        except OSError as error:
            if not self._is_gone(pack, error):
                raise
            self._read_elsewhere(list(left), keys, results)
        else:
            self._note_use(pack)

    def _is_gone(self, pack: str, error: OSError) -> bool:
        if isinstance(error, FileNotFoundError):
            self._objects.check()  # where the archive itself is gone, nothing was swept
            self.index.discard(pack)  # by another machine, since the last listing
            return True
        # Mending deletes a pack, of which a store may break a reply off that has begun.
        with self._writing[hash(pack) % len(self._writing)]:
            return not self.index.lists(pack)

    def _read_elsewhere(
        self, at: Sequence[int], keys: Sequence[str], results: Results[Piece]
    ) -> None:
        """What was in a pack that is gone: one that was mended is in another by now."""
        packs: dict[str, list[int]] = defaultdict(list)
        for i, pack in zip(at, self.index.find([short_key(keys[i]) for i in at]), strict=True):
            if pack is None:
                results.put((i, None))
            else:
                packs[pack].append(i)
        for pack, those in packs.items():
            self._read_pack(pack, those, keys, results)

    def _note_use(self, pack: str) -> None:
        now = time.time()
        if self._objects.keeps_uses and self._touched.get(pack, 0.0) < now - TOUCH_S:
            if len(self._touched) > 10_000:
                self._touched.clear()
            self._touched[pack] = now
            self._objects.touch(pack, now)

    def _write_pack(
        self,
        folder: str,
        at: list[int],
        keys: list[int],
        raw: bytes,
        sizes: list[int],
        results: Results[Answer],
    ) -> None:
        body, sizes = self._codec.pack(raw, sizes)
        if self._quota is not None and self.index.total_bytes + len(body) > self._quota:
            self._keeper.sweep_soon()
            results.put((at, "the archive is over its quota until it is swept"))
            return
        name = pack_name(folder, keys, sizes)
        try:
            with self._writing[hash(name) % len(self._writing)]:
                if not self.index.has(name):  # or another thread brought the same in the meantime
                    self._objects.write(name, body, lambda: results.wanted)
                    if results.wanted:
                        self.index.add(name)
        except StoreFull as error:
            results.put((at, str(error)))
        else:
            results.put((at, ""))

    def _note_origins(self, keys: Sequence[str], wanted: dict[str, list[int]]) -> None:
        """For when a value turns out to be wrong: a listing may bring another pack with its key."""
        if len(self._came_from) > 10_000:
            self._came_from.clear()
        for pack, at in wanted.items():
            self._came_from.update((short_key(keys[i]), pack) for i in at)

    def _mend(self, pack: str, results: Results[None]) -> None:
        """Put what is right of a pack into a new one, and delete it.

        Another machine may do the same: then both write the same, or what is left to mend is met
        again. One that reads the old pack meanwhile misses blocks until its next listing.
        """
        with self._writing[hash(pack) % len(self._writing)]:
            good = self.index.good_of_bad(pack)
            if good is None:
                return  # it was written anew
            try:
                pieces = list(self._objects.read(pack, sorted(good.values())))
            except FileNotFoundError:
                self.index.discard(pack)
                return
            members = sorted(good.items(), key=lambda item: item[1])
            whole = [
                (key, bytes(piece))
                for (key, span), piece in zip(members, pieces, strict=True)
                if len(piece) == span.size
            ]
            if whole:
                self._write_mended(pack, [key for key, _ in whole], [each for _, each in whole])
            self._delete_pack(pack)

    def _write_mended(self, old: str, keys: list[int], values: list[bytes]) -> None:
        name = pack_name(old.partition("/")[0], keys, [*map(len, values)])
        if not self.index.has(name):
            self._objects.write(name, b"".join(values))
            self._objects.use_alike(name, old)
            self.index.add(name)

    def _touch(self, pack: str, until: float, results: Results[None]) -> None:
        self._objects.touch(pack, until)

    def _delete_pack(self, pack: str, results: Results[None] | None = None) -> None:
        self._objects.delete(pack)
        self.index.discard(pack)


def _by_root(values: Sequence[Value], members: Sequence[int]) -> dict[str, list[int]]:
    """These values, by the folder of their namespace."""
    folders: dict[str, list[int]] = defaultdict(list)
    for i in members:
        name = name_in(values[i].head)
        if name is None:
            raise ClientError("a value that was to be stored has no header")
        folders[root_folder(name.root)].append(i)
    return folders
