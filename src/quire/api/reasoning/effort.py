"""How much a model shall think, as variables of chat templates, which know it by several names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# OpenAI's scale; gpt-oss was trained on the three in the middle.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
IN_CHANNELS = {"none": "low", "minimal": "low", "xhigh": "high"}


def thinking_variables(given: Mapping[str, Any], *, has_channels: bool) -> dict[str, Any]:
    """The same variables, and what they say of thinking under the names that templates have.

    `enable_thinking` is Qwen's, `thinking` DeepSeek's and Granite's. An effort sets them, too, but
    not against a variable that is given.
    """
    effort, implied = given.get("reasoning_effort"), {}
    if effort in EFFORTS:
        implied = _switch(effort != "none")
    switch = given.get("enable_thinking", given.get("thinking"))
    if isinstance(switch, bool):
        implied = _switch(switch)
    variables = {**implied, **given}
    if has_channels and effort in EFFORTS:
        variables["reasoning_effort"] = IN_CHANNELS.get(effort, effort)
    return variables


def _switch(on: bool) -> dict[str, Any]:
    return {"enable_thinking": on, "thinking": on}
