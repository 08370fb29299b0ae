"""Replicas on Ray Serve: `serve.run(quire.serve.deployment(model, num_replicas=2))`."""

from quire.serve.application import deployment

__all__ = ["deployment"]
