"""Where the blocks of a prefix are, in a model with several KV groups or with windows.

    place of the chain    0   1   2   3   4   5   6      d: on the device, t: in a tier
    full group            d   d   d   t   t   t   .      so six places are a hit at most,
    window of two blocks  .   .   .   .   d   t   .      and are one: both have what it needs

First the full groups are followed as far as device and tiers have them; then `longest_hit` says how
much of that is a hit. Only what the rule needs, and the device lacks, is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import NamedTuple

from quire.errors import KVError
from quire.kv.arguments import check_tables_of_hit
from quire.kv.hit_rule import Window, first_needed, longest_hit
from quire.kv.image import BlockName
from quire.kv.keys import group_key, group_keys, group_name
from quire.kv.loads import Found, Load
from quire.kv.pools.block_pool import Blocks
from quire.kv.tier_match import Answer, Places, locate_all

OnDevice = Callable[[int, int], bool]  # whether it has a group's block at a place of the chain


def nothing_there(group: int, place: int) -> bool:
    return False


class Image(NamedTuple):
    """A block that a hit needs and the device lacks."""

    group: int
    place: int  # of the chain
    found: Found


class GroupedMatch:
    """What the tiers have of a prefix. It is loaded or dropped, exactly once.

    Images in host memory that `take_hit` has chosen are held until then. While a far tier is still
    asked, the match is not ready: it may yet grow.
    """

    def __init__(
        self,
        store: Places,
        windows: Sequence[Window],
        block_size: int,
        names: Sequence[BlockName],
        first: int,
        reached: int,
        on_device: OnDevice,
        patience: float,
    ) -> None:
        """`names` are those of the chain, from place `first` on.

        The device has the full groups' blocks of all places before `reached`.
        """
        self.first, self.reached = first, reached
        self.end = first + len(names)
        self.hit = 0  # blocks of the chain, as chosen
        self.images: list[Image] = []  # that the hit needs, group by group
        self.chain_keys = [name.key for name in names]
        self._store = store
        self._windows = tuple(windows)
        self._block_size = block_size
        self._names = names
        self._full = [group for group, window in enumerate(windows) if window is None]
        self._sliding = [group for group, window in enumerate(windows) if window is not None]
        self._absent: set[tuple[int, int]] = set()  # gone between being found and being held
        self._over = False
        self._on_device = on_device
        # A far tier is asked for all blocks in one round trip: of full groups from `reached` on,
        # of windows wherever a hit may end.
        self._starts = [reached if window is None else first for window in windows]
        self._answers: list[Answer] = []
        self._heard: list[Answer] = []
        if self.take_hit(on_device, self.end) < self.end and patience:
            self._answers = store.ask(self._asked_keys, 0, patience)

    def ready(self) -> bool:
        """Whether all tiers have answered, or are too late."""
        if not self._answers:
            return True
        now = self._store.clock()
        if any(not answer.done() and now < answer.deadline for answer in self._answers):
            return False
        answers, self._answers = self._answers, []
        self._heard = [answer for answer in answers if answer.done()]
        self.take_hit(self._on_device, self.end)
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is ready; False if it is not by then."""
        until = float("inf") if timeout is None else time.monotonic() + timeout
        for answer in self._answers:
            answer.wait(max(0.0, min(until, answer.deadline) - time.monotonic()))
        return self.ready()

    def take_hit(self, on_device: OnDevice, most: int) -> int:
        """Choose the longest hit of at most so many blocks, and hold the images that it needs.

        Returns its length in blocks; another hit may be taken instead later.
        """
        self._release()
        reach = self._hold_full(min(most, self.end))
        sliding = [self._windows[group] for group in self._sliding]

        def has(at: int, place: int) -> bool:
            group = self._sliding[at]
            return on_device(group, place) or self._is_below(group, place)

        while True:
            self.hit = longest_hit(reach, sliding, self._block_size, has)
            if self._hold_windows(on_device):
                break
        if self.hit < reach:
            unneeded = [each.found for each in self.images if each.place >= self.hit]
            self._store.release(unneeded)
            self.images = [each for each in self.images if each.place < self.hit]
        return self.hit

    @property
    def num_groups(self) -> int:
        return len(self._windows)

    def first_needed(self, group: int) -> int:
        """The first place whose block of this group the hit needs."""
        return first_needed(self.hit * self._block_size, self._windows[group], self._block_size)

    def load(self, blocks: Blocks) -> Load:
        """Begin to bring `images` into these blocks of the device, one each."""
        self._finish()
        found = [image.found for image in self.images]
        places = [image.place for image in self.images]
        return self._store.load(self.names(), found, blocks, places)

    def load_tables(self, tables: Sequence[Blocks]) -> Load:
        """Begin to bring the hit to the device: a table for each group, whose last block is the
        hit's last.

        A table has an id for each block of the hit, of which those before `first_needed` are not
        touched, or an id for each block from `first_needed` on. All that the hit needs is there
        when the load has `is_whole`, else none is of use; `num_loaded` counts images of all groups,
        one group's behind the other's.
        """
        needed = [self.hit - self.first_needed(group) for group in range(self.num_groups)]
        try:
            check_tables_of_hit(tables, self.hit, needed)
        except KVError:
            self.drop()  # as a load with wrong ids does
            raise
        return self.load([tables[i.group][i.place - self.hit] for i in self.images])

    def __len__(self) -> int:
        """Blocks of the chain that are a hit."""
        return self.hit

    def drop(self) -> None:
        """Release what the match holds; it will not be loaded."""
        self._finish()
        self._release()

    def names(self) -> list[BlockName]:
        """The names of the images that the hit needs."""
        return [group_name(self._names[i.place - self.first], i.group) for i in self.images]

    # --- parts of a hit ---------------------------------------------------------------------------

    def _hold_full(self, most: int) -> int:
        """How many places the full groups have, on the device or in tiers, which are held."""
        reach = most
        for group in self._full:
            found = self._locate(group, range(self.reached, reach))
            reach = min(reach, self.reached + len(found))
            self.images += map(Image, repeat(group), range(self.reached, reach), found)
        return reach

    def _hold_windows(self, on_device: OnDevice) -> bool:
        """Whether all that the hit needs of windows could be held."""
        held: list[Image] = []
        for group in self._sliding:
            needed = range(self.first_needed(group), self.hit)
            places = [place for place in needed if not on_device(group, place)]
            found = self._locate(group, places)
            held += [Image(group, *each) for each in zip(places, found, strict=False)]
            if len(found) < len(places):
                self._absent.add((group, places[len(found)]))
                self._store.release([image.found for image in held])
                return False
        self.images += held
        return True

    def _is_below(self, group: int, place: int) -> bool:
        """Whether some tier has this block."""
        if place < self.first or (group, place) in self._absent:
            return False
        key = group_key(self.chain_keys[place - self.first], group)
        return bool(self._store.locate([key], hold=False)) or self._far(group, place) is not None

    def _locate(self, group: int, places: Sequence[int]) -> list[Found]:
        """Where blocks are, from the first on; those in host memory are held."""
        chain = [self.chain_keys[place - self.first] for place in places]
        keys = group_keys(chain, group)
        return locate_all(self._store, keys, lambda at: self._far(group, places[at]))

    def _far(self, group: int, place: int) -> Found | None:
        """Where a far tier has said that it has this block."""
        at = sum(self.end - start for start in self._starts[:group]) + place - self._starts[group]
        for answer in self._heard:
            if at < len(answer.holds) and answer.holds[at]:
                return Found(answer.place)
        return None

    def _asked_keys(self) -> list[bytes]:
        keys: list[bytes] = []
        for group, start in enumerate(self._starts):
            keys += group_keys(self.chain_keys[start - self.first :], group)
        return keys

    def _release(self) -> None:
        self._store.release([image.found for image in self.images])
        self.hit, self.images = 0, []

    def _finish(self) -> None:
        if self._over:
            raise KVError("A match is loaded or dropped once; match again.")
        self._over = True
