"""One token to draw, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.params import SamplingParams


@dataclass(slots=True)
class SampleRow:
    """What drawing from one row of logits depends on besides the logits."""

    params: SamplingParams
    seed: int  # the sequence's own
    position: int  # tokens it has generated so far; with the seed this fixes the noise
    prompt_ids: npt.NDArray[np.int32] | None = None  # both only where a penalty is on
    output_ids: npt.NDArray[np.int32] | None = None
    fed_from: int = -1  # its newest token's place among the last step's draws, if not known yet
    banned: tuple[int, ...] = ()  # ids that may not be drawn now (min_tokens)
    want_logprob: bool = False  # asked for by the engine (best_of), not by the user
    num_best: int = 0  # the same, of so many likeliest tokens (beam search)

    @property
    def changes_logits(self) -> bool:
        return bool(self.banned or self.params.logit_bias or self.params.needs_penalties)

    @property
    def wants_logprobs(self) -> bool:
        return self.want_logprob or self.num_best > 0 or self.params.logprobs is not None
