"""Reads one call, `{"name": …, "arguments": {…}}`, as its text comes in.

    head        held until the name is known and the arguments begin
    arguments   passed on as they come
    tail        what else is in the object, thrown away

An object that begins another way is held until it is whole, and then looked at.
"""

from __future__ import annotations

import json
import re
from typing import Any

from quire.api.tools.events import CallArguments, CallBegins, Event
from quire.api.tools.json_scan import JsonScan, outer_keys

_STRING = r'"((?:[^"\\]|\\.)*)"'
HEAD = re.compile(
    rf'\s*\{{\s*"name"\s*:\s*{_STRING}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
FIRST_KEY = re.compile(rf"\s*\{{\s*{_STRING}")
KEYS = {"name", "arguments", "parameters", "type", "function", "id"}


class CallReader:
    """`feed` it text until it `is_done`, or `is_no_call`; then `rest` is what it did not take."""

    def __init__(self, index: int, is_marked: bool = True) -> None:
        """Behind a mark, a name alone is a call; without, any object may have a name."""
        self._index = index
        self._is_marked = is_marked
        self._held = ""
        self._whole = JsonScan()  # over what is held
        self._object: JsonScan | None = JsonScan()  # None: there are only arguments
        self._arguments: JsonScan | None = None  # None: they have not begun
        self.is_done = False
        self.is_no_call = False
        self.rest = ""

    @classmethod
    def behind_name(cls, index: int) -> CallReader:
        """For a call whose name is known, of which only the arguments follow."""
        reader = cls(index)
        reader._object, reader._arguments = None, JsonScan()
        return reader

    @property
    def has_begun(self) -> bool:
        """Whether anything of it was passed on, so that it cannot be taken back."""
        return self._arguments is not None

    def feed(self, text: str) -> list[Event]:
        if self._arguments is not None:
            return self._feed_arguments(self._arguments, text)
        self._held += text
        head = HEAD.match(self._held)
        if head and (name := _parsed(f'"{head[1]}"')):
            self._arguments = JsonScan()
            assert self._object is not None
            self._object.feed(self._held[: head.end()])
            more = self._feed_arguments(self._arguments, self._held[head.end() :])
            return [CallBegins(self._index, name), *more]
        return self._look_at_whole(text)

    @property
    def may_be_call(self) -> bool:
        """Whether what is held can be the beginning of one; without a mark, by its keys."""
        if self._is_marked:
            return True
        keys, begun = outer_keys(self._held)
        return KEYS.issuperset(keys) and any(key.startswith(begun) for key in KEYS)

    def give_up(self) -> str:
        """No more text comes: what was held, if it is no call."""
        return "" if self.has_begun else self._held

    def _look_at_whole(self, new: str) -> list[Event]:
        stripped = self._held.lstrip()
        first = FIRST_KEY.match(self._held)
        if (stripped and stripped[0] != "{") or (first and first[1] not in KEYS):
            return self._refuse()
        taken = len(self._held) - len(new) + self._whole.feed(new)
        if self._whole.is_broken:
            return self._refuse()
        if not self._whole.is_done:
            return []
        found = call_of(_parsed(self._held[:taken]), self._is_marked)
        if found is None:
            return self._refuse()
        self.is_done, self.rest = True, self._held[taken:]
        name, arguments = found
        return [CallBegins(self._index, name), CallArguments(self._index, arguments)]

    def _refuse(self) -> list[Event]:
        self.is_no_call, self.rest, self._held = True, self._held, ""
        return []

    def _feed_arguments(self, scan: JsonScan, text: str) -> list[Event]:
        events: list[Event] = []
        if not (scan.is_done or scan.is_broken):
            taken = scan.feed(text)
            if taken:
                events.append(CallArguments(self._index, text[:taken]))
                if self._object is not None:
                    self._object.feed(text[:taken])
            text = text[taken:]
        if scan.is_done and self._object is not None:
            text = text[self._object.feed(text) :]
            self.is_done = self._object.is_done or self._object.is_broken
        else:
            self.is_done = scan.is_done or scan.is_broken
        self.rest = text
        return events


def call_of(value: Any, is_marked: bool) -> tuple[str, str] | None:
    """Name and arguments of a call that is written as an object, in whatever order."""
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None and not is_marked:
        return None
    if isinstance(arguments, str):  # as JSON in JSON
        return name, arguments
    return name, json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
