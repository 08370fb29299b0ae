"""`quire bench serve`: load on any server with OpenAI's API, and what its users would feel."""

from quire.bench.serve.command import run
from quire.bench.serve.flags import add_arguments

__all__ = ["add_arguments", "run"]
