"""Fields of Quire's own APIs, where a request of another of these APIs has them.

One that would change the answer is refused, with what to use instead. A value that asks for
nothing, such as `n: 1`, may be sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Elsewhere(NamedTuple):
    instead: str
    neutral: tuple[Any, ...] = ()  # values that ask for nothing; None always does


_BY_FORM = "use text.format in responses and output_config.format in messages"
_BY_MESSAGE = "send it as a message"
_BY_CHAT = "use a chat"
_BY_CHATS = "use chats or completions"

_FORMS = (
    *("guided_choice", "guided_grammar", "guided_json", "guided_regex"),
    *("ebnf", "grammar", "json_schema", "regex", "structured", "structured_outputs"),
)
ELSEWHERE: Mapping[str, Elsewhere] = {
    # The form of the answer, and how much of it there is.
    **dict.fromkeys(_FORMS, Elsewhere(_BY_FORM, ("",))),
    "guided_json_object": Elsewhere(_BY_FORM, (False,)),
    "response_format": Elsewhere(_BY_FORM, ({"type": "text"},)),
    "output_config": Elsewhere("use response_format, or text.format in responses", ({},)),
    "text": Elsewhere(
        "use response_format, or output_config.format in messages",
        ({}, {"format": {"type": "text"}}),
    ),
    "n": Elsewhere("send the request several times", (1,)),
    "best_of": Elsewhere(_BY_CHATS, (1,)),
    "use_beam_search": Elsewhere(_BY_CHATS, (False,)),
    "max_completion_tokens": Elsewhere("use max_tokens, or max_output_tokens in responses"),
    "max_output_tokens": Elsewhere("use max_tokens"),
    # What comes back.
    "echo": Elsewhere("use completions", (False,)),
    "logprobs": Elsewhere("use top_logprobs in responses", (False,)),
    "top_logprobs": Elsewhere("use chats or responses", (0,)),
    "prompt_logprobs": Elsewhere(_BY_CHATS),
    "return_token_ids": Elsewhere(_BY_CHATS, (False,)),
    "include": Elsewhere("use logprobs", ([],)),
    "include_reasoning": Elsewhere(_BY_CHAT, (True,)),
    "separate_reasoning": Elsewhere(_BY_CHAT, (True, False)),
    "background": Elsewhere("use responses", (False,)),
    # What the model reads.
    "input": Elsewhere("use messages, or prompt in completions"),
    "messages": Elsewhere("use input in responses and prompt in completions"),
    "prompt": Elsewhere("use messages"),
    "instructions": Elsewhere(_BY_MESSAGE, ("",)),
    "system": Elsewhere(_BY_MESSAGE, ("", [])),
    "previous_response_id": Elsewhere("send the whole conversation"),
    "thread": Elsewhere("send the whole conversation"),
    "suffix": Elsewhere("use completions", ("",)),
    "chat_template_kwargs": Elsewhere(_BY_CHAT, ({},)),
    "add_generation_prompt": Elsewhere(_BY_CHAT, (True,)),
    "add_special_tokens": Elsewhere("use completions", (False,)),
    "continue_final_message": Elsewhere(_BY_CHAT, (False,)),
    "truncate_prompt_tokens": Elsewhere("use truncation in responses"),
    "truncation": Elsewhere("use truncate_prompt_tokens", ("disabled",)),
    # Tools.
    "tools": Elsewhere(_BY_CHAT, ([],)),
    "tool_choice": Elsewhere(_BY_CHAT, ("none", "auto")),
    "functions": Elsewhere("use tools", ([],)),
    "function_call": Elsewhere("use tool_choice", ("none", "auto")),
    "parallel_tool_calls": Elsewhere("use disable_parallel_tool_use in messages", (True,)),
}


def refusal_elsewhere(name: str, value: Any) -> str | None:
    """Why a field with this value is refused by an API that has it not; None if it may be sent."""
    found = ELSEWHERE.get(name)
    if found is None or value is None or value in found.neutral:
        return None
    return f"{name} is not a field of this API; {found.instead}."
