"""The contract every backend keeps, and the choice among them."""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.activation import Activation, Gating
from quire.kernels.batch import AttentionBatch
from quire.kernels.codes import CodeFormat, Codes
from quire.kernels.experts import ExpertMLPs, RouterProducts, RouterScores, Routing
from quire.kernels.linear import PackedMatrix
from quire.kernels.pages import LatentPages, LayerPages
from quire.kernels.plain import HeadScale, Rotation
from quire.kernels.scoring import Scoring

log = logging.getLogger("quire")


class Backend(Protocol):
    """All that a model computes besides its matrix products, and what is fused with them.

    A pass over the layers goes: `begin` with the batch of each KV group, then for each layer
    `rotate_and_write` (or `write_kv`) and `paged_attention` with that layer's pages and the batch
    of its group. A backend keeps nothing about a pass but in the batch's `plan`.
    """

    name: str

    def prepare(self, dtype: torch.dtype) -> None:
        """Begin what takes a while before tensors of this type can be computed; do not wait."""

    def begin(self, batch: AttentionBatch) -> None:
        """Begin a pass over this batch: forget what another pass has worked out about it.

        The lengths on the device may be others than in the last pass over the same batch. A graph
        that is captured has this call inside, so that it works out in itself all that it needs.
        """

    def add_rms_norm(
        self, stream: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor:
        """Add `delta` to `stream` `[tokens, hidden]` in place; the sum normalised, as a new tensor.

        The sum is rounded to the stream's type before it is normalised. `weight` is of that type,
        or float32: then the result is rounded once, after it is weighted.
        """
        ...

    def norm_products(
        self,
        stream: Tensor,
        weight: Tensor,
        eps: float,
        matrix: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor] | None:
        """`add_rms_norm` of a stream that nothing is to be added to, and what a small matrix makes
        of that, in `dtype`; None: one kernel does not do both."""
        ...

    def rotate_and_write(
        self,
        qkv: Tensor,
        scale: HeadScale | None,
        rotation: Rotation,
        pages: LayerPages,
        batch: AttentionBatch,
    ) -> Tensor:
        """From `qkv` `[tokens, features]`, the heads of q, then those of k, then those of v:
        returns q `[tokens, heads, k_width]`, normalised by `scale` and turned; k, treated alike,
        and v are in their slots."""
        ...

    def gated_linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        packed: PackedMatrix | None,
        activation: Activation,
    ) -> Tensor:
        """`act_and_mul` of a linear layer's result (`kernels/linear.py`): `[tokens, features]`."""
        ...

    def act_and_mul(self, gate_up: Tensor, activation: Gating) -> Tensor:
        """`activation(gate) * up` of `[tokens, 2 * features]`: the gate is the first half.

        A `ClampedSwiGLU` says itself how the halves are joined.
        """
        ...

    def route(self, x: Tensor, scores: RouterScores, batch: AttentionBatch) -> Routing | None:
        """The experts of each token, where a kernel chooses them; None: torch is to."""
        ...

    def experts(self, x: Tensor, routing: Routing, mlps: ExpertMLPs) -> Tensor:
        """The weighted sum of what its experts make of each token: `[tokens, hidden]`.

        No token is left out, however many choose the same expert. One that goes nowhere is zero.
        """
        ...

    def choosing_experts(
        self, x: Tensor, products: RouterProducts, mlps: ExpertMLPs
    ) -> Tensor | None:
        """`experts` of a choice that is made by their kernels; None: it is to be made before."""
        ...

    def quantised_norm(
        self, stream: Tensor, delta: Tensor | None, weight: Tensor, eps: float, form: CodeFormat
    ) -> Codes:
        """`add_rms_norm`, whose result is quantised."""
        ...

    def quantised_gate(self, gate_up: Tensor, activation: Activation, form: CodeFormat) -> Codes:
        """`act_and_mul`, whose result is quantised."""
        ...

    def write_kv(self, pages: LayerPages, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        """Put `k` and `v` `[tokens, kv_heads, width]` into their slots."""

    def paged_attention(
        self, q: Tensor, pages: LayerPages, batch: AttentionBatch, scoring: Scoring
    ) -> Tensor:
        """Attend `q` `[tokens, heads, k_width]` to its sequences: `[tokens, heads, v_width]`.

        The step's own KV is already written, for all its sequences. Blocks that lie before the
        window of every new token of their sequence are not read.
        """
        ...

    def rotate_and_attend(
        self,
        qkv: Tensor,
        rotation: Rotation,
        pages: LayerPages,
        batch: AttentionBatch,
        scoring: Scoring,
    ) -> Tensor | None:
        """`rotate_and_write` without a norm, and `paged_attention`; None: one kernel does not do
        both."""
        ...

    def rotate_and_write_latents(
        self,
        q: Tensor,
        kv: Tensor,
        scale: HeadScale,
        rotation: Rotation,
        pages: LatentPages,
        batch: AttentionBatch,
        out: Tensor,
    ) -> None:
        """From `kv` `[tokens, rank + rope]`: latents, normalised by `scale`, and rotated features
        are in their slots. `q` and `out` `[tokens, heads, rope]`: the queries' features, turned;
        both may be the same."""

    def latent_attention(
        self, q: Tensor, pages: LatentPages, batch: AttentionBatch, scale: float
    ) -> Tensor:
        """Attend `q` `[tokens, heads, rank + rope]`, which is in the space of latents, to its
        sequences: `[tokens, heads, rank]`."""
        ...

    def expanded_attention(
        self, q: Tensor, kv: Tensor, k_rope: Tensor, batch: AttentionBatch, scale: float
    ) -> Tensor:
        """Attend `q` `[tokens, heads, nope + rope]` to K and V that were computed from latents:
        `[tokens, heads, values]`.

        `kv` `[context, heads, nope + values]` has the tokens of all sequences end to end, and
        `k_rope` `[context, rope]` the rotated features that all heads share. Lengths on the host
        are those on the device.
        """
        ...

    def copy_blocks(self, cache: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Copy block images `[blocks, …]` from `sources` to `targets` (int64 ids)."""


def backend_for(device: torch.device) -> Backend:
    if device.type == "cuda":
        try:
            from quire.kernels.triton import TritonBackend
        except ModuleNotFoundError as missing:
            raise ConfigError(
                f"A GPU needs {missing.name}; pip install 'quire[gpu]' or use device='cpu'."
            ) from None
        return TritonBackend()
    return _for_cpu()


def _for_cpu() -> Backend:
    try:
        from quire.kernels.numba import NumbaBackend
    except ImportError as missing:  # there is no Numba yet for the newest Python, for one
        log.warning("CPU kernels are off, which costs speed: %s", missing)
        from quire.kernels.cpu import CpuBackend

        return CpuBackend()
    return NumbaBackend()
