"""What the next chunk of a sequence draws."""

from __future__ import annotations

from quire.engine.draws.beams import BEAM_CANDIDATES
from quire.engine.draws.drafts import Drafts
from quire.engine.draws.forks import Forks
from quire.engine.draws.one_token import NO_DRAW, ONE_TOKEN, PROMPT_ONLY
from quire.engine.schedule.chunk import NOTHING, Chunk, Draw
from quire.engine.sequence import Sequence
from quire.kv.index import TokenIds


def next_chunk(sequence: Sequence, count: int, drafts: TokenIds | None = None) -> Chunk:
    """The next `count` tokens of a sequence, and behind those the drafts."""
    start = sequence.num_computed
    if drafts is not None:
        return Chunk(sequence, start, count + len(drafts), True, Drafts(drafts))
    end = start + count
    is_last = end == sequence.tokens.count + sequence.num_drawn
    if start >= sequence.prompt_len:  # as most are
        return Chunk(sequence, start, count, is_last, _token(sequence) if is_last else NO_DRAW)
    draw = _behind_prompt(sequence, end) if is_last else NO_DRAW
    return Chunk(sequence, start, count, is_last, draw, _prompt_scored(sequence, start, end))


def _token(sequence: Sequence) -> Draw:
    return ONE_TOKEN if sequence.request.search is None else BEAM_CANDIDATES


def _behind_prompt(sequence: Sequence, end: int) -> Draw:
    """Where the prompt was among what is computed, and perhaps tokens that were known behind it."""
    request, num_samples = sequence.request, sequence.params.num_samples
    if request.max_tokens == 0:
        return PROMPT_ONLY
    if num_samples > 1 and end == sequence.prompt_len and len(request.sequences) == 1:
        return Forks(num_samples)
    return _token(sequence)


def _prompt_scored(sequence: Sequence, start: int, end: int) -> range:
    if sequence.params.prompt_logprobs is None:
        return NOTHING
    first = max(start, len(sequence.request.prompt_logprobs))  # as far as they are not known yet
    return range(first, min(end, sequence.prompt_len - 1))
