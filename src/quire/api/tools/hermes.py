"""Qwen's way, which Nous's Hermes began: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

from quire.api.tools.parser import ToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    tags = (OPEN, CLOSE)

    def _on_tag(self, tag: str) -> None:
        if tag == OPEN:
            self._begin_call()
        elif not self._gap:  # it closes nothing
            self._say(self._before)
