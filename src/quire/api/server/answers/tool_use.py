"""What one chat does with tools and thoughts: before it, the prompt and the form; after it, what
its text says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.api.reasoning.answer_format import AnswerFormat
from quire.api.reasoning.budget import with_budget
from quire.api.reasoning.effort import thinking_variables
from quire.api.reasoning.preamble import preamble
from quire.api.reasoning.tags import Opening
from quire.api.reasoning.token_count import thought_counter
from quire.api.server.answers.call_writer import CallWriter, FunctionCallWriter
from quire.api.server.answers.choices import Delta
from quire.api.server.answers.prompts import Prompt
from quire.api.tools.conversation import in_words, with_objects, with_thoughts
from quire.api.tools.custom import CustomCalls, as_function_calls
from quire.api.tools.definitions import Tool, ToolChoice, choose_tools, read_tools
from quire.api.tools.events import Event, Text
from quire.api.tools.forced import forced_calls, is_json
from quire.api.tools.formats import ToolFormat
from quire.models.text.template_tools import takes_tools
from quire.models.text.tokenizer import Tokenizer
from quire.params import SamplingParams
from quire.structured import StructuredOutput

Messages = list[dict[str, Any]]


@dataclass
class ToolUse:
    """`is_on` where the model may call; without `shows_thoughts` they are left out of answers."""

    tokenizer: Tokenizer | None
    answer_format: AnswerFormat
    tools: Sequence[Tool]
    choice: ToolChoice
    several: bool  # calls in one message
    shows_thoughts: bool = True
    calls_functions: bool = False  # calls are written as OpenAI did before there were tools
    tells_thoughts_apart: bool = True  # from words; else they stay in the text, tags and all
    _opening: Opening = "free"
    _writers: dict[int, CallWriter] = field(default_factory=dict)

    @classmethod
    def read(
        cls,
        tokenizer: Tokenizer | None,
        answer_format: AnswerFormat,
        tools: Any,
        choice: Any,
        several: bool | None,
    ) -> ToolUse:
        chosen = choose_tools(choice, read_tools(tools))
        return cls(tokenizer, answer_format, *chosen, several is not False)

    @property
    def tool_format(self) -> ToolFormat:
        return self.answer_format.calls

    @property
    def is_on(self) -> bool:
        return self.choice.kind != "none"

    @property
    def demanded(self) -> Tool | None:
        """A custom tool that has to be called, and whose input is held to a grammar."""
        wanted = [tool for tool in self.tools if self.choice.name in (None, tool.name)]
        if not self.choice.is_forced or len(wanted) != 1:
            return None
        custom = wanted[0].custom
        return None if custom is None or custom.syntax is None else wanted[0]

    @property
    def reads_answers(self) -> bool:
        """Whether texts are more than words: with calls, or with thoughts."""
        return self.is_on or self.answer_format.has_thoughts

    def conversation(
        self, messages: Messages, variables: dict[str, Any]
    ) -> tuple[Messages, dict[str, Any]]:
        """Messages and variables for the chat template."""
        has_channels = self.tool_format.has_channels
        messages = with_thoughts(as_function_calls(messages), has_channels)
        variables = thinking_variables(variables, has_channels=has_channels)
        tools = self.tools if self.is_on else ()
        template = self.tokenizer.chat_template if self.tokenizer is not None else None
        if not takes_tools(template or ""):
            return in_words(messages, tools), variables
        if tools:
            variables = {**variables, "tools": [tool.given for tool in tools]}
        return with_objects(messages), variables

    def params(
        self, params: SamplingParams, prompt: Prompt, budget_is_wish: bool = False
    ) -> SamplingParams:
        """`params` for the answer to this prompt: with tags in the text, where they are special
        tokens, with marks that a budget for thoughts is held by, and with a form that begins
        behind the thoughts."""
        if self.reads_answers and self.tokenizer is not None:
            token_ids, begun = prompt.token_ids, prompt.begun
            self._opening = self.answer_format.opening(self.tokenizer, token_ids, begun)
        params = with_budget(
            params, self.answer_format, self.tokenizer, self._opening, budget_is_wish
        )
        if not self.reads_answers or self.tokenizer is None:
            return params
        if self.answer_format.shows_special(self.tokenizer, self.is_on):
            params = replace(params, skip_special_tokens=False)
        form = self._form(params.structured)
        return params if form is None else replace(params, structured=form)

    def _form(self, asked: StructuredOutput | None) -> StructuredOutput | None:
        """A grammar that enforces a call, where the request demands one, or the form it asks for.

        Where the model may choose and the answer must be JSON, the grammar allows either.
        """
        assert self.tokenizer is not None
        form = asked
        if (tool := self.demanded) is not None and tool.custom is not None:
            first = preamble(self.answer_format, self.tokenizer, self._opening, has_header=False)
            form = tool.custom.form()
            return None if form is None else replace(form, preamble=first)
        calls = self.choice.is_forced or (self.is_on and asked is not None and is_json(asked))
        if calls:
            form = forced_calls(
                [tool for tool in self.tools if self.choice.name in (None, tool.name)],
                self.tool_format,
                self.tokenizer,
                several=self.several and self.choice.name is None,
                answer=None if self.choice.is_forced else asked,
            )
        if form is None or form.preamble is not None:
            return form
        first = preamble(self.answer_format, self.tokenizer, self._opening, has_header=calls)
        return replace(form, preamble=first)

    def events(self, delta: Delta) -> list[Event]:
        """What a choice's new text says: words, thoughts, pieces of calls."""
        if not self.reads_answers:
            return [Text(delta.text)] if delta.text else []
        return self.writer(delta.index).events(delta)

    def has_called(self, index: int) -> bool:
        """Whether a choice has begun a call."""
        return self.reads_answers and self.writer(index).has_called

    def writer(self, index: int) -> CallWriter:
        """Writes the thoughts, words and calls of one choice."""
        if index not in self._writers:
            self._writers[index] = self._new_writer()
        return self._writers[index]

    def _new_writer(self) -> CallWriter:
        read = self.answer_format
        # What a demanded tool is told are the words of the answer, without its thoughts.
        if self.demanded is not None:
            read = replace(read, merges=False)
        elif not self.tells_thoughts_apart:
            read = read.merged()
        counter = None
        if self.tokenizer is not None:
            counter = thought_counter(self.answer_format, self.tokenizer, self._opening)
        kind = FunctionCallWriter if self.calls_functions else CallWriter
        demanded = self.demanded
        may_call = self.is_on and demanded is None
        customs = [tool.name for tool in self.tools if tool.custom is not None]
        name = None if demanded is None else demanded.name
        return kind(
            read.parser(self._opening, may_call=may_call, only_one=not self.several),
            self.tool_format,
            may_call=self.is_on,
            shows_thoughts=self.shows_thoughts and read.has_thoughts and not read.merges,
            counter=counter,
            custom=CustomCalls(customs, name) if customs else None,
        )

    @property
    def reasoning_tokens(self) -> int | None:
        """Of all choices so far; None where they cannot be counted, or there are none to count."""
        counts = [writer.reasoning_tokens for writer in self._writers.values()]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None
