"""A step as it was planned: which tokens of which sequences, and what is copied before."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.sequence import Sequence
from quire.kv.index import Node, TokenIds
from quire.kv.table import BlockCopy

NOTHING = range(0)


@dataclass(slots=True)
class Chunk:
    """The next `count` tokens of one sequence, as they stood when the step was planned."""

    sequence: Sequence
    start: int
    count: int
    is_last: bool  # it brings KV up to the tokens: the next token can be drawn
    num_samples: int  # tokens drawn: none, one, the first of each of `n` samples, one a draft more
    judged: range  # positions whose logits judge the prompt's next token
    num_published: int = 0  # blocks that others can find from this step on
    admitted: bool = False  # it was waiting before this step
    drafts: TokenIds | None = None  # the last tokens of the chunk, if they are guesses

    @classmethod
    def of(cls, sequence: Sequence, count: int, drafts: TokenIds | None = None) -> Chunk:
        request, params, start = sequence.request, sequence.params, sequence.num_computed
        is_last = start + count == sequence.num_tokens
        if drafts is not None:
            return cls(sequence, start, count, True, count, NOTHING, drafts=drafts)
        if start >= sequence.prompt_len:  # as most are
            return cls(sequence, start, count, is_last, int(is_last), NOTHING)
        num_samples = 0
        if is_last and request.max_tokens > 0:
            forks = start + count == sequence.prompt_len and len(request.sequences) == 1
            num_samples = params.num_samples if forks else 1
        judged = NOTHING
        if params.prompt_logprobs is not None:
            first = max(start, len(request.prompt_logprobs))  # as far as they are not known yet
            judged = range(first, min(start + count, sequence.prompt_len - 1))
        return cls(sequence, start, count, is_last, num_samples, judged)

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_fed(self) -> bool:
        """Whether its last token is one that the step before it draws."""
        return self.drafts is None and self.end > self.sequence.tokens.count

    @property
    def num_drafts(self) -> int:
        return 0 if self.drafts is None else len(self.drafts)


@dataclass
class Schedule:
    """One step: its chunks in order, and the copies to make before it."""

    number: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    num_tokens: int = 0
    is_awaited: bool = False  # its results decide what the next step can be
    published: set[Node] = field(default_factory=set)  # of blocks that it fills, after the copies
