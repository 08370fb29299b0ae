"""Which I/O engine a disk tier uses."""

from __future__ import annotations

from quire.kv.tiers.ssd.io_engine import IoEngine
from quire.kv.tiers.ssd.threads import ThreadEngine
from quire.kv.tiers.ssd.uring import UringEngine


def choose_engine(name: str = "auto") -> IoEngine:
    """`io_uring` where the kernel allows it, else `threads`; by name, that one or an OSError."""
    if name == "threads":
        return ThreadEngine()
    try:
        return UringEngine()
    except OSError:
        if name != "auto":
            raise
        return ThreadEngine()
