"""Kernels for a CPU: all between a model's matrix products, and products with quantised matrices.

Numba compiles them when they are first used; later processes load what it made.
"""

from importlib.util import find_spec

if find_spec("numba") is None:
    raise ImportError("No module named 'numba'", name="numba")

from quire.kernels.numba.backend import NumbaBackend

__all__ = ["NumbaBackend"]
