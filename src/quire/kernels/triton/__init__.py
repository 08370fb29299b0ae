"""Paged KV on a GPU, in Triton. Import this package only where Triton is installed."""

from quire.kernels.triton.backend import TritonBackend

__all__ = ["TritonBackend"]
