"""Llama 3's way: the message itself is `{"name": …, "parameters": {…}}`, or several with `;`.

A special token may stand before it.
"""

from __future__ import annotations

from quire.api.tools.events import Event
from quire.api.tools.parser import ToolParser

PYTHON_TAG = "<|python_tag|>"
BETWEEN = " \t\r\n;,"  # calls


class LlamaParser(ToolParser):
    tags = (PYTHON_TAG,)

    def __init__(self, only_one: bool = False) -> None:
        super().__init__(only_one)
        self._may_call = True  # at the beginning, and behind another call

    def _advance(self) -> bool:
        if self._reader is None and self._may_call:
            return self._look_for_call()
        return super()._advance()

    def flush(self, is_cut: bool = False) -> list[Event]:
        if self._reader is None and self._may_call and self.num_calls:
            self._buffer = self._buffer.lstrip(BETWEEN)
        return super().flush(is_cut)

    def _look_for_call(self) -> bool:
        stripped = self._buffer.lstrip(BETWEEN if self.num_calls else None)
        if not stripped:
            return False
        self._may_call = stripped.startswith("{")
        if self._may_call:
            self._before = self._buffer[: len(self._buffer) - len(stripped)]
            self._begin_call(is_marked=False)
        if self._may_call or self.num_calls:
            self._buffer = stripped
        return True

    def _on_tag(self, tag: str) -> None:
        self._before = ""  # a special token is never words
        self._may_call = True
        self._begin_call()

    def _on_no_call(self) -> None:
        self._may_call = False
        super()._on_no_call()
