"""What happens to each token by itself, in plain torch: right on every device, fused nowhere.

A backend inherits these and replaces those that it has a faster way for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.activation import Activation, ClampedSwiGLU, Gating
from quire.kernels.adapters import add_adapters
from quire.kernels.batch import AttentionBatch
from quire.kernels.codes import CodeFormat, Codes, quantise
from quire.kernels.experts import ExpertMLPs, RouterProducts, RouterScores, Routing
from quire.kernels.linear import PackedMatrix, linear
from quire.kernels.pages import LatentPages, LayerPages
from quire.kernels.scoring import Scoring


class Rotation(NamedTuple):
    """What turns the heads of one step's tokens; made once, used by every layer."""

    cos: Tensor  # [tokens, 1, head_dim]
    sin: Tensor


class HeadScale(NamedTuple):
    """How the heads of q and k are normalised before they are turned."""

    weight: Tensor  # [heads + kv_heads, head_dim], of the model's type or float32
    eps: float


class PlainOps:
    def prepare(self, dtype: torch.dtype) -> None:
        pass

    def begin(self, batch: AttentionBatch) -> None:
        pass

    def add_rms_norm(
        self, stream: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor:
        if delta is not None:
            stream.add_(delta)
        return rms_norm(stream, weight, eps)

    def norm_products(
        self,
        stream: Tensor,
        weight: Tensor,
        eps: float,
        matrix: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor] | None:
        return None

    def rotate_and_write(
        self,
        qkv: Tensor,
        scale: HeadScale | None,
        rotation: Rotation,
        pages: LayerPages,
        batch: AttentionBatch,
    ) -> Tensor:
        kv_heads, values = pages.kv_heads, pages.kv_heads * pages.v_width
        qk, v = qkv.split_with_sizes((qkv.shape[1] - values, values), dim=1)
        qk = qk.unflatten(1, (-1, pages.k_width))
        if scale is not None:
            qk = rms_norm(qk, scale.weight, scale.eps)
        q, k = rotate(qk, rotation).split_with_sizes((qk.shape[1] - kv_heads, kv_heads), dim=1)
        self.write_kv(pages, k, v.unflatten(1, (kv_heads, pages.v_width)), batch)
        return q

    def rotate_and_attend(
        self,
        qkv: Tensor,
        rotation: Rotation,
        pages: LayerPages,
        batch: AttentionBatch,
        scoring: Scoring,
    ) -> Tensor | None:
        return None

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
        out.copy_(rotate(q, rotation))
        latents, k_rope = kv.split_with_sizes((pages.rank, pages.rope), dim=1)
        latents = rms_norm(latents, scale.weight, scale.eps)
        k_rope = rotate(k_rope.unsqueeze(1), rotation).squeeze(1)
        self.write_latents(pages, torch.cat((latents, k_rope), dim=1), batch)

    def gated_linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        packed: PackedMatrix | None,
        activation: Activation,
    ) -> Tensor:
        return self.act_and_mul(linear(x, weight, bias, packed), activation)

    def act_and_mul(self, gate_up: Tensor, activation: Gating) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if isinstance(activation, ClampedSwiGLU):
            return activation(gate, up)
        if activation is Activation.GELU_TANH:
            return F.gelu(gate, approximate="tanh").mul_(up)
        return F.silu(gate).mul_(up)

    def route(self, x: Tensor, scores: RouterScores, batch: AttentionBatch) -> Routing | None:
        return None

    def experts(self, x: Tensor, routing: Routing, mlps: ExpertMLPs) -> Tensor:
        """Every expert with every token, of which those count that chose the expert.

        That is far more work than was asked for, and the same for every step: no sort, no wait.
        """
        if mlps.own_tokens:
            return self._experts_one_by_one(x, routing, mlps)
        out, adapters = torch.zeros_like(x, dtype=torch.float32), mlps.adapters
        for expert in range(mlps.count):
            is_other = routing.experts != expert
            weights = routing.weights.float().masked_fill(is_other, 0.0).sum(1, keepdim=True)
            both = mlps.gate_up.multiply(expert, x)
            if adapters is not None:
                batch = adapters.batch.with_expert(expert, mlps.count)
                add_adapters(x, adapters.gate_up, batch, both)
            hidden = self.act_and_mul(both, mlps.activation)
            found = mlps.down.multiply(expert, hidden)
            if adapters is not None:
                add_adapters(hidden, adapters.down, batch, found)
            found = found.float().mul_(weights)
            out += found.masked_fill_(is_other.all(1, keepdim=True), 0.0)  # NaN times 0 is NaN
        if mlps.shared is not None:
            hidden = self.act_and_mul(F.linear(x, mlps.shared.gate_up), mlps.activation)
            out += F.linear(hidden, mlps.shared.down)
        return out.to(x.dtype)

    def _experts_one_by_one(self, x: Tensor, routing: Routing, mlps: ExpertMLPs) -> Tensor:
        """Each expert with its own tokens alone, which are waited for."""
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in range(mlps.count):
            tokens, places = (routing.experts == expert).nonzero(as_tuple=True)
            if not len(tokens):
                continue
            both = mlps.gate_up.multiply(expert, x[tokens])
            found = mlps.down.multiply(expert, self.act_and_mul(both, mlps.activation)).float()
            out.index_add_(0, tokens, found * routing.weights[tokens, places].float().unsqueeze(1))
        return out.to(x.dtype)

    def choosing_experts(
        self, x: Tensor, products: RouterProducts, mlps: ExpertMLPs
    ) -> Tensor | None:
        return None

    def quantised_norm(
        self, stream: Tensor, delta: Tensor | None, weight: Tensor, eps: float, form: CodeFormat
    ) -> Codes:
        return quantise(self.add_rms_norm(stream, delta, weight, eps), form)

    def quantised_gate(self, gate_up: Tensor, activation: Activation, form: CodeFormat) -> Codes:
        return quantise(self.act_and_mul(gate_up, activation), form)

    def write_latents(self, pages: LatentPages, latents: Tensor, batch: AttentionBatch) -> None:
        """Put `latents` `[tokens, rank + rope]` into their slots."""
        raise NotImplementedError

    def write_kv(self, pages: LayerPages, k: Tensor, v: Tensor, batch: AttentionBatch) -> None:
        raise NotImplementedError


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last dimension to a root mean square of one, then by `weight`.

    The numbers are Hugging Face's: normalised in float32, rounded to the model's type, weighted.
    With a weight in float32 beside a smaller type, they are rounded only once they are weighted.
    """
    shape = x.shape[-1:]
    if x.dtype == torch.float32 and weight.dim() == 1:
        return torch.rms_norm(x, shape, weight, eps)  # one call: there is nothing to round between
    if weight.dtype != x.dtype:
        return torch.rms_norm(x.float(), shape, None, eps).mul_(weight).to(x.dtype)
    return torch.rms_norm(x, shape, None, eps).mul_(weight)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn `x` `[tokens, heads, head_dim]`: each feature with the one half a head away."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return swapped.mul_(rotation.sin).addcmul_(x, rotation.cos)
