"""How a request is served, beside `SamplingParams`, which say how its tokens are drawn."""

from __future__ import annotations

from dataclasses import dataclass

from quire.lora_request import LoRARequest


@dataclass(frozen=True)
class RequestOptions:
    stream: bool = False
    with_text: bool = True  # else a stream's text is made only as far as stop strings need it
    priority: int = 0  # lower is sooner, with scheduling_policy="priority"
    background: bool = False  # behind all others: it gives up its place for one that waits
    turn: int = 0  # of those in the background, the lower is sooner
    cache_salt: str = ""  # blocks are shared only between requests with the same
    tenant: str | None = None  # whose share of the lower tiers it takes; None: the cache_salt's
    lora_request: LoRARequest | None = None  # the adapter that it is computed with
    model: str = ""  # the name that its client has called the model by
    name: str = ""  # the id of the answer that it is for, in logs and in the journal
    handed_over: bool = False  # another engine has put its prompt's blocks into shared tiers
    # What the engine's process sees to, around the engine:
    queue_s: float | None = None  # the request fails if it is not admitted within so many seconds
    wait_for_store: bool = False  # it ends when its blocks are in the tiers that engines share


DEFAULT_OPTIONS = RequestOptions()
