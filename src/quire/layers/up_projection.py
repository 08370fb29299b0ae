"""The matrix that makes each head's K and V from a latent (`kv_b_proj`), used in three ways.

Each head has rows for `nope` features of K and for the values of V, by `rank` columns:

    expand    latent · K and V rows, transposed     K and V of some heads
    absorb    q's nope features · K rows            q in the space of latents
    values    sums of latents · V rows, transposed  what V's own sums would be
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.adapters.up_adapters import UpAdapters
from quire.layers.batch_parts import BatchPart
from quire.layers.formats import MatrixFormats
from quire.layers.linear import ColumnLinear, Output
from quire.layers.matrix import DenseMatrix
from quire.layers.quantized.matrix import QuantizedFormat
from quire.layers.tp import TensorParallel
from quire.layers.weights import sibling, view


class UpProjection(ColumnLinear):
    """Stored as numbers, whatever the checkpoint has: no format's kernels multiply all three ways.

    It is a small part of a model: 2 GB of DeepSeek V3's 670.
    """

    def __init__(self, rank: int, heads: int, nope: int, values: int, tp: TensorParallel) -> None:
        output = Output("kv_b_proj", heads, nope + values, "attention heads")
        super().__init__(rank, (output,), False, tp)
        self.nope, self.width = nope, nope + values
        self._dtype = torch.float32
        self.adapters: UpAdapters | None = None

    def store_in(self, formats: MatrixFormats, path: str) -> None:
        chosen = formats.of(sibling(path, self.outputs[0].name))
        if not (isinstance(chosen, QuantizedFormat) and chosen.makes):  # then there is no need to
            super().store_in(formats, path)

    def make_room(self, dtype: torch.dtype, device: torch.device) -> None:
        super().make_room(dtype, device)
        self._dtype = dtype

    def lay_out(self) -> None:
        """Dequantise it, once it is loaded."""
        stored = self.matrix
        if isinstance(stored, DenseMatrix):
            return
        device = next(stored.parameters()).device
        self.matrix = DenseMatrix(stored.out_features, stored.in_features)
        numbers = stored.rows(torch.arange(stored.out_features, device=device))
        self.matrix.weight = view(numbers.to(self._dtype))

    def _by_head(self) -> Tensor:
        """`[heads, nope + values, rank]`."""
        matrix = self.matrix
        assert isinstance(matrix, DenseMatrix)
        found: Tensor = matrix.weight.unflatten(0, (-1, self.width))
        return found

    def expand(self, latents: Tensor, heads: range, part: BatchPart) -> Tensor:
        """K, not turned, and V of these heads: `[tokens, heads, nope + values]`."""
        rows = self._by_head()[heads.start : heads.stop].flatten(0, 1)
        found: Tensor = (latents @ rows.T).unflatten(1, (len(heads), self.width))
        if self.adapters is not None:
            self.adapters.add_expanded(latents, found, heads, part)
        return found

    def absorb(self, q: Tensor, out: Tensor, part: BatchPart | None = None) -> None:
        """`q` `[tokens, heads, nope]` to `out` `[tokens, heads, rank]`; the tokens are those of a
        part of a batch, or all."""
        rows = self._by_head()[:, : self.nope]
        if multiplies_few(q, rows):
            from quire.kernels.triton.latent.absorb import absorb

            absorb(q, rows, out)
        else:
            torch.bmm(q.transpose(0, 1), rows, out=out.transpose(0, 1))
        if self.adapters is not None:
            self.adapters.add_absorbed(q, out, part)

    def values_of(self, sums: Tensor, part: BatchPart | None = None) -> Tensor:
        """`sums` of latents `[tokens, heads, rank]` to those of V: `[tokens, heads, values]`."""
        rows = self._by_head()[:, self.nope :]
        if multiplies_few(sums, rows):
            from quire.kernels.triton.latent.absorb import values_of

            out = values_of(sums, rows)
        else:
            out = sums.new_empty((*sums.shape[:2], self.width - self.nope))
            torch.bmm(sums.transpose(0, 1), rows.transpose(1, 2), out=out.transpose(0, 1))
        if self.adapters is not None:
            self.adapters.add_values(sums, out, part)
        return out


def multiplies_few(x: Tensor, rows: Tensor) -> bool:
    """Whether a GPU has kernels of its own for so few tokens."""
    if not x.is_cuda:
        return False
    from quire.kernels.triton.latent.absorb import is_few

    return is_few(x, rows)
