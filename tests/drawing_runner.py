"""The fake model, read through the pages, with logits and the real sampler behind it."""

from __future__ import annotations

import numpy as np
import torch
from fake_model import POISON, FakeRunner, insist, logits_behind

from quire.runner.plan import StepResult
from quire.runner.sampling.logprobs import PromptScores, score
from quire.runner.sampling.sampler import Sampler


class DrawingRunner(FakeRunner):
    sampler = Sampler()

    def _draw(self, plan, masks):
        judged = [self._judge(plan, rows) for rows in plan.prompt_logprobs]
        if not plan.samples:
            return StepResult([], [], judged)
        logits = self._logits(plan, plan.sample_rows.tolist())
        drawn = torch.from_numpy(self._drawn.astype(np.int64))
        token_ids, logprobs = self.sampler.sample(logits, plan.samples, drawn, masks).to_host()
        return StepResult(token_ids, logprobs, judged)

    def _judge(self, plan, rows):
        places = range(rows.first_row, rows.first_row + len(rows.next_ids))
        next_ids = torch.from_numpy(rows.next_ids.astype(np.int64))
        scores = score(self._logits(plan, places), next_ids, rows.k)
        return PromptScores(rows.next_ids.tolist(), rows.k, scores).to_host()

    def _logits(self, plan, rows):
        """Behind these rows of the step, each with its context as the pool has it."""
        ends = np.cumsum(plan.counts)
        logits = []
        for row in rows:
            sequence = int(np.searchsorted(ends, row, side="right"))
            context = self.context(plan, sequence, int(ends[sequence]) - 1 - row)
            insist(POISON not in context, "a slot was read that was never written")
            logits.append(logits_behind(context))
        return torch.from_numpy(np.stack(logits).astype(np.float32))
