"""One request that has ended: what metrics, spans and logs are made from."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.metrics.stages import Stages, first, seconds_in


@dataclass(frozen=True)
class RequestRecord:
    """Times are `time.monotonic()`'s, which all processes of a machine share."""

    id: str  # of the answer; one with several prompts has several requests
    arrived: float
    ended: float
    num_prompt_tokens: int
    num_output_tokens: int = 0  # of all samples …
    longest_sample: int = 0  # … and of the one that has most
    finish_reason: str = "stop"  # stop, length, abort or error
    num_samples: int = 1
    max_tokens: int | None = None
    cached_tokens_by_tier: dict[str, int] = field(default_factory=dict)
    miss_reason: str | None = None
    error: str | None = None
    tenant: str = ""
    adapter: str = ""  # its name
    number: int = 0  # what the engine calls it
    engine: str = "0"  # the one that computed it
    stages: Stages = ()

    @property
    def seconds(self) -> float:
        return self.ended - self.arrived

    @property
    def time_to_first_token(self) -> float | None:
        """None if it ended before."""
        at = first(self.stages, "decode")
        return None if at is None else max(0.0, at - self.arrived)

    @property
    def seconds_per_token(self) -> float | None:
        """Behind the first token of each sample; None if there are no others."""
        began, others = first(self.stages, "decode"), self.num_output_tokens - self.num_samples
        if began is None or others <= 0:
            return None
        return (self.stages[-1][1] - began) * self.num_samples / others

    def seconds_in(self) -> dict[str, float]:
        return seconds_in(self.stages)
