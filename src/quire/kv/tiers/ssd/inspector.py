"""Looks into a cache folder without an engine: what `quire cache` does.

`stat` only reads, and may do so beside a running engine. `verify` and `clear` change the folder, so
they hold it as an engine would.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from quire.errors import ConfigError
from quire.kv.tiers.ssd.files import bytes_on_disk, lock_folder
from quire.kv.tiers.ssd.geometry import DATA_FILE, INDEX_FILE, LOCK_FILE, OWN_FILES, Geometry
from quire.kv.tiers.ssd.index_file import IndexFile
from quire.kv.tiers.ssd.verifier import verify_volume
from quire.kv.tiers.ssd.volume import Volume
from quire.kv.tiers.tier import PAGE

SOCKET = "quire-kv.sock"  # of `quire cache serve`, which has a lock beside it
_MEND = "give a folder that ssd_cache_dir has named"


@dataclass
class NamespaceFacts:
    """The blocks that one model, with its settings and one tenant, has in a folder."""

    blocks: int = 0
    last_use_ns: int = 0


@dataclass
class FolderFacts:
    """What a cache folder holds, as far as its index says."""

    folder: str
    image_bytes: int
    block_size: int
    layout_version: int
    slots: int
    blocks: int
    torn: int  # records that are not whole
    bytes_on_disk: int
    is_in_use: bool
    last_use_ns: int
    namespaces: dict[str, NamespaceFacts] = field(default_factory=dict)  # by root key


def stat(folder: Path) -> FolderFacts:
    geometry = _geometry_of(folder)
    with open(folder / INDEX_FILE, "rb") as index, open(folder / DATA_FILE, "rb") as data:
        held = IndexFile(index.fileno()).read()
        size = os.fstat(data.fileno()).st_size
        on_disk = bytes_on_disk(index.fileno()) + bytes_on_disk(data.fileno())
    namespaces: dict[str, NamespaceFacts] = {}
    last_uses = held.records["used"].tolist()
    for root, last_use in zip(held.roots(), last_uses, strict=True):
        facts = namespaces.setdefault(root.hex(), NamespaceFacts())
        facts.blocks += 1
        facts.last_use_ns = last_use  # they come in the order of use
    return FolderFacts(
        folder=str(folder),
        image_bytes=geometry.image_bytes,
        block_size=geometry.block_size,
        layout_version=geometry.layout_version,
        slots=size // geometry.slot_bytes,
        blocks=len(held),
        torn=len(held.torn),
        bytes_on_disk=on_disk,
        is_in_use=_is_in_use(folder),
        last_use_ns=max(last_uses, default=0),
        namespaces=namespaces,
    )


def verify(folder: Path, start: Callable[[int], Callable[[], object]]) -> Counter[str]:
    """Read every block and drop those that are not whole; how many there were of each verdict.

    `start` is told how many blocks there are, and what it returns is called after each.
    """
    geometry = _geometry_of(folder)
    try:
        with closing(Volume.open(folder, geometry, create=False)) as volume:
            volume.go_direct()
            return verify_volume(volume, start)
    except OSError as error:
        raise _cannot(folder, error) from error


def clear(folder: Path) -> int:
    """Remove the files of the cache and nothing else; returns the bytes that are free again."""
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}; {_MEND}.")
    there = [folder / name for name in OWN_FILES if (folder / name).exists()]
    if not there:
        raise ConfigError(f"{folder} is not a cache folder; {_MEND}.")
    try:
        lock = lock_folder(folder)
        try:
            freed = sum(path.stat().st_size for path in there)
            _remove_leftover_socket(folder)
            for path in there:  # the lock last
                path.unlink(missing_ok=True)
        finally:
            os.close(lock)
    except OSError as error:
        raise _cannot(folder, error) from error
    return freed


def _remove_leftover_socket(folder: Path) -> None:
    """The lock of a server that has ended, and its socket if it was killed."""
    lock_path = folder / f"{SOCKET}.lock"
    try:
        with open(lock_path, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (folder / SOCKET).unlink(missing_ok=True)
            lock_path.unlink()
    except (FileNotFoundError, BlockingIOError):
        pass  # there is none, or a server listens that no engine has asked for anything


def _geometry_of(folder: Path) -> Geometry:
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}; {_MEND}.")
    try:
        with open(folder / INDEX_FILE, "rb") as index:
            found = Geometry.of_first_page(index.read(PAGE))
    except FileNotFoundError:
        found = None
    except OSError as error:
        raise _cannot(folder, error) from error
    if found is None or not (folder / DATA_FILE).exists():
        raise ConfigError(f"{folder} is not a cache folder; {_MEND}.")
    return found


def _is_in_use(folder: Path) -> bool:
    try:
        with open(folder / LOCK_FILE, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _cannot(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{folder} cannot be used ({error.strerror}); check who owns it.")
