"""`quire bench serve`: load on any server with OpenAI's API, and what its users would feel."""

from quire.bench.serve.command import add_arguments, run

__all__ = ["add_arguments", "run"]
