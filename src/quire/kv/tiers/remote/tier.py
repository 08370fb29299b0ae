"""The remote tier: whatever the store, its blocks are verified and its calls are bounded."""

from __future__ import annotations

import time
from collections.abc import Sequence

from quire.kv.image import LAYOUT_VERSION, BlockName, Verdict, examine, header, header_bytes
from quire.kv.tiers.remote.batched import CONTROLLED, Answers, BatchedTier
from quire.kv.tiers.remote.breaker import Breaker
from quire.kv.tiers.remote.client import Client, Value, ValueShape
from quire.kv.tiers.remote.deadline import Deadline
from quire.kv.tiers.remote.guard import Guard

BATCH_BYTES = 32 << 20


def value_shape(image_bytes: int | Sequence[int], block_size: int) -> ValueShape:
    """The shape of values with images of each KV group, or of the only one."""
    sizes = (image_bytes,) if isinstance(image_bytes, int) else tuple(image_bytes)
    head_bytes, most = header_bytes(block_size), max(sizes)
    others = tuple(sorted(set(sizes) - {most}))
    return ValueShape(head_bytes, most, max(1, BATCH_BYTES // (head_bytes + most)), others)


class RemoteTier(BatchedTier):
    """What to evict is up to the store, which sees every question and every read."""

    def __init__(
        self,
        client: Client,
        guard: Guard,
        shape: ValueShape,
        timeout: float,
        image_bytes: int | Sequence[int] = (),
    ) -> None:
        """`image_bytes`: of each KV group, where there are several."""
        sizes = image_bytes or shape.image_bytes
        super().__init__(guard, sizes, shape.batch, shape.value_bytes, timeout)
        self._client, self._shape = client, shape
        # A store that is full takes nothing for a while; what it holds can still be read.
        self._takes = Breaker(limit=1, backoff=1.0)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """All questions in one round trip."""
        found: list[bool] = []

        def ask(deadline: Deadline) -> None:
            found.extend(self._client.exists(_store_keys(keys), deadline))

        if keys:
            self._guard.run("ask", ask, self._timeout)
        return found or [False] * len(keys)

    def use(self, keys: Sequence[bytes]) -> None:
        """Nothing to do: to be asked for is to be used, in the store as well."""

    def read(self, names: Sequence[BlockName], images: Sequence[memoryview]) -> list[bool]:
        return self._in_batches(self._read_batch, names, images)

    def write(self, names: Sequence[BlockName], images: Sequence[memoryview]) -> list[bool]:
        return self._in_batches(self._write_batch, names, images)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Delete these, as far as the store can be reached."""
        names = _store_keys(keys)
        self._guard.run("delete", lambda by: self._client.delete(names, by), self._timeout)

    def blocks_by_root(self) -> dict[str, int] | None:
        return self._client.blocks_by_root()

    def pin(self, keys: Sequence[bytes], seconds: float) -> int | None:
        until, names = time.time() + seconds, _store_keys(keys)
        return self._control(lambda by: self._client.pin(names, until, by), len(keys))

    def delete(self, keys: Sequence[bytes]) -> int | None:
        there = [key for key, held in zip(keys, self.contains(keys), strict=True) if held]
        names = _store_keys(there)

        def remove(deadline: Deadline) -> int:
            self._client.remove(names, deadline)
            return len(names)

        return self._control(remove, len(names))

    def delete_roots(self, roots: Sequence[bytes], tenant: bytes) -> int | None:
        return self._control(lambda by: self._client.remove_roots(roots, by), CONTROLLED)

    def _read_batch(
        self, names: Sequence[BlockName], images: Sequence[memoryview]
    ) -> tuple[Answers, str | None]:
        keys = _store_keys([name.key for name in names])
        values = [Value(memoryview(bytearray(self._shape.head_bytes)), i) for i in images]
        answers: Answers = {}
        bad: list[bytes] = []

        def fetch(deadline: Deadline) -> None:
            for i, count in self._client.fetch(keys, values, deadline):
                verdict = self._examine(names[i], values[i], count)
                answers[i] = verdict is Verdict.WHOLE
                if verdict not in (Verdict.WHOLE, Verdict.ABSENT):
                    self.counters.drop(verdict.value)
                    bad.append(names[i].key)

        with self.counters.timing(self.counters.reads, self.sizes(names)) as moved:
            failure = self._guard.run("read", fetch, self._seconds(len(names)))
            moved += [answers.get(i, False) for i in range(len(names))]
        if bad:
            self.forget(bad)
        return answers, failure

    def _examine(self, name: BlockName, value: Value, count: int) -> Verdict:
        if count == 0:
            return Verdict.ABSENT
        if count != len(value):
            return Verdict.TORN
        return examine(name, value.head, value.image)

    def _write_batch(
        self, names: Sequence[BlockName], images: Sequence[memoryview]
    ) -> tuple[Answers, str | None]:
        if not self._takes.allows():
            self.refusal = self._guard.explain("refused")
            return {}, "refused"
        keys = _store_keys([name.key for name in names])
        answers: Answers = {}
        refusals: list[str] = []  # of each that was sent; empty if it was taken
        taken = [False] * len(names)

        def store(deadline: Deadline) -> None:
            """Only what no other replica has brought already."""
            held = self._client.exists(keys, deadline)
            answers.update({i: True for i, there in enumerate(held) if there})
            new = [i for i, there in enumerate(held) if not there]
            heads = [memoryview(header(names[i], images[i])) for i in new]
            values = [Value(head, images[i]) for head, i in zip(heads, new, strict=True)]
            for at, refusal in self._client.store([keys[i] for i in new], values, deadline):
                answers[new[at]] = taken[new[at]] = not refusal
                refusals.append(refusal)

        with self.counters.timing(self.counters.writes, self.sizes(names)) as moved:
            failure = self._guard.run("write", store, self._seconds(len(names)))
            moved += taken
        self._takes.report(not refusals or "" in refusals)
        if refused := [refusal for refusal in refusals if refusal]:
            self.counters.drop("refused", len(refused))
            self._guard.note_refusal(refused[0])
        if failure is not None or refused:
            self.refusal = self._guard.explain(failure or "refused")
        return answers, failure


def _store_keys(keys: Sequence[bytes]) -> list[str]:
    return [f"quire:{LAYOUT_VERSION}:{key.hex()}" for key in keys]
