"""How much a model shall think, as variables of chat templates, which know it by several names."""

from __future__ import annotations

from typing import Any

# OpenAI's scale; gpt-oss was trained on the three in the middle.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
IN_CHANNELS = {"none": "low", "minimal": "low", "xhigh": "high"}


def thinks(on: bool) -> dict[str, Any]:
    """Whether the model shall think at all: Qwen's name for it, and DeepSeek's and Granite's."""
    return {"enable_thinking": on, "thinking": on}


def effort_variables(effort: str, *, has_channels: bool) -> dict[str, Any]:
    if has_channels:
        return {"reasoning_effort": IN_CHANNELS.get(effort, effort)}
    return {"reasoning_effort": effort, **thinks(effort != "none")}
