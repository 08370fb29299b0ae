"""A budget for thinking, held by the markers that a model's answers have.

tags        <think> … </think>              the thought is closed with its tag
channels    <|channel|>analysis<|message|> … <|end|>    … and another message is begun

Which message is a thought its header says, in whatever tokens it is spelled. Behind the header of
channels' last message, <|channel|>final, no thought comes. A call of a function on the channel of
thoughts has it for a recipient in its header, and is not bounded.
"""

from __future__ import annotations

from dataclasses import replace

from quire.api.reasoning.answer_format import AnswerFormat
from quire.api.reasoning.tags import Opening, ThoughtTags
from quire.api.tools import harmony
from quire.errors import RequestError
from quire.models.text.tokenizer import Tokenizer
from quire.params import SamplingParams
from quire.thinking import ANALYSIS, CHANNEL, FINAL, ThoughtMarkers


def with_budget(
    params: SamplingParams,
    answer_format: AnswerFormat,
    tokenizer: Tokenizer | None,
    opening: Opening,
    is_wish: bool = False,
) -> SamplingParams:
    """The same with the markers that are needed; without a budget, if there is no thought to come,
    or if it cannot be held and is but a wish, as where an API has thoughts only with one.

    A budget needs markers; stop strings need those of channels, whose headers are not searched.
    """
    if params.thought_markers is not None:
        return params
    if params.thinking_token_budget is None:
        if tokenizer is None or not params.stop or not answer_format.calls.has_channels:
            return params
        return replace(params, thought_markers=_channels(tokenizer))
    if tokenizer is None or not answer_format.has_thoughts or opening == "closed":
        return replace(params, thinking_token_budget=None)
    tags = answer_format.thoughts
    markers = _channels(tokenizer) if tags is None else _tags(tokenizer, tags, opening)
    if markers is None and is_wish:
        return replace(params, thinking_token_budget=None)
    if markers is None:
        raise RequestError(
            "thinking_token_budget cannot be held: the marks around this model's thoughts are no "
            "tokens of its vocabulary; leave it out."
        )
    return replace(params, thought_markers=markers)


def _tags(tokenizer: Tokenizer, tags: ThoughtTags, opening: Opening) -> ThoughtMarkers | None:
    ids = _ids(tokenizer, tags.open, tags.close)
    if ids is None:
        return None
    return ThoughtMarkers(ids[:1], ids[1:], is_open=opening == "open")


def _channels(tokenizer: Tokenizer) -> ThoughtMarkers | None:
    ids = _ids(tokenizer, CHANNEL, harmony.MESSAGE, harmony.END, harmony.START)
    if ids is None:
        return None
    channel, message, end, start = ids
    between = map(tokenizer.backend.token_to_id, harmony.ENDS)
    words = (ANALYSIS, FINAL, "assistant")
    analysis, final, assistant = (tokenizer.encode(word, False) for word in words)
    return ThoughtMarkers(
        opens=(channel, *analysis, message),
        closes=(end, start, *assistant, channel),
        ends=(channel, *final),
        comes_first=False,
        between=tuple(each for each in between if each is not None),
    )


def _ids(tokenizer: Tokenizer, *tags: str) -> tuple[int, ...] | None:
    """None unless each tag is a token."""
    ids = [tokenizer.backend.token_to_id(tag) for tag in tags]
    known = tuple(each for each in ids if each is not None)
    return known if len(known) == len(ids) else None
