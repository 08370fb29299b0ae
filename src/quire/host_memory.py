"""How much of the machine's memory is free."""

from __future__ import annotations

import os
from pathlib import Path


def free_host_memory() -> int:
    """Bytes that can be taken without swapping; a container's limit counts too."""
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
    return max(0, min(free, limit - used + reclaimable))
