"""Digests of files, kept between starts, so that a file that is still the same is read only once.

One small file for each digest, named after the digested file's path. It is written aside and
renamed, so that other processes see all of it or nothing. A cache that is missing, damaged or
read-only costs time and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quire.cache_folder import cache_folder

FORMAT = "quire file digest 1"  # another one for every change of how digests are made
MOST_ENTRIES = 1000
DIGEST_BYTES = hashlib.sha256().digest_size
ENTRY_BYTES = 1 << 16  # more than the longest path takes


@dataclass(frozen=True)
class FileState:
    """What the file system says of a file: a different one once the file was written to.

    `ctime_ns` cannot be set, so it tells of a writer who has put the old `mtime_ns` back. The
    number of the device is left out: containers and network mounts get a new one every time.
    """

    path: str  # with all links followed
    size: int
    inode: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        real = os.path.realpath(path)
        stat = os.stat(real)
        return cls(real, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)

    def is_rewritten(self, before: FileState) -> bool:
        """Whether its content is another, as far as can be told; a chmod changes `ctime_ns` too."""
        return replace(self, ctime_ns=before.ctime_ns) != before


def find_digest(file: FileState) -> bytes | None:
    """The digest that was kept of the file as it is now."""
    try:
        with _entry_path(file).open("rb") as stored:
            line, _, check = stored.read(ENTRY_BYTES).partition(b"\n")
        if check.decode() != hashlib.sha256(line).hexdigest():
            return None
        entry = json.loads(line)
        digest = bytes.fromhex(entry["digest"])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None
    return digest if entry == _entry(file, digest) and len(digest) == DIGEST_BYTES else None


def keep_digest(file: FileState, digest: bytes) -> None:
    """In place of an older one of the same path."""
    line = json.dumps(_entry(file, digest)).encode()
    with suppress(OSError, RuntimeError):  # of a full disk, a read-only folder, no home
        path = _entry_path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as aside:
            try:
                aside.write(line + b"\n" + hashlib.sha256(line).hexdigest().encode())
                aside.flush()
                os.replace(aside.name, path)
            except OSError:
                os.unlink(aside.name)
                raise
        _drop_oldest(path.parent)


def _entry(file: FileState, digest: bytes) -> dict[str, str | int]:
    return {"format": FORMAT, **asdict(file), "digest": digest.hex()}


def _entry_path(file: FileState) -> Path:
    name = hashlib.sha256(os.fsencode(file.path)).hexdigest()
    return cache_folder() / "digests" / name[:32]


def _drop_oldest(folder: Path) -> None:
    """What a killed process left aside grows old here, too."""
    with os.scandir(folder) as found:
        entries = list(found)
    if len(entries) <= MOST_ENTRIES:
        return
    written: list[tuple[float, str]] = []
    for entry in entries:
        with suppress(FileNotFoundError):  # another process drops, too
            written.append((entry.stat().st_mtime, entry.path))
    for _, path in sorted(written)[:-MOST_ENTRIES]:
        with suppress(FileNotFoundError):
            os.unlink(path)
