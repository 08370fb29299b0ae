"""The sampling parameters of a batch, worked out once: mostly the next step has the same."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.params import SamplingParams
from quire.runner.transfer import HostLink


class BatchParams:
    """The sampling parameters of a batch of rows, as arrays and as what they have in common."""

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

    def settings_on(self, device: torch.device, link: HostLink) -> Tensor:
        """float64 `[4, rows]`: temperature (0 is greedy), min-p, top-k, top-p."""
        if self._sent is None or self._sent.device != device:
            self._sent = link.to_device(self._settings, device)
        return self._sent
