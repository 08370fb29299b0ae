"""Whole answers of a model that writes in channels: the words, and the thoughts beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.api.tools.events import CallArguments, Reasoning, Text
from quire.api.tools.parser import AnswerParser
from quire.engine.outputs import CompletionOutput
from quire.params import SamplingParams


def with_special_tokens(
    params: SamplingParams | Sequence[SamplingParams] | None,
) -> SamplingParams | list[SamplingParams]:
    """The same, with tags in the text, which are special tokens."""
    if params is None or isinstance(params, SamplingParams):
        return replace(params or SamplingParams(), skip_special_tokens=False)
    return [replace(each, skip_special_tokens=False) for each in params]


def read_channels(answer: CompletionOutput, parser: AnswerParser) -> None:
    """Leave the words in `text`; a call that no tool was offered for is words, as in a server."""
    events = parser.push(answer.text) + parser.flush(is_cut=answer.finish_reason == "length")
    words = [event.text for event in events if isinstance(event, (Text, CallArguments))]
    thoughts = [event.text for event in events if isinstance(event, Reasoning)]
    answer.text, answer.reasoning = "".join(words), "".join(thoughts) or None
