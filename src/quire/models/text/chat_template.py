"""Chat templates: a conversation becomes the prompt text that the model was trained on.

A template is a program that comes with the model, so it runs in jinja2's sandbox
(`template_environment`), and in a process of its own with bounds (`template_process`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.checks import shorten
from quire.errors import RequestError
from quire.models.text.template_process import TemplateProcess

MOST_TEMPLATE = 1 << 20  # characters
MOST_SAID = 300  # characters of what a template raises, which may be a whole conversation
RESERVED = ("messages", "add_generation_prompt", "self")  # no variable may take these names

PROCESS = TemplateProcess()


def refuse_reserved(variables: Mapping[str, Any], others: Sequence[str] = ()) -> None:
    """Raise for variables that a user may not set; `others` is what the request has fields for."""
    for name in (*RESERVED, *others):
        if name in variables:
            raise RequestError(
                f"chat_template_kwargs may not set {name!r}, which has its own place in the "
                "conversation; leave it out."
            )


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
    process: TemplateProcess = PROCESS,
) -> str:
    """The prompt text of a conversation; `variables` are handed to the template by name."""
    values = {"tools": None, "documents": None, **(variables or {})}
    values["messages"] = _checked(messages)
    values["add_generation_prompt"] = add_generation_prompt
    if len(template) > MOST_TEMPLATE:
        raise RequestError(
            f"The model's chat template has more than {MOST_TEMPLATE:,} characters; give a prompt "
            f"instead."
        )
    try:
        answer = process.render(template, values)
    except (TypeError, ValueError, RecursionError):
        raise RequestError(
            "The messages and chat_template_kwargs must be plain data, as JSON has it; change them."
        ) from None
    if "broken" in answer:
        raise RequestError(
            f"The model's chat template is broken ({_sentence(answer['broken'])}); give a prompt"
            " instead."
        )
    if "error" in answer:
        raise RequestError(
            f"The model's chat template refuses this conversation ({_sentence(answer['error'])});"
            " change the messages or give a prompt instead."
        )
    return answer["text"]


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("A conversation must be a list of messages with role and content.")
    if not messages:
        raise RequestError("A conversation must have at least one message.")
    return [_checked_message(i, message) for i, message in enumerate(messages)]


def _checked_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"Message {index} must be a mapping with role and content.")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(
            f"Message {index} needs a role, such as 'system', 'user' or 'assistant'."
        )
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise RequestError(f"Message {index} needs content: a string or a list of text parts.")
    return {**message, "content": plain_text(index, content)}


def plain_text(index: int, content: Any) -> str | None:
    """Templates of text models expect one string: text parts are joined by line breaks."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(f"The content of message {index} must be a string or a list of parts.")
    return "\n".join(_part(index, part) for part in content)


def _part(index: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise RequestError(
            f"A content part of message {index} is not of the form"
            " {'type': 'text', 'text': ...}, the only form this model takes."
        )
    return text


def _sentence(reason: str) -> str:
    return shorten(" ".join(reason.split()).rstrip("."), MOST_SAID)
