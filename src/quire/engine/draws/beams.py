"""Beams as sequences: they share blocks, fork, end and are dropped by block table alone.

Each beam is a sequence of its request and is planned, chunked and preempted like any other. A step
gives it no token but its likeliest continuations. It is then `held`: the beams of a request go in
lock-step, and when the last of them has its continuations the search decides for all.

    beams     A   B   C   D            dropped first: C, D, whose blocks are free at once
              ├─┐ │
    next      A A'B                    A goes on in place; A' is a fork and costs reference counts
"""

from __future__ import annotations

from math import inf

from quire.engine.draws.beam_search import Candidate, Ended
from quire.engine.draws.sample_row import sample_row
from quire.engine.schedule.chunk import Chunk, CommitActions, Draw, Drawn
from quire.engine.sequence import Request, Sequence, Status, TokenBuffer
from quire.engine.text.detokenizer import Detokenizer
from quire.runner.sampling.sampler import SampleRow

DROPPED = "dropped"


class BeamCandidates(Draw):
    """The likeliest continuations of a beam."""

    count = 1
    is_awaited = True
    holds_sequence = True

    def sample_rows(self, chunk: Chunk, fed_from: int) -> list[SampleRow]:
        sequence, search = chunk.sequence, chunk.sequence.request.search
        assert search is not None
        row = sample_row(sequence, chunk.end, sequence.seed, fed_from)
        row.num_best = search.num_candidates
        return [row]

    def take(self, chunk: Chunk, drawn: list[Drawn], commit: CommitActions) -> None:
        """If it was the last beam that its request waited for, all go on."""
        commit.computed(chunk)
        commit.num_generated_tokens += 1
        beam = chunk.sequence
        ((_, beam.continuations),) = drawn
        if all(each.is_held for each in beam.request.sequences):
            _Advance(commit, beam.request).run()


BEAM_CANDIDATES = BeamCandidates()


class _Advance:
    """One step of one search."""

    def __init__(self, commit: CommitActions, request: Request) -> None:
        assert request.search is not None
        self.commit = commit
        self.request = request
        self.search = request.search
        self.beams = request.sequences
        self.texts: dict[Candidate, Detokenizer] = {}  # behind those that were looked at

    def run(self) -> None:
        going, ended = self.search.advance(self._candidates(), self._ends)
        self._keep([self._hypothesis(each) for each in ended])
        for beam in self.beams:
            beam.continuations = None
        if self.search.is_over:
            self._end()
        else:
            self._go_on(going)

    def _candidates(self) -> list[Candidate]:
        request = self.request
        barred = request.stop_ids if self.search.length < request.params.min_tokens else ()
        return [
            Candidate(place, token_id, beam.cumulative_logprob + logprob)
            for place, beam in enumerate(self.beams)
            if (found := beam.continuations) is not None
            for token_id, logprob in zip(found.top_ids, found.top_logprobs, strict=True)
            if logprob > -inf and token_id not in barred
        ]

    def _ends(self, candidate: Candidate) -> bool:
        """Whether its last token ends it, or completes a stop string."""
        if candidate.token_id in self.request.stop_ids:
            return True
        before = self.beams[candidate.beam].detokenizer
        if before is None:
            return False
        text = self.texts[candidate] = before.fork()
        text.push([candidate.token_id])
        return text.stopped

    # --- those that have ended --------------------------------------------------------------------

    def _hypothesis(self, ended: Ended) -> Sequence:
        candidate = ended.candidate
        parent = self.beams[candidate.beam]
        twin = self._twin(parent, parent.sample)
        text = self.texts.get(candidate, twin.detokenizer)
        if text is not None:
            text.flush()
        self._append(twin, candidate, text)
        twin.status, twin.finish_reason = Status.FINISHED, ended.finish_reason
        twin.score = ended.score
        return twin

    def _keep(self, hypotheses: list[Sequence]) -> None:
        """The best of all that have ended so far."""
        best = sorted(self.request.hypotheses + hypotheses, key=_score, reverse=True)
        self.request.hypotheses = best[: self.search.params.beam_width]

    def _end(self) -> None:
        """The hypotheses are the answer; what still runs gives its blocks back."""
        request = self.request
        *others, last = self.beams
        for beam in others:
            self.commit.finish(beam, DROPPED)
        request.sequences = request.hypotheses
        for rank, hypothesis in enumerate(request.sequences):
            hypothesis.sample = rank
        self.commit.finish(last, str(request.sequences[0].finish_reason))

    # --- those that go on -------------------------------------------------------------------------

    def _go_on(self, going: list[Candidate]) -> None:
        children: dict[int, list[Candidate]] = {}
        for candidate in going:
            children.setdefault(candidate.beam, []).append(candidate)
        samples = set(range(self.search.params.beam_width))
        for place, beam in enumerate(self.beams):
            if place in children:
                samples.remove(beam.sample)
            else:
                self.commit.finish(beam, DROPPED)
        beams: dict[Candidate, Sequence] = {}
        for place, (first, *others) in children.items():
            parent = self.beams[place]
            for candidate in others:
                child = self._twin(parent, min(samples))
                samples.remove(child.sample)
                self.commit.add_fork(parent, child)
                beams[candidate] = child
            beams[first] = parent
        self.request.sequences = [beams[candidate] for candidate in going]
        for candidate, beam in beams.items():
            self._append(beam, candidate, self.texts.get(candidate, beam.detokenizer))

    def _twin(self, parent: Sequence, sample: int) -> Sequence:
        """A sequence with the parent's tokens, and none of its blocks."""
        detokenizer = parent.detokenizer
        return Sequence(
            request=self.request,
            sample=sample,
            seed=parent.seed,
            tokens=TokenBuffer(parent.tokens.ids),
            detokenizer=detokenizer and detokenizer.fork(),
        )

    def _append(self, sequence: Sequence, candidate: Candidate, text: Detokenizer | None) -> None:
        sequence.tokens.append(candidate.token_id)
        sequence.cumulative_logprob = candidate.logprob
        sequence.detokenizer = text


def _score(hypothesis: Sequence) -> float:
    assert hypothesis.score is not None
    return hypothesis.score
