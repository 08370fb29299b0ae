"""The ways to write a call, and which of them a model knows."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.api.tools import harmony, hermes, llama, mistral
from quire.api.tools.names import AUTO, FORMAT_NAMES
from quire.api.tools.parser import AnswerParser
from quire.thinking import CHANNEL

if TYPE_CHECKING:
    from quire.models.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ToolFormat:
    name: str
    parser: type[AnswerParser]
    arguments: str = "arguments"  # the key that they have
    has_several: bool = True  # calls in one message
    has_channels: bool = False  # all of an answer is in it, not calls alone

    def new_id(self, prefix: str = "call") -> str:
        """A name for a call; Mistral's templates take only such as it has."""
        if self.parser is mistral.MistralParser:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"{prefix}_{secrets.token_hex(12)}"

    def shows_special(self, tokenizer: Tokenizer) -> bool:
        """Whether its tags are special tokens, which texts usually leave out."""
        tags = (*self.parser.tags, *self.parser.inner_tags)
        return any(tokenizer.backend.token_to_id(tag) in tokenizer.special_ids for tag in tags)


FORMATS = {
    each.name: each
    for each in [
        ToolFormat("hermes", hermes.HermesParser),
        ToolFormat("llama3", llama.LlamaParser, arguments="parameters", has_several=False),
        ToolFormat("mistral", mistral.MistralParser),
        ToolFormat("mistral-named", mistral.MistralParser),
        ToolFormat("harmony", harmony.HarmonyParser, has_several=False, has_channels=True),
    ]
}
assert tuple(FORMATS) == FORMAT_NAMES


def choose_format(chat_template: str | None, setting: str = AUTO) -> ToolFormat:
    """The one that is set, or that the model's chat template shows it; Hermes's where none is."""
    if setting != AUTO:
        return FORMATS[setting]
    template = chat_template or ""
    if CHANNEL in template:
        return FORMATS["harmony"]
    if mistral.TAG in template:
        return FORMATS["mistral-named" if mistral.ARGUMENTS in template else "mistral"]
    if hermes.OPEN not in template and llama.PYTHON_TAG in template:
        return FORMATS["llama3"]
    return FORMATS["hermes"]
