"""All that goes wrong: steps that fail, a disk that lies, a network that is worse.

Each kind of fault is given out for a while and then taken back, because a tier that is always
broken is as dull as one that never is.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import redis
from faulty_disk import FaultyDisk
from redis_server import RedisServer
from tcp_proxy import TcpProxy

from quire.kv.tiers.ssd.geometry import DATA_FILE, INDEX_FILE
from quire.kv.tiers.tier import PAGE
from quire.runner.sampling.sampler import BadLogits
from soak.tally import Tally

Act = Callable[[], None]


class InjectedFailure(RuntimeError):
    """A step that fails because the soak wants it to: the engine may log it, and must go on."""


class StepFaults:
    """Steps that fail at any of their three stages."""

    def __init__(self, runner, dice: random.Random, tally: Tally, chance: float) -> None:
        self.dice, self.tally, self.chance = dice, tally, chance
        runner.before_copy = lambda copies: self._strike("before its copies")
        runner.before_launch = self._before_launch
        runner.before_result = lambda: self._strike("under way")

    def _before_launch(self, plan) -> None:
        if plan.samples and self.dice.random() < self.chance / 8:
            self.tally.faults["step: no usable logits"] += 1
            raise BadLogits([self.dice.randrange(len(plan.samples))])
        self._strike("at its launch")

    def _strike(self, when: str) -> None:
        if self.dice.random() < self.chance:
            kind = self.dice.choice([InjectedFailure, MemoryError])
            name = "out of memory" if kind is MemoryError else "fails"
            self.tally.faults[f"step: {name} {when}"] += 1
            raise kind("injected")


class Troubles:
    """One fault after the other, of those that `faults` names, with peace in between."""

    def __init__(self, name: str, dice: random.Random, tally: Tally, peace_s: float) -> None:
        self.name, self.dice, self.tally, self.peace_s = name, dice, tally, peace_s
        self.faults: dict[str, Act] = {}
        self._next_at = 0.0
        self._is_peace = False

    def act(self) -> None:
        """Between two steps."""
        now = time.monotonic()
        if now < self._next_at:
            return
        self.heal()
        self._is_peace = not self._is_peace
        self._next_at = now + self.dice.expovariate(1 / self.peace_s)
        if not self._is_peace:
            self.strike(self.dice.choice(list(self.faults)))

    def strike(self, fault: str) -> None:
        self.tally.faults[f"{self.name}: {fault}"] += 1
        self.faults[fault]()

    def heal(self) -> None:
        raise NotImplementedError


class FlakyDisk(FaultyDisk):
    """Of the calls that a fault concerns only some fail, as `chance` has it.

    The tier leaves a folder alone after a few errors in a row, which ends the fun.
    """

    chance = 1.0

    def _is_ours(self, fd: int) -> bool:
        return super()._is_ours(fd) and random.random() < self.chance


class DiskTroubles(Troubles):
    """Calls that fail go through `disk`; what is on it is changed behind the tier's back."""

    def __init__(self, disk: FlakyDisk, dice: random.Random, tally: Tally) -> None:
        super().__init__("disk", dice, tally, peace_s=0.15)
        self.disk = disk
        self.faults = {
            "read EIO": lambda: self._set("read_error", errno.EIO),
            "write EIO": lambda: self._set("write_error", errno.EIO),
            "write ENOSPC": lambda: self._set("write_error", errno.ENOSPC),
            "index EIO": lambda: self._set("index_error", errno.EIO),
            "index ENOSPC": lambda: self._set("index_error", errno.ENOSPC),
            "short I/O": lambda: self._set("short_by", self.dice.choice([1, 512, PAGE])),
            "writes lost": lambda: self.disk.forget(stop_after=self.dice.randrange(PAGE * 4)),
            "a bit of an image": lambda: self._flip(DATA_FILE),
            "a bit of the index": lambda: self._flip(INDEX_FILE),
            "slots swapped": self._swap,
            "data truncated": lambda: self._truncate(DATA_FILE),
            "index truncated": lambda: self._truncate(INDEX_FILE),
        }

    def strike(self, fault: str) -> None:
        self.disk.chance = self.dice.choice([0.05, 0.2, 0.2, 1.0])
        super().strike(fault)

    def heal(self) -> None:
        disk = self.disk
        disk.read_error = disk.write_error = disk.index_error = disk.short_by = 0
        disk.forget(stop_after=None)

    def _set(self, name: str, value: int) -> None:
        setattr(self.disk, name, value)

    def _flip(self, file: str) -> None:
        for _ in range(self.dice.choice([1, 20])):
            if size := self._size(file):
                self._flip_at(self.disk.folder / file, self.dice.randrange(size))

    def _flip_at(self, path: Path, offset: int) -> None:
        # Without fsync: the tier writes past the page cache, and the kernel calls the mixture EIO.
        with open(path, "r+b", buffering=0) as file:
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes(each ^ 1 << self.dice.randrange(8) for each in byte))

    def _swap(self) -> None:
        """Whole blocks in each other's place: right in themselves, but not what is asked for."""
        pages = self._size(DATA_FILE) // (2 * PAGE)  # images are small: a slot is two pages
        if pages < 2:
            return
        a, b = self.dice.sample(range(pages), 2)
        path = self.disk.folder / DATA_FILE
        with open(path, "r+b", buffering=0) as file:
            parts = [os.pread(file.fileno(), 2 * PAGE, at * 2 * PAGE) for at in (a, b)]
            for part, at in zip(parts, (b, a), strict=True):
                file.seek(at * 2 * PAGE)
                file.write(part)

    def _truncate(self, file: str) -> None:
        if size := self._size(file):
            os.truncate(self.disk.folder / file, self.dice.randrange(size))

    def _size(self, file: str) -> int:
        path = Path(self.disk.folder / file)
        return path.stat().st_size if path.exists() else 0


class NetworkTroubles(Troubles):
    """A proxy before a server that is killed, stopped, emptied, filled and edited."""

    def __init__(
        self, server: RedisServer, proxy: TcpProxy, dice: random.Random, tally: Tally
    ) -> None:
        super().__init__("network", dice, tally, peace_s=0.3)
        self.server, self.proxy = server, proxy
        proxy.corrupt_every = 97  # replies are short, since images are small
        self._is_killed = self._is_paused = self._is_full = False
        modes = ("black hole", "reset", "trickle", "corrupt", "cut")
        self.faults = {mode: lambda mode=mode: self._set_mode(mode) for mode in modes}
        self.faults |= {
            "the port is closed": self.proxy.vanish,
            "server killed": self._kill,
            "server stopped": self._pause,
            "server full": self._fill,
            "keys deleted": lambda: self._edit(lambda values: None),
            "values swapped": lambda: self._edit(lambda values: values[::-1]),
            "values cut": lambda: self._edit(lambda values: [v[: len(v) // 2] for v in values]),
            "bits of values": lambda: self._edit(self._flipped),
        }

    def heal(self) -> None:
        self.proxy.mode = "pass"
        if self._is_killed:
            self.server.start()
        if self._is_paused:
            self.server.resume()
        if self._is_full:
            self.server.plain.config_set("maxmemory", 0)
        self._is_killed = self._is_paused = self._is_full = False
        if not self.proxy.is_listening:
            self.proxy.listen()

    def _set_mode(self, mode: str) -> None:
        self.proxy.cut_after = self.dice.randrange(400)
        self.proxy.mode = mode

    def _kill(self) -> None:
        self.server.kill()
        self._is_killed = True

    def _pause(self) -> None:
        self.server.pause()
        self._is_paused = True

    def _fill(self) -> None:
        self.server.plain.config_set("maxmemory", 1)
        self._is_full = True

    def _edit(self, change: Callable[[list[bytes]], list[bytes] | None]) -> None:
        """Some values, behind the tier's back."""
        with suppress(redis.RedisError):
            keys = self.server.plain.keys()
            keys = self.dice.sample(keys, min(len(keys), 40))
            values = [value or b"" for value in self.server.plain.mget(keys)] if keys else []
            changed = change(values)
            if changed is None and keys:
                self.server.plain.delete(*keys)
            elif changed:
                self.server.plain.mset(dict(zip(keys, changed, strict=True)))

    def _flipped(self, values: list[bytes]) -> list[bytes]:
        flipped = [bytearray(value) for value in values]
        for value in flipped:
            if value:
                value[self.dice.randrange(len(value))] ^= 1 << self.dice.randrange(8)
        return [bytes(value) for value in flipped]
