"""Mistral's way: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`; later `[TOOL_CALLS]name{…}`."""

from __future__ import annotations

from quire.api.tools.call_reader import CallReader
from quire.api.tools.events import CallBegins, Event
from quire.api.tools.parser import ToolParser

TAG = "[TOOL_CALLS]"
ARGUMENTS, CALL_ID = "[ARGS]", "[CALL_ID]"
LONGEST_NAME = 256


class MistralParser(ToolParser):
    tags = (TAG,)
    inner_tags = (ARGUMENTS, CALL_ID)

    def __init__(self, only_one: bool = False) -> None:
        super().__init__(only_one)
        self._is_open = False  # behind the tag
        self._in_list = False

    def _advance(self) -> bool:
        if self._reader is None and self._is_open:
            return self._look_for_call()
        return super()._advance()

    def flush(self, is_cut: bool = False) -> list[Event]:
        if self._reader is None and self._is_open and (is_cut or self._in_list):
            self._buffer = ""  # a name, or what stands between calls
        return super().flush(is_cut)

    def _look_for_call(self) -> bool:
        stripped = self._buffer.lstrip(" \t\r\n," if self._in_list else " \t\r\n")
        if not stripped:
            return False
        if stripped[0] == "[" and not self._in_list:
            self._in_list, self._buffer = True, stripped[1:]
            return True
        if stripped[0] == "]" and self._in_list:
            self._buffer = stripped[1:]
            self._close()
            return True
        if stripped[0] == "{":
            self._buffer = stripped
            self._begin_call()
            return True
        if self._in_list:
            self._close()
            return True
        return self._look_for_name(stripped)

    def _look_for_name(self, text: str) -> bool:
        name, brace, arguments = text.partition("{")
        if not brace and len(text) <= LONGEST_NAME:
            return False
        self._is_open = False
        name = name.partition(ARGUMENTS)[0].partition(CALL_ID)[0].strip()
        if not brace or not name or any(char.isspace() for char in name):
            self._say(self._before)
            return True
        self._buffer = brace + arguments
        self._events.append(CallBegins(self.num_calls, name))
        self._reader = CallReader.behind_name(self.num_calls)
        self.num_calls += 1
        return True

    def _close(self) -> None:
        self._is_open = self._in_list = False
        self._gap = True

    def _on_tag(self, tag: str) -> None:
        self._is_open, self._in_list = True, False

    def _on_no_call(self) -> None:
        self._is_open = self._in_list = False
        super()._on_no_call()
