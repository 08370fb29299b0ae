"""The vocabulary's matrix, split by tokens: read by id going in, multiplied coming out."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from quire.layers.linear import Linear
from quire.layers.matrix import DenseMatrix
from quire.layers.tp import TensorParallel
from quire.layers.weights import Weight, span


class Vocabulary(Linear):
    """One row for each token. A model with a tied head uses one of these for both ends."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.shape = (vocab_size, hidden_size)
        self.part = tp.split_padded(vocab_size)
        self.matrix = DenseMatrix(len(self.part), hidden_size)

    def embed(self, token_ids: Tensor) -> Tensor:
        """`[tokens]` to `[tokens, hidden]`."""
        if self.tp.group is None and self.tp.size == 1:
            return self.matrix.rows(token_ids)
        own_ids = token_ids - self.part.start
        nearest = own_ids.clamp(0, len(self.part) - 1)
        rows = self.matrix.rows(nearest).masked_fill_((own_ids != nearest)[:, None], 0)
        return self.tp.all_reduce(rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` to `[rows, vocab]`, on rank 0; what padding gives lies past the end."""
        logits = self.tp.gather(self.matrix.multiply(hidden, None))
        return logits[:, : self.shape[0]]

    def weights(self, path: str) -> Iterator[Weight]:
        rows = range(self.shape[0])[span(self.part)]  # without the last rank's padding
        whole = Weight(path, self.shape, part=(span(rows),))
        yield from self.matrix.weights(whole, slice(len(rows)))
