"""The story of each request, stage by stage: when, how its block table changed, and the pool.

    queued ─ matched ─┬───────────────────────────┬─ prefill … ─ first token ─ decode ─ finished
                      └─ (from lower tiers) loaded ┘                  │ └─ forked, copied
                                       resumed ◀── preempted ◀────────┘

Memory is bounded: the last requests, and of each its first and its last events. Nothing is written
for a token; what decoding did to a table is said when it ends.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence as Listed
from typing import Any

from quire.engine.observe.lifecycle import Lifecycle
from quire.engine.sequence import Request, Sequence
from quire.kv.index import TokenIds
from quire.kv.prefix import PrefixCache

Event = dict[str, Any]

MOST_REQUESTS = 256
MOST_EVENTS = 64  # of one request; half of them its first, half its last
PREVIEW_TOKENS = 48  # its last ones: the first are what many have in common


class Story:
    """What happened to one request; it refers to nothing of the engine's."""

    def __init__(self, request: Request, most_events: int) -> None:
        self.id = request.id
        self.name = request.name
        self.number = request.number
        self.namespace = request.namespace
        self.adapter = request.lora.asked.lora_name if request.lora is not None else None
        self.num_prompt = len(request.prompt_ids)
        self.preview: TokenIds = request.prompt_ids[-PREVIEW_TOKENS:].copy()
        self.arrived = time.time()
        self.began = time.monotonic()
        self.cached_by_tier: dict[str, int] = {}
        self.miss_reason: str | None = None
        self.num_output = 0
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.version = 0
        self.held: dict[int, int] = {}  # blocks, by sample, as far as told
        self.untold = 0  # blocks on top of these that are about to be given back
        self.decoding_from: dict[int, int] = {}  # by sample: tokens it had, the first counted in
        self.num_omitted = 0
        self._half = most_events // 2
        self._first: list[Event] = []
        self._last: deque[Event] = deque(maxlen=most_events - self._half)

    def add(self, event: Event) -> None:
        if len(self._first) < self._half:
            self._first.append(event)
            return
        self.num_omitted += len(self._last) == self._last.maxlen
        self._last.append(event)

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "number": self.number,
            "arrived": self.arrived,
            "adapter": self.adapter,
            "prompt_tokens": self.num_prompt,
            "output_tokens": self.num_output,
            "cached_tokens_by_tier": self.cached_by_tier,
            "miss_reason": self.miss_reason,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "events": [*self._first, *self._last],
            "omitted": self.num_omitted,
        }


class Journal(Lifecycle):
    """Listens to the engine and writes the stories of its last requests."""

    def __init__(
        self,
        cache: PrefixCache,
        most_requests: int = MOST_REQUESTS,
        most_events: int = MOST_EVENTS,
    ) -> None:
        super().__init__()
        self.cache = cache
        self.version = 0  # grows with every event, so that readers can ask for what is new
        self._most_requests = most_requests
        self._most_events = most_events
        self._stories: OrderedDict[str, Story] = OrderedDict()

    def stories(self, since: int = 0) -> list[Story]:
        """Those that have changed since that version or go on, the latest request first."""
        told = reversed(self._stories.values())
        return [s for s in told if s.version > since or s.finish_reason is None]

    # --- what happens ---------------------------------------------------------------------------

    def queued(self, request: Request) -> None:
        super().queued(request)
        self._stories.pop(request.id, None)
        self._stories[request.id] = Story(request, self._most_events)
        while len(self._stories) > self._most_requests:
            self._stories.popitem(last=False)
        self._note(request, 0, "queued", tokens=len(request.prompt_ids))

    def loading(self, sequence: Sequence, places: Listed[str]) -> None:
        super().loading(sequence, places)
        shared = self._held_now(sequence) - len(places)
        self._note_start(sequence, shared, loading=self._in_tokens(places))

    def started(self, sequence: Sequence, cached: int, loaded: Listed[str]) -> None:
        super().started(sequence, cached, loaded)
        request = sequence.request
        if (story := self._story(request)) is not None:
            story.cached_by_tier = dict(request.cached_tokens_by_tier)
            story.miss_reason = request.miss_reason
        missed = request.miss_reason
        if sequence.sample in (story.held if story is not None else ()):  # it has been loading
            tiers = self._in_tokens(loaded)
            self._note_change(sequence, "loaded", tokens=cached, tiers=tiers, missed=missed)
        else:
            self._note_start(sequence, self._held_now(sequence), tokens=cached, missed=missed)

    def prefilled(self, sequence: Sequence, count: int, drawn: bool) -> None:
        super().prefilled(sequence, count, drawn)
        self._note_change(sequence, "prefill", tokens=count)
        story = self._story(sequence.request)
        if drawn and story is not None:
            if sequence.sample not in story.decoding_from:
                self._note(sequence.request, sequence.sample, "first token")
            story.decoding_from[sequence.sample] = sequence.num_output + 1

    def forked(self, parent: Sequence, child: Sequence) -> None:
        super().forked(parent, child)
        story = self._story(parent.request)
        if story is None:
            return
        held = self._held_now(child)
        story.decoding_from.pop(child.sample, None)  # of a beam that was dropped
        if child.table is not None:
            story.held[child.sample] = held
            story.decoding_from[child.sample] = child.num_output + 1
        self._note(parent.request, child.sample, "forked", shared=held, held=held)

    def copied(self, sequence: Sequence, count: int) -> None:
        super().copied(sequence, count)
        self._note_change(sequence, "copied", replaced=count)

    def releasing(self, sequence: Sequence) -> None:
        super().releasing(sequence)
        story = self._story(sequence.request)
        if story is None:
            return
        tokens = sequence.num_output - story.decoding_from.get(sequence.sample, sequence.num_output)
        if tokens > 0:
            self._note_change(sequence, "decode", tokens=tokens)
            story.decoding_from[sequence.sample] = sequence.num_output
        story.untold = max(0, self._held_now(sequence) - story.held.get(sequence.sample, 0))

    def preempted(self, sequence: Sequence) -> None:
        super().preempted(sequence)
        self._note_given_back(sequence, "preempted")

    def taken_back(self, sequence: Sequence) -> None:
        super().taken_back(sequence)
        self._note_given_back(sequence, "taken back")

    def finished(self, sequence: Sequence) -> None:
        super().finished(sequence)
        request = sequence.request
        if (story := self._story(request)) is not None:
            story.num_output = sum(each.num_output for each in request.sequences)
            story.error = request.error
            if request.finished:
                story.finish_reason = sequence.finish_reason
        self._note_given_back(sequence, "finished", reason=sequence.finish_reason)

    def reset(self, sequences: Listed[Sequence]) -> None:
        super().reset(sequences)
        for sequence in sequences:
            self._note_given_back(sequence, "taken back")

    # --- writing --------------------------------------------------------------------------------

    def _note_start(self, sequence: Sequence, shared: int, **facts: Any) -> None:
        """It has a table; for the first time, or again."""
        story = self._story(sequence.request)
        again = story is not None and sequence.sample in story.decoding_from
        stage = "resumed" if again else "matched"
        self._note_change(sequence, stage, shared=shared, **facts)

    def _note_change(
        self, sequence: Sequence, stage: str, shared: int = 0, replaced: int = 0, **facts: Any
    ) -> None:
        """With what its table has got and given back since it was last told of."""
        story = self._story(sequence.request)
        if story is None:
            return
        held = self._held_now(sequence)
        grown = held - story.held.get(sequence.sample, 0) - shared
        story.held[sequence.sample] = held
        facts |= {"taken": max(0, grown) + replaced, "given_back": max(0, -grown) + replaced}
        self._note(sequence.request, sequence.sample, stage, shared=shared, held=held, **facts)

    def _note_given_back(self, sequence: Sequence, stage: str, **facts: Any) -> None:
        story = self._story(sequence.request)
        if story is not None:
            taken, story.untold = story.untold, 0
            held = story.held.pop(sequence.sample, 0) + taken
            facts = {"taken": taken, "given_back": held, **facts}
            self._note(sequence.request, sequence.sample, stage, **facts)

    def _note(self, request: Request, sample: int, stage: str, **facts: Any) -> None:
        story = self._story(request)
        if story is None:
            return
        self.version += 1
        story.version = self.version
        allocator = self.cache.allocator
        said = {name: fact for name, fact in facts.items() if fact or name == "tokens"}
        at = round(time.monotonic() - story.began, 6)
        pool = [allocator.num_free, allocator.num_cached, allocator.num_in_use]
        story.add({"stage": stage, "at": at, "sample": sample, **said, "pool": pool})

    def _story(self, request: Request) -> Story | None:
        """None for a request that came before so many others that it is forgotten."""
        story = self._stories.get(request.id)
        return story if story is not None and story.number == request.number else None

    def _held_now(self, sequence: Sequence) -> int:
        return len(sequence.table) if sequence.table is not None else 0

    def _in_tokens(self, places: Listed[str]) -> dict[str, int]:
        block_size = self.cache.block_size
        return {place: count * block_size for place, count in Counter(places).items()}
