"""Which checkpoint this is: a digest of all bytes of its files, worked out while they are loaded.

    leaf        = SHA-256(1 MiB of the file; the last leaf has the rest)
    file        = SHA-256("quire.file", size, leaf, leaf, …)
    checkpoint  = SHA-256("quire.checkpoint", kind, file, file, …)

Blocks of KV that outlive the process are named after it, so it covers everything that KV is
computed from: a digest of samples would let two fine-tunes of one model share KV. Threads hash the
leaves in any order, and the result depends neither on their number nor on that of the ranks.
`tests/models/test_digest.py` freezes it.

SHA-256, because processors have instructions for it, and hashlib lets other threads run meanwhile.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from copy import copy
from pathlib import Path

from quire.errors import ModelError
from quire.models.checkpoints.digest_cache import FileState, find_digest, keep_digest

LEAF = 1 << 20
READ = 8 * LEAF  # at once: each call may have to wait for the interpreter's lock
MOST_THREADS = 8
# The clock of a file system ticks: two changes in one tick leave the same times.
OLD_ENOUGH_NS = 2_000_000_000


class Fingerprint:
    """What tells a model from all others: the same for the same bytes, wherever they lie.

    Nothing is read before `begin`. `result` refuses if a file has changed since the fingerprint
    was made. So a source makes it before it looks into the files, and the engine asks for the
    result when they are loaded: then it is the digest of what was loaded.
    """

    def __init__(self, kind: str, paths: Sequence[Path] = ()) -> None:
        self._kind = kind
        self._files = [HashedFile(path) for path in paths]
        self._pool: ThreadPoolExecutor | None = None
        self._result: str | None = None

    def variant(self, what: str) -> Fingerprint:
        """That of a model which is made of the same files in another way."""
        if self._pool is not None:
            raise ValueError("A fingerprint has to be told apart before it begins.")
        found = copy(self)
        found._kind = f"{self._kind}, {what}"
        return found

    def begin(self) -> None:
        """Have threads hash the files that no earlier start has kept the digest of."""
        if self._pool is None:
            threads = min(MOST_THREADS, os.cpu_count() or 1)
            self._pool = ThreadPoolExecutor(threads, "quire-digest")
            for file in self._files:
                file.begin(self._pool)

    @property
    def is_known(self) -> bool:
        """Whether `result` does not have to wait."""
        return self._pool is not None and all(file.is_hashed for file in self._files)

    @property
    def bytes_hashed(self) -> int:
        return sum(file.bytes_hashed for file in self._files)

    def result(self) -> str:
        """Wait for it. ModelError if a file cannot be read, or has changed."""
        if self._result is None:
            self.begin()
            try:
                self._result = checkpoint_digest(self._kind, [f.finish() for f in self._files])
            finally:
                self.cancel()
        return self._result

    def cancel(self) -> None:
        """Let no thread begin to read any more."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


class HashedFile:
    """One file of a checkpoint, as it was when this was made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state = state_of(path)
        last_change = max(self._state.mtime_ns, self._state.ctime_ns)
        is_old_enough = time.time_ns() - last_change > OLD_ENOUGH_NS  # a later change will be seen
        # A file of one leaf is as quickly read as what would be kept of it.
        self._is_kept = is_old_enough and self._state.size > LEAF
        self._known: bytes | None = None
        self._leaves: list[Future[list[bytes]]] = []

    def begin(self, pool: Executor) -> None:
        self._known = find_digest(self._state)
        if self._known is None:
            starts = range(0, self._state.size, READ)
            self._leaves = [pool.submit(hash_leaves, self._path, start) for start in starts]

    @property
    def is_hashed(self) -> bool:
        return all(leaves.done() for leaves in self._leaves)

    @property
    def bytes_hashed(self) -> int:
        return self._state.size if self._leaves else 0

    def finish(self) -> bytes:
        """Its digest, kept for the next start."""
        leaves = (leaf for run in self._leaves for leaf in run.result())
        digest = self._known or file_digest(self._state.size, leaves)
        now = state_of(self._path)
        if now.is_rewritten(self._state):
            raise ModelError(
                f"{self._path} changed while it was loaded: start again when nothing writes to it."
            )
        if self._known is None and self._is_kept and now == self._state:
            keep_digest(self._state, digest)
        return digest


def hash_leaves(path: Path, start: int) -> list[bytes]:
    """The leaves that one read brings."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            run = memoryview(file.read(READ))
    except OSError as error:
        raise unreadable(path, error) from None
    return [hashlib.sha256(run[at : at + LEAF]).digest() for at in range(0, len(run), LEAF)]


def file_digest(size: int, leaves: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256(b"quire.file" + size.to_bytes(8, "little"))
    for leaf in leaves:
        digest.update(leaf)
    return digest.digest()


def checkpoint_digest(kind: str, files: Iterable[bytes]) -> str:
    name = kind.encode()
    digest = hashlib.sha256(b"quire.checkpoint" + len(name).to_bytes(8, "little") + name)
    for file in files:
        digest.update(file)
    return digest.hexdigest()


def state_of(path: Path) -> FileState:
    try:
        return FileState.of(path)
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(f"{path} cannot be read: {error.strerror or error}.")
