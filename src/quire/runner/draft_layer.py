"""Runs a model's MTP layer behind each of its steps, so that its KV is that of all tokens.

A row of a step is a token i. The token behind it is the next row's, or the one that the step drew,
or, where a chunk ends inside a prompt, the prompt's next one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kv.pool import PagedKVCache
from quire.layers.attention import Step
from quire.models.deepseek_mtp import DeepseekMTP
from quire.runner.inputs import StepInputs, step_inputs
from quire.runner.plan import StepPlan
from quire.runner.transfer import BY_COPY_ENGINES, HostLink


class DraftLayer:
    """An MTP layer over the pool of its model."""

    def __init__(
        self, model: DeepseekMTP, cache: PagedKVCache, link: HostLink = BY_COPY_ENGINES
    ) -> None:
        self.model = model
        self.cache = cache
        self.link = link
        self.device = cache.images.device

    def follow(
        self, plan: StepPlan, hidden: Tensor, fed: Tensor, drawn: Tensor | None
    ) -> Tensor | None:
        """Write the KV of a step's tokens, whose hidden states are the first rows of `hidden`.

        `fed` are the tokens of the step before, `drawn` those of this one. Returns the layer's own
        hidden states behind each of the latter.
        """
        inputs = self.inputs(plan, fed)
        next_ids = inputs.token_ids.roll(-1)
        if len(plan.next_rows):
            rows, ids = self.link.all_to_device([plan.next_rows, plan.next_ids], self.device)
            next_ids[rows] = ids.long()
        if drawn is None:
            self.run(inputs, next_ids, hidden[: plan.num_tokens])
            return None
        rows = self.link.to_device(plan.sample_rows, self.device)
        next_ids[rows] = drawn  # of several samples behind one row, any
        return self.run(inputs, next_ids, hidden[: plan.num_tokens])[rows]

    def inputs(self, plan: StepPlan, fed: Tensor | None = None) -> StepInputs:
        return step_inputs(plan, self.cache.layout.block_size, self.device, fed, self.link)

    @torch.inference_mode()
    def run(self, inputs: StepInputs, next_ids: Tensor, hidden: Tensor) -> Tensor:
        step = Step(inputs.batches, self.cache.layers, self.cache.backend, inputs.num_positions)
        found: Tensor = self.model(next_ids, inputs.positions, hidden, step)
        return found

    @torch.inference_mode()
    def guess(self, hidden: Tensor) -> Tensor:
        """The likeliest token behind each hidden state."""
        return self.model.logits(hidden).argmax(-1)
