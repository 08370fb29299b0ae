"""The masks of a step: one row of bits for each token that is drawn under a grammar, or where a
thought has used up its budget."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire.engine.draws.thought_budget import ThoughtBudget
from quire.engine.grammar.state import GrammarState
from quire.engine.schedule.chunk import Chunk, Schedule
from quire.engine.sequence import Status
from quire.runner.sampling.masks import TokenMasks, Words

if TYPE_CHECKING:
    from llguidance import LLExecutor

ANYTHING = -1  # a word of the mask with all its bits set


class MaskWriter:
    """Fills masks, several rows at a time on as many threads as the machine spares."""

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._num_words = -(-vocab_size // 32)
        self._eos_token_ids = eos_token_ids
        self._executor: LLExecutor | None = None

    def masks(self, schedule: Schedule) -> TokenMasks | None:
        """What the step may draw, now that all tokens before it are known; None: anything."""
        chunks = _masked(schedule)
        if not chunks:
            return None
        words = np.full((len(chunks), self._num_words), ANYTHING, dtype=np.int32)
        wanted = [(row, chunk) for row, (_, chunk) in enumerate(chunks) if _is_wanted(chunk)]
        states = [(row, chunk) for row, chunk in wanted if chunk.sequence.grammar is not None]
        for _, chunk in states:
            _state(chunk).follow(chunk.sequence.output_ids)  # mostly it has
        self._fill(words, [(row, _state(chunk)) for row, chunk in states])
        for row, chunk in states:
            self._apply_params(words[row], chunk, chunk.end - chunk.draw.num_drafts)
        for row, chunk in wanted:
            if (thought := chunk.sequence.open_thought) is not None:
                _end_thought(words[row], thought)
        counts = [chunk.draw.count for _, chunk in chunks]
        rows = [place + i for place, chunk in chunks for i in range(chunk.draw.count)]
        if max(counts) > 1:
            words = np.repeat(words, counts, axis=0)
            firsts = np.cumsum([0, *counts])
            for row, chunk in states:
                if chunk.draw.num_drafts:
                    self._fill_ahead(words[firsts[row] + 1 : firsts[row + 1]], chunk)
        return TokenMasks(np.array(rows, dtype=np.int32), words)

    def _fill_ahead(self, words: Words, chunk: Chunk) -> None:
        """Behind each of a chunk's drafts, which its grammar allows; it stays where it is."""
        matcher = _state(chunk).matcher
        for i, token_id in enumerate(chunk.draw.drafts.tolist()):
            matcher.consume_token(token_id)
            matcher.unsafe_compute_mask_ptr(words[i].ctypes.data, words.strides[0])
            self._apply_params(words[i], chunk, chunk.start + 2 + i)
        matcher.rollback(chunk.draw.num_drafts)

    def _fill(self, words: Words, states: list[tuple[int, GrammarState]]) -> None:
        matchers = [(state.matcher, row) for row, state in states]
        row_bytes = words.strides[0]
        if len(matchers) == 1:
            matcher, row = matchers[0]
            matcher.unsafe_compute_mask_ptr(words.ctypes.data + row * row_bytes, row_bytes)
        elif matchers:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor()
            self._executor.unsafe_compute_mask_ptr(
                matchers, words.ctypes.data, row_bytes, len(words)
            )

    def _apply_params(self, words: Words, chunk: Chunk, length: int) -> None:
        """Bring the request's own wishes in, behind so many tokens: whether it may end there."""
        state, request = _state(chunk), chunk.sequence.request
        if state.matcher.is_error():
            state.note_error()  # ends the request when the step is done, whatever it draws
            words[:] = ANYTHING
            return
        params = request.params
        is_short = length - chunk.sequence.prompt_len < params.min_tokens
        if params.stop_token_ids and not is_short and state.matcher.is_accepting():
            _set(words, params.stop_token_ids)
        unwanted = {*self._eos_token_ids} if params.ignore_eos else set()
        if is_short:
            unwanted |= request.early_stop_ids
        if unwanted:
            _clear_unless_all(words, unwanted)


def _masked(schedule: Schedule) -> list[tuple[int, Chunk]]:
    """Chunks that may not draw all tokens, and the place of each one's first draw in the step's."""
    place, found = 0, []
    for chunk in schedule.chunks:
        if chunk.draw.count and chunk.is_masked:
            found.append((place, chunk))
        place += chunk.draw.count
    return found


def _is_wanted(chunk: Chunk) -> bool:
    """Whether its draw counts: the sequence may have ended with the step before."""
    return chunk.sequence.status is not Status.FINISHED


def _state(chunk: Chunk) -> GrammarState:
    state = chunk.sequence.grammar
    assert state is not None
    return state


def _end_thought(words: Words, thought: ThoughtBudget) -> None:
    """As soon as the form of output lets it: a character is not cut in its middle."""
    if thought.barred is not None:
        _clear_unless_all(words, [thought.barred])
    if thought.forced is not None:
        only = np.zeros_like(words)
        _set(only, [thought.forced])
        if (only & words).any():
            words[:] = only


def _bits(token_ids: Iterable[int]) -> tuple[npt.NDArray[np.int64], Words]:
    ids = np.array([*token_ids], dtype=np.int64)
    return ids >> 5, np.left_shift(1, ids & 31).astype(np.uint32).view(np.int32)


def _set(words: Words, token_ids: Iterable[int]) -> None:
    index, bits = _bits(token_ids)
    np.bitwise_or.at(words, index, bits)


def _clear_unless_all(words: Words, token_ids: Iterable[int]) -> None:
    """Take tokens out of a mask, if that leaves any: the form comes first."""
    index, bits = _bits(token_ids)
    left = words.copy()
    np.bitwise_and.at(left, index, ~bits)
    if left.any():
        words[:] = left
