"""How much of the machine's memory is free."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path


def free_host_memory() -> int:
    """Bytes that can be taken without swapping; limits of the container and of `ulimit` count."""
    return max(0, min(_free(), _left_to_this_process()))


def _left_to_this_process() -> int:
    """Bytes of the address space that `ulimit -v` allows it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:  # not Linux
        return limit
    return limit - pages * resource.getpagesize()


def _free() -> int:
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / f"memory.{n}").read_text()) for n in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        reclaimable = int(stat["inactive_file"])  # files that were read count as used
    except (OSError, ValueError, KeyError):  # no group, or no limit set
        return free
    return min(free, limit - used + reclaimable)


def own_memory() -> int:
    """Bytes that this process has in memory, without what is mapped from files; 0 if unknown."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)
