"""Some texts, or pairs of texts, and the vectors that become of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from quire.pooling_params import PoolingParams
from quire.runner.text_batch import TextBatch

Vector = npt.NDArray[np.float32]
Vectors = npt.NDArray[np.float32]  # one in each row


@dataclass(frozen=True)
class TextsAsked:
    """What is asked of texts whose token ids are sent to an engine end to end."""

    params: PoolingParams
    lengths: list[int]
    seconds: list[int | None] = field(default_factory=list)  # as `TextBatch.of` has them

    # As records of requests have them.
    num_samples: ClassVar[int] = 1
    max_tokens: ClassVar[int] = 0


@dataclass(eq=False)
class PoolingRequest:
    """It has as many texts as its caller has at once, so that no text needs objects of its own."""

    id: str
    texts: TextBatch
    params: PoolingParams
    priority: int = 0
    name: str = ""  # what its caller calls it; several may have the same
    is_background: bool = False  # it waits behind all that are not, …
    turn: int = 0  # … and in this order among its like
    number: int = 0  # order of arrival
    num_begun: int = 0  # texts that a step has taken: always the first ones
    num_ended: int = 0
    vectors: Vectors | None = None  # a row for each text, as soon as one has ended
    errors: dict[int, str] = field(default_factory=dict)  # of texts that have none
    is_aborted: bool = False
    stages: list[tuple[str, float]] = field(default_factory=list)  # each from a moment on

    @property
    def finished(self) -> bool:
        return self.num_ended == len(self.texts) or self.is_aborted

    def put(self, texts: range, vectors: Vectors) -> None:
        """These texts have ended, with these vectors."""
        if len(texts) == len(self.texts):
            self.vectors = vectors
        else:
            if self.vectors is None:
                self.vectors = np.zeros((len(self.texts), vectors.shape[1]), dtype=np.float32)
            self.vectors[texts.start : texts.stop] = vectors
        self.num_ended += len(texts)  # last: an interrupt may strike anywhere

    def fail(self, text: int, error: str) -> None:
        """This text has ended without a vector."""
        self.errors[text] = error
        self.num_ended += 1

    def begin_again(self) -> None:
        """Forget what has been computed."""
        self.num_begun = self.num_ended = 0
        self.errors.clear()


@dataclass
class PoolingOutput:
    """What a caller gets back."""

    request_id: str
    vectors: Vectors | None
    errors: dict[int, str]
    finished: bool = True


def pooling_output(request: PoolingRequest) -> PoolingOutput:
    return PoolingOutput(request.id, request.vectors, request.errors, request.finished)
