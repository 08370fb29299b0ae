"""Products with weights as GGUF files have them, or with codes whose scales lie apart."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from quire.kernels.gguf_blocks import BlockType
from quire.kernels.lent_memory import empty
from quire.kernels.numba.kernel import launches
from quire.kernels.numba.kernels import product_kernels
from quire.kernels.numba.results import is_large
from quire.kernels.numba.sizes import DIGITS, LANES, STEP, token_bytes

ITEMS = 8  # for each thread, where there are so many groups
SMALL = 1 << 17  # weights times tokens, below which other threads are awake too late


class Product:
    """Products with one matrix: interleaved weights `[groups, blocks, bytes]`, of which the last
    group may have rows more than `rows`.

    What is the same for all of them is worked out once: with one token, a product takes less time
    than the Python around it.
    """

    def __init__(
        self, kind: str, block: BlockType, weights: Tensor, rows: int, scales: Tensor | None = None
    ) -> None:
        """`kind`: by which name there is a kernel. `scales`, of codes alone: float32 `[groups,
        scales of a row, 1 or 2, 16]`, with minima where there are two."""
        groups, blocks, _ = weights.shape
        self.rows, self.groups = rows, groups
        self.is_whole = rows == groups * LANES
        self.gates = rows % (2 * LANES) == 0
        self._kernel = product_kernels[kind]
        self._weights, self._scales = weights, scales  # stay, as the kernel has their addresses
        steps = blocks * block.values // STEP if block.has_codes else 0
        self._token_bytes = steps * token_bytes(DIGITS)  # at most, for its codes
        self._same = (
            blocks * block.values,
            blocks,
            weights.data_ptr(),
            weights.stride(0),
            *_scales_apart(scales, blocks),
            0,
        )

    def __call__(
        self, x: Tensor, bias: Tensor | None, gated: bool = False, into: Tensor | None = None
    ) -> Tensor:
        """`x` `[tokens, size]` times the matrix; `gated`, of the halves of its rows
        `silu(first) * second`. `into`: columns of a tensor for the result of a product that
        `is_whole`, in float32."""
        if x.dtype != torch.float32:  # for which alone there are kernels: they take long to compile
            wide_bias = None if bias is None else bias.float()
            return self(x.float(), wide_bias, gated).to(x.dtype)
        x = x.contiguous()
        tokens, size = x.shape
        groups = self.groups // 2 if gated else self.groups
        out = into
        if out is None:
            out = empty((tokens, groups * LANES), torch.float32)
        threads = 1 if groups * LANES * size * tokens < SMALL else torch.get_num_threads()
        has_bias = bias is not None and self.is_whole
        if tokens:
            self._kernel(
                torch.float32,
                threads,
                0,
                0,
                0,
                tokens,
                groups,
                -(-groups // (ITEMS * threads)),
                x.data_ptr(),
                room.of((tokens + 1) * self._token_bytes),
                bias.data_ptr() if bias is not None else 0,
                has_bias,
                gated,
                is_large(out),
                out.data_ptr(),
                out.stride(0),
                *self._same,
            )
        if self.is_whole:
            return out
        out = out[:, : self.rows].contiguous()
        return out if bias is None else out.add_(bias)


def _scales_apart(scales: Tensor | None, blocks: int) -> tuple[int, int, int, int]:
    if scales is None:
        return 0, 0, 0, 1
    return scales.data_ptr(), scales.stride(0), scales.stride(1), blocks // scales.shape[1]


class _Room(threading.local):
    """For the codes of activations, which no product needs after its end: each thread's own."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.address = 0

    def of(self, num_bytes: int) -> int:
        if not num_bytes:
            return 0
        if launches.noted is not None:  # a recorded pass has memory of its own, which stays
            return torch.empty(num_bytes, dtype=torch.uint8).data_ptr()
        if num_bytes > len(self.memory):
            self.memory = torch.empty(num_bytes, dtype=torch.uint8)
            self.address = self.memory.data_ptr()
        return self.address


room = _Room()
