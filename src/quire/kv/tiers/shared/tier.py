"""An engine's tier over the cache that a server shares between the processes of a machine.

It is a remote tier: an outage of the server is a miss, behind the same guard and breaker.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quire.errors import ConfigError
from quire.kv.image import BlockName, Verdict, examine, header
from quire.kv.tiers.remote.address import Address
from quire.kv.tiers.remote.batched import CONTROLLED, Answers, BatchedTier
from quire.kv.tiers.remote.breaker import Breaker, State
from quire.kv.tiers.remote.deadline import Deadline
from quire.kv.tiers.remote.guard import Guard
from quire.kv.tiers.shared.client import SharedClient
from quire.kv.tiers.shared.protocol import MOST_KEYS, SECONDS, Operation, Shape


def open_shared(
    address: Address, image_bytes: int | Sequence[int], block_size: int, timeout: float
) -> SharedTier:
    """The tier behind `quire:///path/of/the/socket`; the server need not be there yet."""
    address.check_options(["timeout"])
    if address.parts.netloc or not address.parts.path:
        raise ConfigError(
            "A quire:// cache URL names the socket of `quire cache serve` on this machine; "
            "write quire:///path/of/the/socket."
        )
    sizes = (image_bytes,) if isinstance(image_bytes, int) else tuple(image_bytes)
    shape = Shape(block_size, sizes)
    client = SharedClient(Path(address.parts.path), shape, timeout)
    guard = Guard(client, address.shown, address.hide, Breaker(state=State.OPEN))
    return SharedTier(client, guard, shape, timeout)


class SharedTier(BatchedTier):
    """What to evict is up to the server, which is told what is used."""

    def __init__(self, client: SharedClient, guard: Guard, shape: Shape, timeout: float) -> None:
        super().__init__(guard, shape.image_bytes, shape.batch, shape.stride, timeout)
        self._client, self._shape = client, shape

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        found: list[bool] = []

        def ask(deadline: Deadline) -> None:
            with self._client.lend(deadline) as channel:
                for part in _parts(keys):
                    found.extend(channel.flags(Operation.ASK, b"".join(part), len(part), deadline))

        if keys and self._guard.run("ask", ask, self._timeout) is None:
            return found
        return [False] * len(keys)

    def use(self, keys: Sequence[bytes]) -> None:
        if keys:
            self._tell("use", Operation.USE, keys)

    def read(self, names: Sequence[BlockName], images: Sequence[memoryview]) -> list[bool]:
        return self._in_batches(self._read_batch, names, images)

    def write(self, names: Sequence[BlockName], images: Sequence[memoryview]) -> list[bool]:
        return self._in_batches(self._write_batch, names, images)

    def blocks_by_root(self) -> dict[str, int] | None:
        def ask(deadline: Deadline) -> dict[str, int]:
            with self._client.lend(deadline) as channel:
                return channel.json(Operation.LIST, deadline)

        return self._control(ask, CONTROLLED)

    def pin(self, keys: Sequence[bytes], seconds: float) -> int | None:
        return self._count(Operation.PIN, keys, SECONDS.pack(seconds))

    def delete(self, keys: Sequence[bytes]) -> int | None:
        return self._count(Operation.DELETE, keys)

    def delete_roots(self, roots: Sequence[bytes], tenant: bytes) -> int | None:
        return self._count(Operation.DELETE_ROOTS, roots, tenant, blocks=CONTROLLED)

    def _count(
        self, operation: Operation, keys: Sequence[bytes], before: bytes = b"", blocks: int = 0
    ) -> int | None:
        """How many blocks the server did this to; `before` comes before the keys of each frame."""

        def tell(deadline: Deadline) -> int:
            with self._client.lend(deadline) as channel:
                bodies = [before + b"".join(part) for part in _parts(keys)]
                return sum(channel.count(operation, body, deadline) for body in bodies)

        return self._control(tell, blocks or len(keys))

    def _read_batch(
        self, names: Sequence[BlockName], images: Sequence[memoryview]
    ) -> tuple[Answers, str | None]:
        answers: Answers = {}
        bad: list[bytes] = []

        def fetch(deadline: Deadline) -> None:
            body = self._shape.pack(names)
            with self._client.lend(deadline) as channel:
                found = channel.flags(Operation.READ, body, len(names), deadline)
                for i, is_there in enumerate(found):
                    answers[i] = False
                    if not is_there:
                        continue
                    np.copyto(np.asarray(images[i]), channel.exchange.image(i, len(images[i])))
                    verdict = examine(names[i], channel.exchange.head(i).data, images[i])
                    answers[i] = verdict is Verdict.WHOLE
                    if verdict is not Verdict.WHOLE:
                        self.counters.drop(verdict.value)
                        bad.append(names[i].key)

        with self.counters.timing(self.counters.reads, self.sizes(names)) as moved:
            failure = self._guard.run("read", fetch, self._seconds(len(names)))
            moved += [answers.get(i, False) for i in range(len(names))]
        if bad:
            self._tell("check", Operation.CHECK, bad)
        return answers, failure

    def _write_batch(
        self, names: Sequence[BlockName], images: Sequence[memoryview]
    ) -> tuple[Answers, str | None]:
        answers: Answers = {}

        def store(deadline: Deadline) -> None:
            body = self._shape.pack(names)
            with self._client.lend(deadline) as channel:
                for i, (name, image) in enumerate(zip(names, images, strict=True)):
                    np.copyto(channel.exchange.image(i, len(image)), np.asarray(image))
                    channel.exchange.head(i).data[:] = header(name, image)
                held = channel.flags(Operation.WRITE, body, len(names), deadline)
            answers.update(enumerate(held))

        with self.counters.timing(self.counters.writes, self.sizes(names)) as moved:
            failure = self._guard.run("write", store, self._seconds(len(names)))
            moved += [answers.get(i, False) for i in range(len(names))]
        if refused := sum(not held for held in answers.values()):
            self.counters.drop("refused", refused)
            self.refusal = "the server has no room for it"
        if failure is not None:
            self.refusal = self._guard.explain(failure)
        return answers, failure

    def _tell(self, kind: str, operation: Operation, keys: Sequence[bytes]) -> None:
        def tell(deadline: Deadline) -> None:
            with self._client.lend(deadline) as channel:
                for part in _parts(keys):
                    channel.flags(operation, b"".join(part), 0, deadline)

        self._guard.run(kind, tell, self._timeout)


def _parts(keys: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [keys[at : at + MOST_KEYS] for at in range(0, len(keys), MOST_KEYS)]
