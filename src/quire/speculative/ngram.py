"""Guesses from the sequence itself: what followed the last time its newest tokens were there.

The longest end of the sequence that occurs earlier is found in constant time for each token. While
a match goes on it is the longest one: any longer would have been longer before. Where it breaks
off, the places where the last three tokens were before are looked up, and the newest few compared.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from quire.kv.index import TokenIds
from quire.speculative.drafter import NO_TOKENS, Outlook, Wanted

RUN = 3  # tokens that make a place worth a look
SURE = 4  # tokens that must agree before anything is proposed: one more than was looked up
CANDIDATES = 8
LONGEST = 32  # tokens compared at each candidate
_BITS = 21  # of a token id: three make a key


class NgramDrafter:
    """Remembers where each sequence has been."""

    def __init__(self) -> None:
        self._lookups: dict[Hashable, NgramLookup] = {}

    def look(self, name: Hashable, token_ids: TokenIds) -> Outlook:
        lookup = self._lookups.get(name)
        if lookup is None:
            lookup = self._lookups[name] = NgramLookup()
        right, wrong = lookup.extend(token_ids)
        return Outlook(lookup.matched >= SURE, right, wrong)

    def propose(self, wanted: Sequence[Wanted]) -> list[TokenIds]:
        return [self._lookups[w.name].guess(w.token_ids, w.most) for w in wanted]

    def forget(self, name: Hashable) -> None:
        self._lookups.pop(name, None)


class NgramLookup:
    """One sequence's places, and how its end agrees with one of them."""

    def __init__(self) -> None:
        self.matched = 0  # tokens of the end that agree with those before `follow`
        self._follow = 0  # the place of the token that came next there
        self._known = 0
        self._places: dict[int, int] = {}  # by the tokens before it: the newest place
        self._earlier: list[int] = []  # of each place the one before it with the same tokens, or -1

    def extend(self, token_ids: TokenIds) -> tuple[int, int]:
        """Take in what is new; how many of the new tokens it had right, and how many wrong."""
        right = wrong = 0
        if not self._known:
            self._take_in_all(token_ids)
            self._known = len(token_ids)
            self._find(token_ids, self._known)
            return 0, 0
        for place in range(self._known, len(token_ids)):
            came_true = self.matched and token_ids[self._follow] == token_ids[place]
            if self.matched >= SURE:
                right, wrong = (right + 1, wrong) if came_true else (right, wrong + 1)
            if came_true:
                self._follow += 1
                self.matched += 1
            else:
                self._find(token_ids, place + 1)
            self._take_in(token_ids, place + 1)
        self._known = len(token_ids)
        return right, wrong

    def guess(self, token_ids: TokenIds, most: int) -> TokenIds:
        """What came next there; where that runs into the end, it is taken to repeat."""
        if self.matched < SURE:
            return NO_TOKENS
        period = len(token_ids) - self._follow
        guess: TokenIds = token_ids[self._follow + np.arange(most) % period]
        return guess

    def _find(self, token_ids: TokenIds, end: int) -> None:
        """The longest match for the tokens before `end`, which are not taken in yet or last."""
        self.matched = 0
        if end < RUN:
            return
        place = self._places.get(_key(token_ids, end), -1)
        if place == end:
            place = self._earlier[end]
        for _ in range(CANDIDATES):
            if place < 0:
                return
            agreed = _agreed(token_ids, place, end)
            if agreed > self.matched:
                self.matched, self._follow = agreed, place
            place = self._earlier[place]

    def _take_in(self, token_ids: TokenIds, end: int) -> None:
        key = _key(token_ids, end) if end >= RUN else -1
        self._earlier.append(self._places.get(key, -1) if end >= RUN else -1)
        if end >= RUN:
            self._places[key] = end

    def _take_in_all(self, token_ids: TokenIds) -> None:
        """A whole prompt at once, without a loop over its tokens."""
        count = len(token_ids)
        earlier = np.full(count + 1, -1, dtype=np.int64)
        if count >= RUN:
            ids = token_ids.astype(np.int64)
            keys = np.zeros(count - RUN + 1, dtype=np.int64)
            for i in range(RUN):
                keys = (keys << _BITS) | ids[i : i + len(keys)]
            order = np.argsort(keys, kind="stable")
            same = keys[order[1:]] == keys[order[:-1]]
            earlier[order[1:][same] + RUN] = order[:-1][same] + RUN
            self._places = dict(zip(keys.tolist(), range(RUN, count + 1), strict=True))
        self._earlier = earlier.tolist()


def _key(token_ids: TokenIds, end: int) -> int:
    first, second, third = token_ids[end - RUN : end].tolist()
    return int((first << 2 * _BITS) | (second << _BITS) | third)


def _agreed(token_ids: TokenIds, place: int, end: int) -> int:
    """How many tokens before `place` are those before `end`, as far as it is worth knowing."""
    count = min(place, LONGEST)
    differ = token_ids[place - count : place] != token_ids[end - count : end]
    found = np.flatnonzero(differ)
    return count - 1 - int(found[-1]) if len(found) else count
