"""The tags between which models think, and which of them a model has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.api.reasoning.names import ALIASES, AUTO, HARMONY, OFF, TAGGED_NAMES

Opening = Literal["open", "closed", "free"]


@dataclass(frozen=True)
class ThoughtTags:
    open: str
    close: str
    begins_open: bool = False  # answers begin within a thought, even if the prompt shows no tag

    def opening(self, prompt_end: str) -> Opening:
        """How an answer begins behind this prompt: within a thought, behind one, or as it likes.

        Some templates write the first tag themselves, so that answers have the second one alone,
        and an empty thought where the model shall not think.
        """
        end = prompt_end.rstrip()
        if end.endswith(self.close):
            return "closed"
        return "open" if self.begins_open or end.endswith(self.open) else "free"

    def opening_behind(self, begun: str) -> Opening:
        """The same of an answer whose beginning was given: no thought can begin in its middle."""
        return "open" if begun.rfind(self.open) > begun.rfind(self.close) else "closed"


TAGS = {
    "think": ThoughtTags("<think>", "</think>"),
    "deepseek_r1": ThoughtTags("<think>", "</think>", begins_open=True),
    "mistral": ThoughtTags("[THINK]", "[/THINK]"),
    "seed_oss": ThoughtTags("<seed:think>", "</seed:think>"),
}
assert tuple(TAGS) == TAGGED_NAMES


def choose_tags(chat_template: str | None, setting: str = AUTO) -> ThoughtTags | None:
    """Those that are set, or that the model's chat template shows it to have."""
    if setting == AUTO:
        shown = (tags for tags in TAGS.values() if tags.close in (chat_template or ""))
        return next(shown, None)
    name = ALIASES.get(setting, setting)
    return None if name in (OFF, HARMONY) else TAGS[name]
