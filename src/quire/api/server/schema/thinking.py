"""Whether and how much a model shall think, and whether its thoughts are shown: fields of chats and
responses, by all the names that servers have given them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from quire.api.server.errors import bad_request
from quire.api.server.schema.common import CommonFields
from quire.errors import RequestError
from quire.models.text.chat_template import refuse_reserved

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Thinking(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["enabled", "disabled", "adaptive", "auto"] = "enabled"
    budget_tokens: int | None = None


class Reasoning(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    effort: Effort | None = None
    # OpenRouter's.
    max_tokens: int | None = None
    exclude: bool | None = None
    enabled: bool | None = None


class ThinkingFields(CommonFields):
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None  # Qwen's
    thinking: Thinking | None = None  # DeepSeek's and Z.ai's
    thinking_token_budget: int | None = None  # vLLM's; -1 is none
    thinking_budget: int | None = None  # Qwen's name for it
    reasoning: Reasoning | None = None
    include_reasoning: bool | None = None  # vLLM's and OpenRouter's

    @property
    def effort(self) -> Effort | None:
        inner = self.reasoning.effort if self.reasoning is not None else None
        return self.reasoning_effort or inner

    @property
    def shows_thoughts(self) -> bool:
        excludes = self.reasoning is not None and bool(self.reasoning.exclude)
        return self.include_reasoning is not False and not excludes

    def template_variables(self) -> dict[str, Any]:
        """`chat_template_kwargs`, and what other fields say of how much the model shall think."""
        switch = self.enable_thinking
        if switch is None and self.reasoning is not None:
            switch = self.reasoning.enabled
        if switch is None and self.thinking is not None:
            switch = self.thinking.type != "disabled"
        asked = {"reasoning_effort": self.effort, "enable_thinking": switch}
        named = template_variables(self.chat_template_kwargs)
        return {name: value for name, value in asked.items() if value is not None} | named

    def budget_of_thought(self) -> int | None:
        """The budget, by whichever of its names it was given; -1 means that there is none."""
        thinking, reasoning = self.thinking, self.reasoning
        given = {
            "thinking_token_budget": self.thinking_token_budget,
            "thinking_budget": self.thinking_budget,
            "thinking.budget_tokens": None if thinking is None else thinking.budget_tokens,
            "reasoning.max_tokens": None if reasoning is None else reasoning.max_tokens,
        }
        asked = {name: value for name, value in given.items() if value is not None}
        if len({*asked.values()}) > 1:
            raise bad_request(f"Give one of {' and '.join(asked)}, not both.")
        budget = next(iter(asked.values()), None)
        return None if budget == -1 else budget


def template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """`chat_template_kwargs`, without what requests have fields for."""
    try:
        refuse_reserved(given or {}, others=("tools",))
    except RequestError as error:
        raise bad_request(str(error), param="chat_template_kwargs") from None
    return dict(given or {})
