"""How well two texts fit: what has to be computed for it, and the scores that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.errors import RequestError
from quire.models.pooling.facts import EMBED, PoolingFacts
from quire.models.pooling.inputs import DOCUMENT, QUERY, ListName, TextInput, TextReader

Vectors = Sequence[npt.NDArray[Any]]


@dataclass(frozen=True)
class Scoring:
    """One text on the left goes with each on the right; of several, each with its like.

    A reranker reads both texts of a pair at once. Of other models it is the cosine of embeddings,
    each with the model's prompt for queries or documents, if it has one.
    """

    inputs: list[TextInput]
    by_cosine: bool
    num_left: int
    num_right: int

    @classmethod
    def of(
        cls,
        reader: TextReader,
        facts: PoolingFacts,
        left: Sequence[str],
        right: Sequence[str],
        *,
        truncate: int | None = None,
        instruction: str | None = None,
        names: tuple[str, str] = ("data_1", "data_2"),
    ) -> Scoring:
        """`names`: what the caller calls the two sides, for errors."""
        if not right or len(left) not in (1, len(right)):
            raise RequestError(
                f"{len(left)} texts cannot be paired with {len(right)}; give one, or as many."
            )
        if facts.task == EMBED:
            a, b = map(ListName, names)
            inputs = reader.texts(left, prompt_name=QUERY, truncate=truncate, named=a)
            inputs += reader.texts(right, prompt_name=DOCUMENT, truncate=truncate, named=b)
            return cls(inputs, True, len(left), len(right))
        if facts.size != 1:
            raise RequestError(
                f"A score is one number, and this model has {facts.size} classes; ask it to "
                f"classify."
            )
        each = left if len(left) == len(right) else [left[0]] * len(right)
        pairs = list(zip(each, right, strict=True))
        inputs = reader.pairs(
            pairs, truncate=truncate, instruction=instruction, named=ListName(names[1])
        )
        return cls(inputs, False, len(left), len(right))

    def scores(self, vectors: Vectors) -> list[float]:
        """One for each text on the right; embeddings have length 1."""
        if not self.by_cosine:
            return [float(vector[0]) for vector in vectors]
        left, right = vectors[: self.num_left], vectors[self.num_left :]
        return [float(np.dot(left[self._left(i)], text)) for i, text in enumerate(right)]

    def token_ids(self, index: int) -> list[int]:
        """Of both texts behind one score."""
        if not self.by_cosine:
            return list(self.inputs[index].token_ids)
        left, right = self.inputs[self._left(index)], self.inputs[self.num_left + index]
        return [*left.token_ids, *right.token_ids]

    def _left(self, index: int) -> int:
        return 0 if self.num_left == 1 else index
