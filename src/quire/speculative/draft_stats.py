"""How drafts fared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class DraftStats:
    """What became of the drafts of one request, or of all."""

    steps: int = 0  # of one sequence each
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0  # that these steps took …
    plain_seconds: float = 0.0  # … and that their tokens would have taken without drafts

    def add(self, drafted: int, accepted: int, seconds: float, plain: float | None) -> None:
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        if plain is not None:
            self.seconds += seconds
            self.plain_seconds += plain * (accepted + 1)

    def as_dict(self) -> dict[str, Any]:
        return {
            "drafted": self.drafted,
            "accepted": self.accepted,
            "mean_accepted": self.accepted / self.steps if self.steps else 0.0,
            "speed_up": self.plain_seconds / self.seconds if self.seconds else None,
        }
