"""Chats of Python's interface: parameters that fit how the model thinks, and what its text says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.api.reasoning.answer_format import AnswerFormat
from quire.api.reasoning.budget import with_budget
from quire.api.reasoning.preamble import preamble
from quire.api.tools.events import CallArguments, Reasoning, Text
from quire.api.tools.parser import AnswerParser
from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.kv.index import TokenIds
from quire.models.text.tokenizer import Tokenizer
from quire.params import SamplingParams


def chat_params(params: SamplingParams, chat: ThinkingChat | None) -> SamplingParams:
    """For the answer to a chat; one in which the model does not think is within any budget."""
    if chat is not None:
        return chat.params(params)
    if params.thinking_token_budget is None or params.thought_markers is not None:
        return params
    return replace(params, thinking_token_budget=None)


class ThinkingChat:
    """One chat with a model that thinks; `prompt_ids` show how its answer begins."""

    def __init__(
        self,
        answer_format: AnswerFormat,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] | TokenIds,
    ) -> None:
        self._format = answer_format
        self._tokenizer = tokenizer
        self._opening = answer_format.opening(tokenizer, prompt_ids)

    @classmethod
    def of(
        cls, tokenizer: Tokenizer | None, prompt_ids: Sequence[int] | TokenIds
    ) -> ThinkingChat | None:
        """None where the model does not think, so that all of its text is words."""
        if tokenizer is None:
            return None
        answer_format = AnswerFormat.choose(tokenizer.chat_template)
        return cls(answer_format, tokenizer, prompt_ids) if answer_format.has_thoughts else None

    def params(self, params: SamplingParams) -> SamplingParams:
        """The same, with all tags in the text, marks that a budget for thoughts is held by, and a
        form that begins behind the thoughts."""
        params = with_budget(params, self._format, self._tokenizer, self._opening)
        if self._format.shows_special(self._tokenizer, may_call=False):
            params = replace(params, skip_special_tokens=False)
        form = params.structured
        if form is None or form.preamble is not None:
            return params
        first = preamble(self._format, self._tokenizer, self._opening, has_header=False)
        return replace(params, structured=replace(form, preamble=first))

    def parser(self) -> AnswerParser:
        return self._format.parser(self._opening, may_call=False)

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
