"""Chats of Python's interface: parameters that fit how the model thinks, and what its text says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.api.reasoning.answer_format import AnswerFormat, prompt_end
from quire.api.reasoning.preamble import preamble
from quire.api.tools.events import CallArguments, Reasoning, Text
from quire.api.tools.parser import AnswerParser
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.models.text.tokenizer import Tokenizer
from quire.params import SamplingParams


class ThinkingChat:
    """One chat with a model that thinks; `prompt_ids` show how its answer begins."""

    def __init__(
        self, answer_format: AnswerFormat, tokenizer: Tokenizer, prompt_ids: Sequence[int]
    ) -> None:
        self._format = answer_format
        self._tokenizer = tokenizer
        self._prompt_end = prompt_end(tokenizer, prompt_ids)

    def params(self, params: SamplingParams) -> SamplingParams:
        """The same, with all tags in the text, and with a form that begins behind the thoughts."""
        if self._format.shows_special(self._tokenizer, may_call=False):
            params = replace(params, skip_special_tokens=False)
        form = params.structured
        if form is None or form.preamble is not None:
            return params
        first = preamble(self._format, self._tokenizer, self._prompt_end, has_header=False)
        return replace(params, structured=replace(form, preamble=first))

    def parser(self) -> AnswerParser:
        return self._format.parser(self._prompt_end, may_call=False)

    def read(self, output: RequestOutput) -> None:
        """Tell thoughts from words in all answers of a chat."""
        for answer in output.outputs:
            self._read(answer)

    def _read(self, answer: CompletionOutput) -> None:
        """Leave the words in `text`; what is written as a call is words, too."""
        parser = self.parser()
        events = parser.push(answer.text) + parser.flush(is_cut=answer.finish_reason == "length")
        words = [event.text for event in events if isinstance(event, (Text, CallArguments))]
        thoughts = [event.text for event in events if isinstance(event, Reasoning)]
        answer.text, answer.reasoning = "".join(words), "".join(thoughts) or None
