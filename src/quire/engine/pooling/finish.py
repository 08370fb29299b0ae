"""From what the model computed of a text to what was asked for: normalised, cut, as probabilities.

On the host and in float32: these are few numbers. All texts of a step at once, for these are many.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quire.engine.pooling.request import Vectors
from quire.errors import RequestError
from quire.models.pooling.facts import EMBED, NORMALIZE, SIGMOID, SOFTMAX, PoolingFacts
from quire.pooling_params import PoolingParams

TINY = 1e-12  # a vector of zeros stays one


def check_params(params: PoolingParams, facts: PoolingFacts) -> None:
    """Raise RequestError for what this model cannot give."""
    if params.dimensions is None:
        return
    if facts.task != EMBED:
        raise RequestError("dimensions are an embedding's, and this model gives classes.")
    if params.dimensions > facts.size:
        raise RequestError(
            f"dimensions={params.dimensions:,} is more than the {facts.size:,} numbers of this "
            f"model's embeddings; ask for at most that."
        )


def finish(vectors: Vectors, params: PoolingParams, facts: PoolingFacts) -> Vectors:
    """`[texts, size]` of texts that ask for the same.

    An embedding is cut before it is normalised, so that what is left of it has length 1.
    """
    activation = facts.activation
    if params.use_activation is False:
        activation = ""
    elif params.use_activation and facts.task == EMBED:
        activation = NORMALIZE
    found: npt.NDArray[np.floating[Any]] = vectors[:, : params.dimensions]
    if activation == NORMALIZE:
        found = found / np.linalg.norm(found, axis=1, keepdims=True).clip(TINY)
    elif activation == SIGMOID:
        found = 1 / (1 + np.exp(-found))
    elif activation == SOFTMAX:
        weights = np.exp(found - found.max(axis=1, keepdims=True))
        found = weights / weights.sum(axis=1, keepdims=True)
    return found.astype(np.float32, copy=False)
