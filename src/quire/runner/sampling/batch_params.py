"""What a batch of rows asks of sampling, worked out once: it is the same for many steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.params import SamplingParams
from quire.runner.sampling.sample_row import SampleRow
from quire.runner.transfer import to_device


class BatchParams:
    """Of rows with these parameters."""

    def __init__(self, params: list[SamplingParams], vocab_size: int) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.all_greedy = all(each.is_greedy for each in params)
        self.changed_logits = any(each.logit_bias or each.needs_penalties for each in params)
        self.logprobs = any(each.logprobs is not None for each in params)
        # Temperature, min-p, top-k, top-p, as the kernels take them.
        self._settings = np.array(
            [
                [0.0 if each.is_greedy else each.temperature for each in params],
                [each.min_p for each in params],
                [each.top_k if 0 < each.top_k < vocab_size else vocab_size for each in params],
                [each.top_p for each in params],
            ],
            dtype=np.float64,
        )
        temperature, min_p, top_k, top_p = self._settings
        filters = (min_p > 0) | (top_k < vocab_size) | (top_p < 1)
        self.filters = bool((filters & (temperature > 0)).any())
        self._sent: Tensor | None = None

    def settings_on(self, device: torch.device) -> Tensor:
        """float64 `[4, rows]`: temperature (0 is greedy), min-p, top-k, top-p."""
        if self._sent is None or self._sent.device != device:
            self._sent = to_device(self._settings, device)
        return self._sent


_last = BatchParams([], 0)


def batch_params_of(rows: Sequence[SampleRow], vocab_size: int) -> BatchParams:
    global _last
    wishes, params = _last, [row.params for row in rows]
    if wishes.vocab_size != vocab_size or wishes.params != params:
        wishes = _last = BatchParams(params, vocab_size)
    wishes.params = params  # lists of the same objects are found equal faster next time
    return wishes
