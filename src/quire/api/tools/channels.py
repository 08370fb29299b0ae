"""Whole answers of a model that writes in channels: the words, and the thoughts beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.api.tools.events import CallArguments, Reasoning, Text
from quire.api.tools.parser import AnswerParser
from quire.engine.outputs import CompletionOutput
from quire.params import SamplingParams


def with_special_tokens(params: Any) -> Any:
    """The same, with tags in the text, which are special tokens. What are no `SamplingParams` stays
    as it is, for `LLM.generate` to refuse."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, list | tuple):
        return [each if each is None else with_special_tokens(each) for each in params]
    if not isinstance(params, SamplingParams):
        return params
    return replace(params, skip_special_tokens=False)


def read_channels(answer: CompletionOutput, parser: AnswerParser) -> None:
    """Leave the words in `text`; a call that no tool was offered for is words, as in a server."""
    events = parser.push(answer.text) + parser.flush(is_cut=answer.finish_reason == "length")
    words = [event.text for event in events if isinstance(event, (Text, CallArguments))]
    thoughts = [event.text for event in events if isinstance(event, Reasoning)]
    answer.text, answer.reasoning = "".join(words), "".join(thoughts) or None
