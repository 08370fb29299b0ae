"""What a request may ask of the one vector that a model makes of its text."""

from __future__ import annotations

from dataclasses import dataclass

from quire.checks import INT32_MAX, apply_checks, flag, setting, whole_number
from quire.errors import RequestError


@dataclass(frozen=True)
class PoolingParams:
    dimensions: int | None = setting(
        None, whole_number(1, INT32_MAX), "keep so many numbers of an embedding: its first ones"
    )
    use_activation: bool | None = setting(
        None,
        flag(),
        "normalise an embedding, or make probabilities of a head's numbers (default: as the model "
        "says)",
    )

    def __post_init__(self) -> None:
        apply_checks(self, RequestError)

    @property
    def form(self) -> tuple[int | None, bool | None]:
        """What is done to a vector: the same for all texts that ask for the same."""
        return self.dimensions, self.use_activation
