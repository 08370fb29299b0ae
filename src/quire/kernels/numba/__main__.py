"""`python -m quire.kernels.numba`: compile the kernels now, so that no first run has to wait."""

from __future__ import annotations

from quire.kernels.gguf_blocks import CODES, TYPES
from quire.kernels.gguf_product import kernels
from quire.kernels.numba.backend import NumbaBackend
from quire.kernels.numba.kernel import DTYPES
from quire.kernels.numba.kernels import adapter_kernel


def main() -> None:
    backend = NumbaBackend()
    for dtype in DTYPES:
        backend.compile(dtype)
        adapter_kernel.compile(dtype)
    for kind in TYPES | CODES:  # not by activations of eight bits, which few ask for
        kernels.compile(kind)


if __name__ == "__main__":
    main()
