"""Quire's tiers under vLLM: a KV connector in two halves, and what they say to each other.

vLLM loads it by `--kv-transfer-config`; `docs/vllm.md` has the whole line. Only `connector` imports
vLLM.

    scheduler_half ── lookup, a Unix socket: what do the tiers have? ──▶ worker_half ── KVStore
                   ── orders, with each step: load, save, wait ───────▶
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.connectors.vllm.connector import QuireConnector

__all__ = ["QuireConnector"]


def __getattr__(name: str) -> Any:
    if name != "QuireConnector":
        raise AttributeError(f"module 'quire.connectors.vllm' has no attribute {name!r}")
    from quire.connectors.vllm.connector import QuireConnector

    return QuireConnector
