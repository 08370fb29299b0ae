"""From what the model computed of a text to what was asked for: normalised, cut, as probabilities.

On the host and in float32: these are few numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from quire.engine.pooling.request import Vector
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


def finish(vector: Vector, params: PoolingParams, facts: PoolingFacts) -> Vector:
    """An embedding is cut before it is normalised, so that what is left of it has length 1."""
    activation = facts.activation
    if params.use_activation is False:
        activation = ""
    elif params.use_activation and facts.task == EMBED:
        activation = NORMALIZE
    found: npt.NDArray[np.floating[Any]] = vector[: params.dimensions]
    if activation == NORMALIZE:
        found = found / max(float(np.linalg.norm(found)), TINY)
    elif activation == SIGMOID:
        found = 1 / (1 + np.exp(-found))
    elif activation == SOFTMAX:
        weights = np.exp(found - found.max())
        found = weights / weights.sum()
    return found.astype(np.float32)
