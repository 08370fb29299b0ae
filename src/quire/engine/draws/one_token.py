"""The plain draws: nothing, the prompt's scores alone, and the next token of a sequence."""

from __future__ import annotations

from quire.engine.draws.sample_row import sample_row
from quire.engine.schedule.chunk import Chunk, CommitActions, Draw, Drawn
from quire.engine.sequence import Status
from quire.runner.sampling.sampler import SampleRow


class NoDraw(Draw):
    """More tokens of the sequence are to be computed first."""


class PromptOnly(Draw):
    """Nothing, though the prompt is computed: `max_tokens` is 0, and each sample is empty."""

    def take(self, chunk: Chunk, drawn: list[Drawn], commit: CommitActions) -> None:
        commit.computed(chunk)
        request = chunk.sequence.request
        for sample in range(1, request.params.num_samples):
            empty = commit.new_sample(request, sample)
            empty.status, empty.finish_reason = Status.FINISHED, "length"
            request.sequences.append(empty)
        commit.finish(chunk.sequence, "length")


class OneToken(Draw):
    """The next token of a sequence.

    Most chunks draw this, so `step_plan` and `Commit.step` know it and skip the lists.
    """

    count = 1

    def sample_rows(self, chunk: Chunk, fed_from: int) -> list[SampleRow]:
        return [sample_row(chunk.sequence, chunk.end, chunk.sequence.seed, fed_from)]

    def take(self, chunk: Chunk, drawn: list[Drawn], commit: CommitActions) -> None:
        commit.computed(chunk)
        commit.append(chunk.sequence, *drawn[0])


NO_DRAW = NoDraw()
PROMPT_ONLY = PromptOnly()
ONE_TOKEN = OneToken()
