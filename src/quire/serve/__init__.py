"""Replicas on Ray Serve: `serve.run(quire.serve.deployment(model, num_replicas=2))`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.serve.application import deployment

__all__ = ["deployment"]


def __getattr__(name: str) -> Any:
    """Ray is imported when it is needed."""
    if name != "deployment":
        raise AttributeError(f"module 'quire.serve' has no attribute {name!r}")
    from quire.serve.application import deployment

    return deployment
