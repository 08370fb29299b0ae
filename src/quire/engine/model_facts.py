"""What an engine is given when it is built: facts of its model, and what its views show."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.observe.startup import Startup
from quire.histogram import BucketCounts
from quire.kv.keys import Namespace
from quire.models.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ModelFacts:
    """What requests are made and checked with."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: Tokenizer | None = None

    def __post_init__(self) -> None:
        known = tuple(i for i in self.eos_token_ids if i < self.vocab_size)
        object.__setattr__(self, "eos_token_ids", known)


@dataclass(frozen=True)
class Observed:
    """What the engine itself does not need, but shows."""

    startup: Startup = field(default_factory=Startup)
    block_bytes: int = 0
    attention_seconds: BucketCounts = field(default_factory=lambda: BucketCounts(()))  # of a runner
    namespace: Namespace | None = None  # of its blocks; `publish_events` needs it
