"""Applies the results of a step to the sequences that it computed.

What becomes of the drawn tokens is said by each chunk's `draw`: a token is appended, samples fork
off, a beam has its continuations, drafts are accepted. `Commit` is what they do it with.
"""

from __future__ import annotations

from itertools import islice

from quire.engine.draws.one_token import ONE_TOKEN
from quire.engine.endings import fail_request, finish_reason
from quire.engine.schedule.chunk import Chunk, Schedule
from quire.engine.schedule.prefill_rate import PrefillRate
from quire.engine.schedule.scheduler import Scheduler
from quire.engine.sequence import Request, Sequence, Status, new_sequence
from quire.engine.text.detokenizer import Detokenizer
from quire.histogram import SECONDS, STEP_TOKENS, BucketCounts
from quire.models.text.tokenizer import Tokenizer
from quire.runner.plan import StepResult
from quire.runner.sampling.sampler import Logprobs


class Commit:
    """Takes steps one by one, in the order in which they were planned, and counts them."""

    def __init__(
        self, scheduler: Scheduler, tokenizer: Tokenizer | None, prefill_rate: PrefillRate
    ) -> None:
        self.scheduler = scheduler
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_generated_tokens = 0
        self.step_tokens = BucketCounts(STEP_TOKENS)
        self.token_seconds = BucketCounts(SECONDS)  # between two tokens of a sequence
        self._tokenizer = tokenizer
        self._prefill_rate = prefill_rate
        self._last_at = scheduler.clock()
        self._seconds = 0.0  # between the step that is committed and the one before it
        self._committing: Schedule | None = None

    def step(self, schedule: Schedule, result: StepResult) -> None:
        self._committing = schedule
        self._count(schedule)
        generated = self.num_generated_tokens
        num_begun = self.scheduler.watch.computed(schedule)
        self._prefill_rate.computed(schedule.num_tokens, waited=bool(result.token_ids))
        drawn = zip(result.token_ids, result.logprobs, strict=True)
        prompt_logprobs = iter(result.prompt_logprobs)
        computed, append = self.scheduler.commit, self.append
        for chunk in schedule.chunks:
            sequence, draw = chunk.sequence, chunk.draw
            if chunk.prompt_scored:
                self._score_prompt(chunk, next(prompt_logprobs))
            if draw is ONE_TOKEN:  # as most are
                token_id, logprobs = next(drawn)
                computed(chunk)
                if sequence.status is not Status.FINISHED:
                    append(sequence, token_id, logprobs)
                continue
            tokens = list(islice(drawn, draw.count))
            if sequence.status is Status.FINISHED:
                computed(chunk)  # it ended, or was aborted, while this step was under way
            else:
                draw.take(chunk, tokens, self)
        if result.draft_states is not None:
            self.scheduler.speculation.keep_states(schedule, result.draft_states)
        # A sequence that decodes drew a token in the step before, too; one that began did not.
        generated = self.num_generated_tokens - generated
        self.token_seconds.add(self._seconds, max(0, generated - num_begun))
        self._committing = None

    def skip(self, num_steps: int, num_sequences: int) -> None:
        """Count steps that were applied elsewhere: decodes of so many sequences, until now."""
        self.num_steps += num_steps
        self.num_computed_tokens += num_steps * num_sequences
        self.num_generated_tokens += num_steps * num_sequences
        self._last_at = self.scheduler.clock()
        self._prefill_rate.computed(num_sequences, waited=True)

    def take_last_back(self, unfinished: list[Sequence]) -> None:
        """An interrupt has struck: draw again what may not be in all that is made of the tokens."""
        chunks = self._committing.chunks if self._committing is not None else []
        committing = {chunk.sequence for chunk in chunks}
        for sequence in unfinished:
            if sequence in committing:
                self._take_last_back(sequence)
        self._committing = None

    # --- what a draw does with its tokens -------------------------------------------------------

    def append(self, sequence: Sequence, token_id: int, logprobs: Logprobs | None) -> None:
        self.num_generated_tokens += 1
        sequence.tokens.append(token_id)
        if logprobs is not None:
            sequence.cumulative_logprob += logprobs.logprob
            if sequence.params.logprobs is not None:
                sequence.logprobs.append(logprobs)
        reason = finish_reason(sequence, token_id)
        if sequence.grammar is not None and sequence.grammar.error is not None:
            fail_request(self.scheduler, sequence.request, sequence.grammar.error, is_at_fault=True)
        elif reason is not None:
            self.scheduler.finish(sequence, reason)

    def computed(self, chunk: Chunk) -> None:
        self.scheduler.commit(chunk)

    def new_sample(self, request: Request, sample: int) -> Sequence:
        return new_sequence(request, sample, self._tokenizer)

    def add_fork(self, parent: Sequence, child: Sequence) -> None:
        self.scheduler.add_fork(parent, child)

    def finish(self, sequence: Sequence, reason: str) -> None:
        self.scheduler.finish(sequence, reason)

    def drafts_tried(self, chunk: Chunk, num_accepted: int) -> None:
        assert self._committing is not None
        num_sequences = len(self._committing.chunks)
        self.scheduler.speculation.record_accepted(
            chunk, num_accepted, num_sequences, self._seconds
        )

    # --- parts of a commit ------------------------------------------------------------------------

    def _count(self, schedule: Schedule) -> None:
        self.num_steps += 1
        self.num_computed_tokens += schedule.num_tokens
        self.step_tokens.add(schedule.num_tokens)
        now = self.scheduler.clock()
        self._seconds, self._last_at = now - self._last_at, now
        self.scheduler.speculation.observe(schedule, self._seconds)

    def _score_prompt(self, chunk: Chunk, logprobs: list[Logprobs]) -> None:
        if chunk.sequence.status is Status.FINISHED:
            return
        # A sequence that was preempted meanwhile may have had some of them scored again.
        known = chunk.sequence.request.prompt_logprobs
        known += logprobs[len(known) - chunk.prompt_scored.start :]

    def _take_last_back(self, sequence: Sequence) -> None:
        request = sequence.request
        count = sequence.num_output - 1
        if request.search is not None or count < int(request.params.num_samples > 1):
            return  # beams, and what has just been forked, are not drawn alone
        sequence.tokens.truncate(sequence.prompt_len + count)
        del sequence.logprobs[count:], sequence.named_logprobs[count:]
        if sequence.params.logprobs is not None:
            sequence.cumulative_logprob = sum(each.logprob for each in sequence.logprobs)
        if sequence.detokenizer is not None and self._tokenizer is not None:
            detokenizer = Detokenizer(self._tokenizer, request.params, request.prompt_ids)
            detokenizer.push(sequence.output_ids.tolist())
            sequence.detokenizer = detokenizer
