"""The first token of each of the `n` samples of a prompt, all behind the same chunk."""

from __future__ import annotations

from quire.engine.draws.sample_row import sample_row
from quire.engine.schedule.chunk import Chunk, CommitActions, Draw, Drawn
from quire.runner.sampling.noise import sample_seed
from quire.runner.sampling.sampler import SampleRow


class Forks(Draw):
    """The prompt's sequence goes on as the first sample; the others fork off and share its blocks.

    They are made when the tokens are known; until then there is nothing to go on with.
    """

    holds_sequence = True

    def __init__(self, count: int) -> None:
        self.count = count

    def sample_rows(self, chunk: Chunk, fed_from: int) -> list[SampleRow]:
        sequence, seed = chunk.sequence, chunk.sequence.request.seed
        seeds = [sample_seed(seed, sample) for sample in range(self.count)]
        return [sample_row(sequence, chunk.end, each) for each in seeds]

    def take(self, chunk: Chunk, drawn: list[Drawn], commit: CommitActions) -> None:
        commit.computed(chunk)
        first, request = chunk.sequence, chunk.sequence.request
        for sample in range(1, self.count):
            child = commit.new_sample(request, sample)
            commit.add_fork(first, child)
            request.sequences.append(child)
        for sequence, (token_id, logprobs) in zip(request.sequences, drawn, strict=True):
            if not request.error:
                commit.append(sequence, token_id, logprobs)
