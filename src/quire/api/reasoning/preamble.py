"""What a model may write before a form begins, its thoughts, as the rules of a grammar.

tags        (<think> … </think>)? the form       the first tag may stand in the prompt
channels    (analysis … <|end|> assistant)? final <|message|> the form
"""

from __future__ import annotations

import re

from quire.api.reasoning.answer_format import AnswerFormat
from quire.api.reasoning.tags import Opening, ThoughtTags
from quire.api.tools import harmony
from quire.api.tools.tag_terminals import TagTerminals
from quire.models.text.tokenizer import Tokenizer
from quire.thinking import ANALYSIS, CHANNEL

ANY_TEXT = r"/(.|\n)*/"
GAP = r"GAP: /\n{0,2}/"  # models are used to empty lines behind a thought


def preamble(
    answer_format: AnswerFormat, tokenizer: Tokenizer, opening: Opening, *, has_header: bool
) -> str | None:
    """None where nothing comes first. With `has_header` the form itself names its channel."""
    terminals = TagTerminals(tokenizer)
    if answer_format.calls.has_channels:
        return _of_channels(terminals, has_header, may_think=not answer_format.merges)
    tags = answer_format.thoughts
    return None if tags is None else _of_tags(terminals, tags, opening)


def _of_tags(terminals: TagTerminals, tags: ThoughtTags, opening: Opening) -> str | None:
    if opening == "closed":
        return None
    if terminals.are_tokens(tags.close):
        lines = [f"thought: TEXT {terminals(tags.close)} GAP", f"TEXT: {ANY_TEXT}", GAP]
    else:  # up to the first place where it is spelled
        spelled = re.escape(tags.close).replace("/", r"\/")
        lines = ["thought: text GAP", rf"text[lazy]: /(.|\n)*{spelled}/", GAP]
    first = "thought" if opening == "open" else f"({terminals(tags.open)} thought)?"
    return "\n".join([f"preamble: {first}", *lines])


def _of_channels(terminals: TagTerminals, has_header: bool, may_think: bool) -> str | None:
    """Where tags are no tokens, no thoughts: they could not be told from what comes behind. None
    either where they would be words, of which the form is one."""
    header = f'{terminals(CHANNEL)} "final" {terminals(harmony.MESSAGE)}'
    tags = (CHANNEL, harmony.MESSAGE, harmony.END, harmony.START)
    if not may_think or not terminals.are_tokens(*tags):
        return None if has_header else f"preamble: {header}"
    begin = f'{terminals(CHANNEL)} "{ANALYSIS}" {terminals(harmony.MESSAGE)}'
    end = f'{terminals(harmony.END)} {terminals(harmony.START)} "assistant"'
    thought = f"({begin} TEXT {end})?"
    first = thought if has_header else f"{thought} {header}"
    return f"preamble: {first}\nTEXT: {ANY_TEXT}"
