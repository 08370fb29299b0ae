"""What an operator does to an engine's cache, as calls that another process may make.

The device's blocks are seen to at once, between two steps. Lower tiers take their time: a call
answers with a number, or with None where too much is under way already; `cache_result` says what
became of it, None while it is under way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from quire.engine.engine import Engine
from quire.kv.control import CacheControl, Control, Listing
from quire.kv.store import KVStore

MOST_OPEN = 64  # under way, or over with a result that was not asked for


class CacheCalls:
    def __init__(self, engine: Engine) -> None:
        self._cache, self._tiering = engine.scheduler.cache, engine.scheduler.tiering
        self._numbers = count()
        self._open: dict[int, tuple[Control | Listing, int | None, set[str] | None]] = {}

    def named(self) -> dict[str, Callable[..., Any]]:
        calls: dict[str, Callable[..., Any]] = {
            "cache_list": self.held,
            "cache_pin": self.pin,
            "cache_delete": self.delete,
            "cache_delete_tenant": self.delete_tenant,
        }
        begun = {name: partial(self._begin, call) for name, call in calls.items()}
        return {**begun, "cache_result": self.result}

    def held(self, view: str) -> dict[str, Any]:
        """All that namespaces beginning with `view` have; with "" all that there is."""
        salts = self._salts(view)
        on_device = sum(len(self._cache.index.blocks_in(salt)) for salt in salts)
        control = self._control
        roots = {control.root_of(salt) for salt in (view, *salts)} if control and view else None
        return self._begun(control.held() if control else None, on_device, roots)

    def pin(self, tokens: list[int], salt: str, seconds: float) -> dict[str, Any]:
        """The device cannot pin: what host memory has is soon there again."""
        control = self._control
        return self._begun(control.pin(tokens, seconds, salt) if control else None, None)

    def delete(self, tokens: list[int], salt: str) -> dict[str, Any]:
        gone, control = self._cache.delete(salt, np.array(tokens, np.int32)), self._control
        return self._begun(control.delete(tokens, salt) if control else None, gone)

    def delete_tenant(self, tenant: str) -> dict[str, Any]:
        """All of the tenant's, whatever salts its requests had beside its own."""
        salts, control = self._salts(tenant), self._control
        gone = sum(self._cache.delete(salt) for salt in salts)
        return self._begun(control.delete_tenant(tenant, *salts) if control else None, gone)

    def result(self, number: int) -> dict[str, Any] | None:
        """Nothing in it if it was forgotten: others needed its place."""
        if number not in self._open:
            return {}
        control, on_device, roots = self._open[number]
        if not control.done():
            return None
        del self._open[number]
        below: dict[str, int | None]
        if isinstance(control, Listing):
            below = {tier: _sum(found, roots) for tier, found in control.blocks.items()}
        else:
            below = control.counts
        return {"device": on_device, **below}

    @property
    def _control(self) -> CacheControl | None:
        store = getattr(self._tiering, "store", None)
        return store.control if isinstance(store, KVStore) else None

    def _salts(self, view: str) -> list[str]:
        return [salt for salt in self._cache.index.namespaces() if salt.startswith(view)]

    def _begin(self, call: Callable[..., dict[str, Any]], **args: Any) -> dict[str, Any]:
        if len(self._open) >= MOST_OPEN:
            over = [number for number, (control, *_) in self._open.items() if control.done()]
            if not over:
                return {"number": None}
            del self._open[min(over)]
        return call(**args)

    def _begun(
        self,
        control: Control | Listing | None,
        on_device: int | None,
        roots: set[str] | None = None,
    ) -> dict[str, Any]:
        if control is None:  # there is no tier below
            control = Control()
            control.end()
        number = next(self._numbers)
        self._open[number] = control, on_device, roots
        return {"number": number}


def _sum(blocks: dict[str, int] | None, roots: set[str] | None) -> int | None:
    if blocks is None:
        return None
    return sum(count for root, count in blocks.items() if roots is None or root in roots)
