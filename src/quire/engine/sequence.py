"""A request and its sequences: what was asked, what is computed, what has come out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property, partial

import numpy as np

from quire.engine.adapters.adapter import Adapter
from quire.engine.adapters.source import AdapterSource
from quire.engine.draws.beam_search import BeamSearch
from quire.engine.draws.thought_budget import ThoughtBudget
from quire.engine.grammar.grammar import Grammar
from quire.engine.grammar.state import GrammarState
from quire.engine.text.detokenizer import Detokenizer
from quire.kv.grouped_table import Table
from quire.kv.index import Node, TokenIds
from quire.models.text.tokenizer import Tokenizer
from quire.params import SamplingParams
from quire.runner.sampling.noise import sample_seed
from quire.runner.sampling.sampler import Logprobs
from quire.speculative.draft_stats import DraftStats


class Status(Enum):
    PREPARING = auto()  # not with the scheduler yet: its grammar is compiled, its adapter read
    WAITING = auto()  # has no blocks: new, or preempted
    LOADING = auto()  # holds blocks, which are being filled from a lower tier
    RUNNING = auto()  # holds blocks
    FINISHED = auto()


class TokenBuffer:
    """Prompt and output ids in one growing array."""

    def __init__(self, token_ids: TokenIds, room: int = 64) -> None:
        self.count = len(token_ids)
        self._ids = np.empty(self.count + room, dtype=np.int32)
        self._ids[: self.count] = token_ids

    @property
    def ids(self) -> TokenIds:
        return self._ids[: self.count]

    def append(self, token_id: int) -> None:
        if self.count == len(self._ids):
            self._ids = np.resize(self._ids, 2 * self.count)
        self._ids[self.count] = token_id
        self.count += 1

    def extend(self, token_ids: TokenIds) -> None:
        count = self.count + len(token_ids)
        if count > len(self._ids):
            self._ids = np.resize(self._ids, max(count, 2 * self.count))
        self._ids[self.count : count] = token_ids
        self.count = count

    def truncate(self, count: int) -> None:
        assert count <= self.count
        self.count = count


@dataclass(frozen=True)
class Logprob:
    """How likely one token was, by the model's own distribution."""

    logprob: float
    rank: int  # 1 is the most likely
    decoded_token: str | None


TokenLogprobs = dict[int, Logprob]  # by token id: the token itself and the k most likely


@dataclass(eq=False)
class Request:
    """One prompt with its parameters; `n` samples of it are `n` sequences."""

    id: str
    prompt: str | None
    prompt_ids: TokenIds
    params: SamplingParams
    max_tokens: int  # with the model's limit taken in
    stop_ids: frozenset[int]
    grammar: Grammar | None = None  # what the output is held to
    streaming: bool = False
    with_text: bool = True  # a stream shows text, not only token ids
    priority: int = 0
    is_background: bool = False  # it gives way to all that are not
    turn: int = 0  # its place among those in the background
    lora: AdapterSource | None = None  # the adapter that was asked for, …
    adapter: Adapter | None = None  # … and what was read from there, once that is known
    namespace: str = ""  # of its blocks; with an adapter, complete when that is known
    tenant: str = ""  # whose share of the lower tiers its blocks take
    name: str = ""  # what its caller calls it; several may have the same
    is_handed_over: bool = False  # another engine has put its prompt's blocks where this one looks
    number: int = 0  # order of arrival
    seed: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    search: BeamSearch | None = None  # its sequences are beams; in the end, the best that ended
    hypotheses: list[Sequence] = field(default_factory=list)  # beams that have ended, best first
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    named_logprobs: list[TokenLogprobs] = field(default_factory=list)  # as far as they were shown
    num_cached_tokens: int | None = None  # of the prompt, at its first admission
    cached_tokens_by_tier: dict[str, int] = field(default_factory=dict)
    miss_reason: str | None = None
    error: str | None = None
    stages: list[tuple[str, float]] = field(default_factory=list)  # each from a moment on
    is_at_fault: bool = False  # the error is the request's own, not the engine's
    drafts: DraftStats = field(default_factory=DraftStats)

    @cached_property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as its outputs show it; one list for all of them, however many stream."""
        token_ids: list[int] = self.prompt_ids.tolist()
        return token_ids

    @cached_property
    def early_stop_ids(self) -> frozenset[int]:
        """Those that may not be drawn before `min_tokens`; what closes a thought ends nothing else
        there, and may have to be drawn."""
        params = self.params
        if params.thinking_token_budget is None or params.thought_markers is None:
            return self.stop_ids
        return self.stop_ids.difference(params.thought_markers.closes)

    def release_grammar(self) -> None:
        """It has ended. What refers to each other waits for a garbage collection otherwise."""
        self.grammar = None
        for sequence in self.sequences:
            if sequence.grammar is not None:
                sequence.grammar.release()

    @property
    def finished(self) -> bool:
        return all(sequence.status is Status.FINISHED for sequence in self.sequences)


@dataclass(eq=False)
class Sequence:
    """Tokens, how many of them have KV, and the blocks that hold it.

    Prefill, decode and resuming are one thing: compute the next of `num_tokens - num_computed`
    tokens. A token is drawn when the last of them is computed. It counts from the moment its step
    is planned, though only the device knows it until the step is done.

        tokens     ├──────── known ────────┤─ drawn ─┤
        KV         ├──── num_computed ────┤             the steps under way counted in
    """

    request: Request
    sample: int  # which of the request's n samples
    seed: int
    tokens: TokenBuffer
    detokenizer: Detokenizer | None = None
    grammar: GrammarState | None = None
    thought: ThoughtBudget | None = None
    status: Status = Status.WAITING
    table: Table | None = None
    num_computed: int = 0
    num_drawn: int = 0  # tokens of steps under way, not known yet
    awaits_draw: bool = False  # it goes no further before the host has read what is being drawn
    nodes: list[Node] = field(default_factory=list)  # of the full blocks, as far as published
    num_offered: int = 0  # full blocks that the tiers below could have had, since it began to run
    logprobs: list[Logprobs] = field(default_factory=list)
    named_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    continuations: Logprobs | None = None  # of a beam that is held until the others have theirs
    score: float | None = None  # of a beam that has ended
    finish_reason: str | None = None
    last_step: int = 0  # when it was last planned
    waiting_since: int = 0  # the step at which it was queued
    prefetched: bool = False  # its blocks were brought nearer while it waits

    def __post_init__(self) -> None:
        self.params: SamplingParams = self.request.params
        self.prompt_len: int = len(self.request.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return self.tokens.count + self.num_drawn

    @property
    def num_output(self) -> int:
        return self.tokens.count - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed, if that can begin now."""
        drawn = self.num_drawn
        total = self.tokens.count + drawn
        if drawn and (self.awaits_draw or total - self.prompt_len >= self.request.max_tokens):
            return 0
        return total - self.num_computed

    @property
    def is_held(self) -> bool:
        """A beam with nothing to compute before the others of its request are as far."""
        return self.continuations is not None

    @property
    def may_be_masked(self) -> bool:
        """Whether there is something that may rule out tokens."""
        return self.grammar is not None or self.thought is not None

    @property
    def open_thought(self) -> ThoughtBudget | None:
        """Its budget for thinking behind all tokens that are known; None where none bounds it."""
        thought = self.thought
        if thought is None or thought.is_over:
            return None
        thought.follow(self.output_ids)
        return None if thought.is_over else thought

    @property
    def ended_by_token(self) -> bool:
        """Whether its last token is one that ends an answer, and is no part of its text.

        Before `min_tokens` such a token is one like others, which a grammar may ask for.
        """
        if self.finish_reason != "stop" or self.num_output <= self.params.min_tokens:
            return False
        return int(self.tokens.ids[-1]) in self.request.stop_ids

    @property
    def output_ids(self) -> TokenIds:
        return self.tokens.ids[self.prompt_len :]


def new_sequence(request: Request, sample: int, tokenizer: Tokenizer | None) -> Sequence:
    """With the prompt for its tokens; text is made as it grows only where it is looked at."""
    detokenizer = None
    shows_text = request.streaming and request.with_text
    if tokenizer is not None and (shows_text or request.params.stop):
        detokenizer = Detokenizer(tokenizer, request.params, request.prompt_ids)
    return Sequence(
        request=request,
        sample=sample,
        seed=sample_seed(request.seed, sample),
        tokens=TokenBuffer(request.prompt_ids),
        detokenizer=detokenizer,
        grammar=GrammarState(request.grammar) if request.grammar and sample else None,
        thought=_thought_budget(request.params, tokenizer),
    )


def _thought_budget(params: SamplingParams, tokenizer: Tokenizer | None) -> ThoughtBudget | None:
    budget, markers = params.thinking_token_budget, params.thought_markers
    if budget is None or markers is None:
        return None
    if tokenizer is None:
        return ThoughtBudget(markers, budget)
    return ThoughtBudget(markers, budget, partial(tokenizer.decode, skip_special_tokens=False))
