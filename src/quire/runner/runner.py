"""Runs the model over a planned step and draws the tokens behind it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kv.pool import PagedKVCache
from quire.kv.table import BlockCopy
from quire.layers.attention import Step
from quire.models.llama import CausalLM
from quire.runner.device import free_cached_memory
from quire.runner.inputs import step_inputs
from quire.runner.plan import PromptLogprobRows, StepPlan, StepResult
from quire.runner.sampler import Logprobs, Sampled, prompt_logprobs, sample

LOGIT_ROWS = 256  # logits of long prompts are made in pieces: a row is the whole vocabulary


@dataclass
class LaunchedStep:
    """A step that is under way; `result` waits for it."""

    sampled: Sampled | None
    prompt_logprobs: list[list[Logprobs]]

    def result(self) -> StepResult:
        if self.sampled is None:
            return StepResult([], [], self.prompt_logprobs)
        token_ids, logprobs = self.sampled.to_host()
        return StepResult(token_ids, logprobs, self.prompt_logprobs)


class ModelRunner:
    """One model, its pool, one device."""

    def __init__(self, model: CausalLM, cache: PagedKVCache) -> None:
        self.model = model
        self.cache = cache
        self.device = cache.tensor.device

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        self.cache.copy_blocks(copies)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        hidden = self._forward(plan)
        return LaunchedStep(
            self._sample(hidden, plan),
            [self._prompt_logprobs(hidden, rows) for rows in plan.prompt_logprobs],
        )

    def free_memory(self) -> None:
        """Give back what the device's allocator keeps for later."""
        free_cached_memory()

    def _forward(self, plan: StepPlan) -> Tensor:
        inputs = step_inputs(plan, self.cache.layout.block_size, self.device)
        step = Step(inputs.batch, self.cache.tensor, self.cache.backend)
        hidden: Tensor = self.model(inputs.token_ids, inputs.positions, step)
        return hidden

    def _sample(self, hidden: Tensor, plan: StepPlan) -> Sampled | None:
        if not plan.samples:
            return None
        rows = torch.from_numpy(plan.sample_rows).long().to(self.device)
        return sample(self.model.logits(hidden[rows]), plan.samples)

    def _prompt_logprobs(self, hidden: Tensor, rows: PromptLogprobRows) -> list[Logprobs]:
        next_ids = torch.from_numpy(rows.next_ids).long().to(self.device)
        found: list[Logprobs] = []
        for at in range(0, len(next_ids), LOGIT_ROWS):
            ids = next_ids[at : at + LOGIT_ROWS]
            first = rows.first_row + at
            logits = self.model.logits(hidden[first : first + len(ids)])
            found += prompt_logprobs(logits, ids, rows.k)
        return found
