"""How one token of a sequence is drawn, as plain data for the sampler."""

from __future__ import annotations

from quire.engine.sequence import Sequence
from quire.runner.sampling.sampler import SampleRow


def sample_row(sequence: Sequence, length: int, seed: int, fed_from: int = -1) -> SampleRow:
    """The token behind the first `length` of a sequence.

    `fed_from`: the place of the last of these among the draws of the step before, or -1.
    """
    params = sequence.params
    position = length - sequence.prompt_len  # tokens that were generated before this one
    row = SampleRow(params, seed, position)
    if params.best_of is not None:
        row.want_logprob = params.num_samples > params.n
    if params.needs_penalties:
        row.prompt_ids, row.output_ids = sequence.request.prompt_ids, sequence.output_ids
        row.fed_from = fed_from
    if position < params.min_tokens and sequence.grammar is None:  # a mask says it there
        row.banned = tuple(sequence.request.early_stop_ids)
    return row
