"""Why a prompt was not found in the cache as far as it could have been."""

from __future__ import annotations

from dataclasses import dataclass

from quire.engine.sequence import Sequence
from quire.kv.prefix import PrefixCache


@dataclass(frozen=True)
class Miss:
    kind: str  # for counting
    says: str


def why_missed(sequence: Sequence, cached: int, cache: PrefixCache) -> Miss | None:
    """The reason that `cached` tokens are not all but the last block; None if they are.

    It is told from the request's own namespace alone: reasons are counted in metrics that every
    tenant may read, and what another tenant has asked must move none of them.
    """
    if not cache.enabled:
        return Miss("caching is off", "prefix caching is off")
    if sequence.params.prompt_logprobs is not None:
        return Miss("logprobs", "prompt_logprobs needs every token computed")
    whole = len(sequence.nodes) * cache.block_size
    if whole + cache.block_size >= sequence.prompt_len:
        return None
    namespace, tokens = sequence.request.namespace, sequence.request.prompt_ids
    rest = tokens[whole : whole + cache.block_size]
    if cache.index.was_evicted(namespace, sequence.nodes, rest):
        return Miss("evicted", f"what was cached past token {cached} had to make room")
    _, common = cache.index.nearest(namespace, sequence.nodes, rest)
    if common:
        return Miss("differs", f"token {whole + common} differs from what is cached")
    return Miss("nothing cached", f"nothing is cached past token {cached}")
