"""Whether a chat template has a place for tools, found without running any of it."""

from __future__ import annotations

from functools import lru_cache

from jinja2 import TemplateError, nodes

from quire.models.text.chat_template import MOST_TEMPLATE
from quire.models.text.template_environment import template_environment


@lru_cache(maxsize=64)
def takes_tools(template: str) -> bool:
    """Whether a template has a place for tools; one that is broken has none."""
    if len(template) > MOST_TEMPLATE:
        return False
    try:
        parsed = template_environment().parse(template)  # which runs nothing of it
    except (TemplateError, RecursionError):
        return False
    for node in parsed.body:
        uses = {name.ctx for name in node.find_all(nodes.Name) if name.name == "tools"}
        if "load" in uses:
            return True
        if "store" in uses and isinstance(node, nodes.Assign):
            return False  # what it reads from here on is its own
    return False
