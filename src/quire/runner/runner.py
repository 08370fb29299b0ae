"""Runs the model over a planned step and draws the tokens behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from quire.kernels.backend import Backend
from quire.kv.pool import PagedKVCache
from quire.kv.table import BlockCopy
from quire.layers.attention import Step
from quire.models.causal_lm import CausalLM
from quire.runner.adapters import RunnerAdapters
from quire.runner.attention_clock import AttentionClock
from quire.runner.device import free_cached_memory
from quire.runner.draft_layer import DraftLayer
from quire.runner.graphs import Computed, StepGraphs
from quire.runner.inputs import StepInputs, step_inputs
from quire.runner.plan import AdapterInfo, PromptLogprobRows, StepPlan, StepResult
from quire.runner.recorded_steps import RecordedSteps
from quire.runner.sampling.logprobs import PromptScores, score
from quire.runner.sampling.masks import TokenMasks
from quire.runner.sampling.sampler import Sampled, Sampler
from quire.runner.transfer import BY_COPY_ENGINES, Array, HostLink, Mark

LOGIT_ROWS = 256  # logits of long prompts are made in pieces: a row is the whole vocabulary


Drawn = tuple[Sampled, Tensor | None]  # tokens, and the hidden states that drafts begin with


@dataclass
class LaunchedStep:
    """A step that is under way; `result` waits for it, and for nothing that was queued later."""

    sampled: Sampled | None
    prompt_scores: list[PromptScores]
    draw_later: Callable[[TokenMasks | None], Drawn] | None = None
    computed: Mark | None = None  # where nothing is drawn that would tell
    draft_states: Tensor | None = None  # of the model's MTP layer, if it drafts

    def draw(self, masks: TokenMasks | None) -> None:
        """Draw a masked step's tokens: before `result`, and before the next step is launched."""
        assert self.draw_later is not None
        self.sampled, self.draft_states = self.draw_later(masks)
        self.draw_later = None  # with the logits

    def result(self) -> StepResult:
        assert self.draw_later is None
        prompt_logprobs = [scores.to_host() for scores in self.prompt_scores]
        if self.computed is not None:
            self.computed.wait()
        if self.sampled is None:
            return StepResult([], [], prompt_logprobs)
        token_ids, logprobs = self.sampled.to_host()
        return StepResult(token_ids, logprobs, prompt_logprobs, self.draft_states)


class ModelRunner:
    """One model, its pool, one device. Nothing here waits for the device but `result`.

    Of several ranks only the first draws; to feed a step with what it drew, `share_drawn` first.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: PagedKVCache,
        graphs: StepGraphs | None = None,
        clock: AttentionClock | None = None,
        link: HostLink = BY_COPY_ENGINES,
        recorded: RecordedSteps | None = None,
        draft_layer: DraftLayer | None = None,
        adapters: RunnerAdapters | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.graphs = graphs  # of a GPU
        self.recorded = recorded  # of a CPU: steps in which no row has an adapter …
        self.recorded_with_adapters = recorded and recorded.with_no_recordings()  # … and others
        self.draft_layer = draft_layer  # of a model whose MTP layer drafts
        self.adapters = adapters  # with `enable_lora`
        self.clock = clock
        self.link = link
        self.sampler = Sampler(link)
        self.device = cache.images.device
        self._drawn = torch.empty(0, dtype=torch.int64, device=self.device)  # by the last step

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        self.cache.copy_blocks(copies)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # each thread has its own, and any may take a step
        computed = self._forward(plan)
        hidden, logits = computed.hidden, self._logits(computed, plan)
        step = LaunchedStep(None, [])
        if self.model.tp.rank > 0:
            for rows in plan.prompt_logprobs:
                for _ in self._prompt_logits(hidden, plan, rows):
                    pass
            step.computed = Mark(self.device)
            return step
        if logits is None:
            if self.draft_layer is not None:
                self.draft_layer.follow(plan, hidden, self._drawn, None)
            step.computed = Mark(self.device)
        elif plan.is_masked:
            step.draw_later = partial(self._draw, hidden, logits, plan)
        else:
            step.sampled, step.draft_states = self._draw(hidden, logits, plan)
        step.prompt_scores = [
            self._score_prompt(hidden, plan, rows) for rows in plan.prompt_logprobs
        ]
        return step

    @property
    def num_drawn(self) -> int:
        """Tokens that the last step drew."""
        return len(self._drawn)

    @torch.inference_mode()
    def share_drawn(self, count: int) -> None:
        """Let every rank have the `num_drawn` tokens that rank 0 drew."""
        group = self.model.tp.group
        if group is not None:
            if self.model.tp.rank > 0:
                self._drawn = torch.empty(count, dtype=torch.int64, device=self.device)
            self._drawn = self._drawn.contiguous()
            group.broadcast_(self._drawn)

    def free_memory(self) -> None:
        """Give back what the device's allocator keeps for later."""
        free_cached_memory()

    def check(self) -> None:
        """Raise what has ended the runner, if anything has: this one has no other processes."""

    def close(self) -> None:
        """End the processes that the runner has started: none."""

    def read_adapter(self, path: str) -> AdapterInfo:
        """Read an adapter into host memory, maybe beside steps that another thread launches."""
        return self._given_adapters.read(path)

    def forget_adapter(self, fingerprint: str) -> None:
        """Give the host memory of an adapter back."""
        self._given_adapters.forget(fingerprint)

    def load_adapter(self, fingerprint: str, slot: int) -> None:
        """Have it in a slot for the steps that are launched from now on; nothing waits."""
        self._given_adapters.load(fingerprint, slot)

    def _forward(self, plan: StepPlan) -> Computed:
        block_size, adapters = self.cache.layout.block_size, self._adapters_of(plan)
        graphs = self.graphs
        if adapters is not None and adapters.changes_embedding(plan):
            graphs = None
        shape = graphs.shape_for(plan) if graphs is not None else None
        if graphs is not None and shape is not None:
            return graphs.replay(shape, plan, self._drawn, self._instead_of_replay())
        inputs = step_inputs(plan, block_size, self.device, self._drawn, self.link)
        with nullcontext() if adapters is None else adapters.over(plan, self.link):
            recorded = self.recorded if adapters is None else self.recorded_with_adapters
            return Computed(self.run_layers(inputs, recorded))

    def run_layers(self, inputs: StepInputs, recorded: RecordedSteps | None) -> Tensor:
        """Without a graph; on a CPU maybe from a recording."""
        backend = self.cache.backend
        if recorded is not None and recorded.takes(inputs):
            timed = self._instead_of_replay()
            if timed is None:
                return recorded.run(inputs)
            backend = timed
        elif self.clock is not None:
            backend = self.clock.over(backend)
        step = Step(inputs.batches, self.cache.layers, backend, inputs.num_positions)
        hidden: Tensor = self.model(inputs.token_ids, inputs.positions, step)
        return hidden

    @property
    def _given_adapters(self) -> RunnerAdapters:
        assert self.adapters is not None
        return self.adapters

    def _adapters_of(self, plan: StepPlan) -> RunnerAdapters | None:
        """The adapters, if a sequence of the step has one."""
        return self._given_adapters if len(plan.adapter_slots) else None

    def _instead_of_replay(self) -> Backend | None:
        """Of several ranks all replay a step, or none does: there no replay is timed."""
        if self.clock is None or self.model.tp.size > 1:
            return None
        return self.clock.instead_of_replay(self.cache.backend)

    def _logits(self, computed: Computed, plan: StepPlan) -> Tensor | None:
        """The logits of the rows behind which a token is drawn."""
        count, hidden = len(plan.samples), computed.hidden
        if not count:
            return None
        if np.array_equal(plan.sample_rows, np.arange(count)):
            if computed.logits is not None:
                return computed.logits[:count]
            hidden = hidden[:count]
        else:
            hidden = hidden[self.link.to_device(plan.sample_rows, self.device)]
        with self._adapted_head(plan, plan.sample_rows):
            return self.model.logits(hidden)

    def _adapted_head(self, plan: StepPlan, rows: Array) -> AbstractContextManager[None]:
        """Around the logits of some rows of a step."""
        adapters = self._adapters_of(plan)
        return nullcontext() if adapters is None else adapters.over_head(plan, rows, self.link)

    @torch.inference_mode()
    def _draw(
        self, hidden: Tensor, logits: Tensor, plan: StepPlan, masks: TokenMasks | None = None
    ) -> Drawn:
        fed = self._drawn
        sampled = self.sampler.sample(logits, plan.samples, fed, masks)
        self._drawn = sampled.token_ids
        if self.draft_layer is None:
            return sampled, None
        return sampled, self.draft_layer.follow(plan, hidden, fed, sampled.token_ids)

    def _score_prompt(
        self, hidden: Tensor, plan: StepPlan, rows: PromptLogprobRows
    ) -> PromptScores:
        next_ids = self.link.to_device(rows.next_ids.astype(np.int64), self.device)
        scores = [
            score(logits.float(), ids, rows.k)
            for ids, logits in zip(
                next_ids.split(LOGIT_ROWS), self._prompt_logits(hidden, plan, rows), strict=True
            )
        ]
        return PromptScores(rows.next_ids.tolist(), rows.k, torch.cat(scores), self.link)

    def _prompt_logits(
        self, hidden: Tensor, plan: StepPlan, rows: PromptLogprobRows
    ) -> Iterator[Tensor]:
        first = rows.first_row
        for piece in hidden[first : first + len(rows.next_ids)].split(LOGIT_ROWS):
            with self._adapted_head(plan, np.arange(first, first + len(piece))):
                logits = self.model.logits(piece)
            first += len(piece)
            yield logits
