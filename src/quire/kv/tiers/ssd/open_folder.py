"""Opens a cache folder for an engine and makes it fit: its images, its quota, its disk.

    made for other images   both files are emptied
    quota smaller           the most recently used blocks are moved below the new end, then the
                            files are cut: before anything else is written
    quota larger            the files grow, as far as the disk has room

A kill at any point leaves records that are whole for images that are whole: a block is moved as
it is written, image first and record after it, and a record past the end of the data is torn.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quire.errors import ConfigError
from quire.kv.tiers.ssd.files import page_aligned, reserve
from quire.kv.tiers.ssd.geometry import Geometry
from quire.kv.tiers.ssd.records import Held
from quire.kv.tiers.ssd.volume import Volume
from quire.kv.tiers.tier import PAGE

logger = logging.getLogger(__name__)

MOVING_SECONDS = 5.0  # a start is not to wait for long until a smaller cache has been packed


class Opened(NamedTuple):
    """A folder, what it holds, and how much of what it held is torn."""

    volume: Volume
    held: Held
    torn: int


def open_volume(folder: Path, quota: int, geometry: Geometry) -> Opened:
    """The folder with as many slots as `quota` allows."""
    try:
        volume = Volume.open(folder, geometry, create=True)
    except OSError as error:
        raise ConfigError(
            f"ssd_cache_dir {folder} cannot be used ({_reason(error)}); "
            "give a folder that can be written."
        ) from error
    try:
        return _fit(volume, quota)
    except BaseException:
        volume.close()
        raise


def _fit(volume: Volume, quota: int) -> Opened:
    geometry, index = volume.geometry, volume.index
    allowed = geometry.slots_within(quota)
    wanted = min(allowed, geometry.slots_within(_room(volume)))
    lost = _replace_others(volume)
    held = _within_the_data(volume, index.read())
    held = _without_twins(volume, held)
    held = _packed_below(volume, held, wanted)
    for slot in held.torn.tolist():
        index.clear(slot)
    os.ftruncate(volume.data_fd, min(wanted, volume.slots_on_disk()) * geometry.slot_bytes)
    # A disk that is full of images must still take the records that say so.
    reserve(index.fd, geometry.index_bytes(wanted), may_be_sparse=False)
    reserve(volume.data_fd, wanted * geometry.slot_bytes, may_be_sparse=True)
    volume.slots = min(wanted, volume.slots_on_disk())
    volume.go_direct()
    if volume.slots < allowed:
        logger.warning(
            "%s has room for %.1f GB, %d blocks of the %d that ssd_cache_bytes allows",
            *(volume.folder, geometry.quota_for(volume.slots) / 1e9, volume.slots, allowed),
        )
    return Opened(volume, held, len(held.torn) + lost)


def _room(volume: Volume) -> int:
    """Bytes that the disk has for the folder: what it has already, or more, of which a twentieth
    is left to others."""
    disk, own = os.fstatvfs(volume.data_fd), volume.bytes_on_disk()
    return max(own, (own + disk.f_bavail * disk.f_frsize) * 19 // 20)


def _replace_others(volume: Volume) -> int:
    """Empty the files if they were made for other images, or have lost what they were made for.

    Returns one for the latter, since how many blocks that were is not known.
    """
    fd = volume.index.fd
    page = os.pread(fd, PAGE, 0)
    found = Geometry.of_first_page(page)
    if found == volume.geometry:
        return 0
    is_new = not page and not os.fstat(volume.data_fd).st_size
    if not is_new:
        was = "but not whole"
        if found:
            was = f"for blocks of {found.block_size} tokens and {found.image_bytes:,} bytes"
        logger.warning("%s held a cache made %s; it is replaced", volume.folder, was)
    os.ftruncate(volume.data_fd, 0)
    os.ftruncate(fd, 0)
    os.pwrite(fd, volume.geometry.first_page(), 0)
    return int(found is None and not is_new)


def _within_the_data(volume: Volume, held: Held) -> Held:
    """Records of slots that the data file does not have (any more) are torn."""
    there = held.slots < volume.slots_on_disk()
    torn = np.concatenate([held.torn, held.slots[~there]])
    return replace(held.only(there), torn=torn)


def _without_twins(volume: Volume, held: Held) -> Held:
    """A kill while a block was moved leaves two records with its key: the older one goes."""
    twins = held.twins()
    for slot in held.slots[twins].tolist():
        volume.index.clear(slot)
    return held.only(~twins)


def _packed_below(volume: Volume, held: Held, slots: int) -> Held:
    """The most recently used blocks, in slots below `slots`."""
    if not len(held) or held.slots.max() < slots:
        return held
    recent = np.zeros(len(held), dtype=bool)
    recent[max(0, len(held) - slots) :] = True  # least recently used come first
    below = held.slots < slots
    taken = set(held.slots[recent & below].tolist())
    free = iter([slot for slot in range(slots) if slot not in taken])
    for slot in held.slots[~recent & below].tolist():
        volume.index.clear(slot)
    kept = recent & below
    deadline = time.monotonic() + MOVING_SECONDS
    buffer = page_aligned(volume.geometry.slot_bytes)
    for at in np.flatnonzero(recent & ~below)[::-1].tolist():
        target = next(free)
        if time.monotonic() > deadline or not _move(volume, int(held.slots[at]), target, buffer):
            break
        held.slots[at] = target
        kept[at] = True
    logger.info("%s: %d of %d blocks fit the smaller cache", volume.folder, kept.sum(), len(held))
    return held.only(kept)


def _move(volume: Volume, source: int, target: int, buffer: memoryview) -> bool:
    size = volume.geometry.slot_bytes
    try:
        if os.preadv(volume.data_fd, [buffer], source * size) != size:
            return False
        if os.pwritev(volume.data_fd, [buffer], target * size) != size:
            return False
        volume.index.move(source, target)
    except OSError as error:
        logger.warning("%s: a block could not be moved (%s)", volume.folder, _reason(error))
        return False
    return True


def _reason(error: OSError) -> str:
    return os.strerror(error.errno or errno.EIO)
