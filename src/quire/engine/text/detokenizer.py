"""From token ids to text, as the tokens come.

What is shown is never taken back: a character is held until it is whole, and text that may be
the beginning of a stop string until it is known not to be. The pieces joined are the whole text.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from copy import copy
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from quire.engine.text.headers import Headers
from quire.engine.text.stops import StopSearch
from quire.params import SamplingParams

BROKEN = "\ufffd"  # what decoders write for bytes that are no character, or not one yet
LONGEST_CHARACTER = 4  # bytes in UTF-8, and so tokens

PromptIds: TypeAlias = "Sequence[int] | npt.NDArray[np.int32]"


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    @property
    def is_byte_level(self) -> bool: ...

    @property
    def special_ids(self) -> Collection[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class TextStream(Protocol):
    """Turns tokens into whole characters, one token at a time."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...

    def fork(self) -> TextStream: ...


class ByteStream:
    """For tokenizers whose tokens are plain bytes: their text does not depend on neighbours."""

    def __init__(self, tokenizer: Decoder) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def fork(self) -> ByteStream:
        twin = copy(self)
        twin._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        twin._decoder.setstate(self._decoder.getstate())
        return twin


class ContextStream:
    """For tokenizers that decode a token by what stands before it (a space, half a character).

        ids   … shown before │ shown last │ not shown yet
                               ╰─ context ─╯╰── pending ──╯

    What the pending tokens add is `decode(context + pending)` less `decode(context)`. Both stay
    short, so that a token costs the same however long the text is.
    """

    MOST_PENDING = 2 * LONGEST_CHARACTER  # more than that never become a character

    def __init__(self, tokenizer: Decoder, skip_special: bool, prompt_ids: PromptIds) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._context = prompt_context(tokenizer, prompt_ids)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        self._pending.append(token_id)
        added = self._added()
        patient = len(self._pending) <= self.MOST_PENDING
        if added.endswith(BROKEN) and patient:
            return ""
        if added:
            self._context, self._pending = self._pending, []
        elif not patient:
            self._pending.pop()  # without text of its own, it only makes the wait longer
        return added

    def flush(self) -> str:
        added = self._added()
        self._context, self._pending = self._pending, []
        return added

    def fork(self) -> ContextStream:
        twin = copy(self)
        twin._pending = list(self._pending)  # the context is replaced as a whole
        return twin

    def _added(self) -> str:
        return decode_behind(self._tokenizer, self._context, self._pending, self._skip_special)


def prompt_context(tokenizer: Decoder, prompt_ids: PromptIds) -> list[int]:
    """The end of the prompt that decides how the first token reads: a few whole characters.

    Behind a special token, or half a character, the output is a text of its own.
    """
    for count in range(1, min(LONGEST_CHARACTER, len(prompt_ids)) + 1):
        if prompt_ids[-count] in tokenizer.special_ids:
            break
        context = [int(token_id) for token_id in prompt_ids[-count:]]
        if BROKEN not in tokenizer.decode(context):
            return context
    return []


def decode_behind(
    tokenizer: Decoder, context: list[int], ids: list[int], skip_special: bool
) -> str:
    """The text that `ids` add to that of `context`."""
    before = tokenizer.decode(context, skip_special_tokens=skip_special)
    both = tokenizer.decode(context + ids, skip_special_tokens=skip_special)
    if both.startswith(before):
        return both[len(before) :]
    # Broken bytes spoil the whole characters before them with some decoders: leave those out.
    return tokenizer.decode(ids, skip_special_tokens=skip_special)


class Detokenizer:
    """The text of one sequence.

    Give `push` every token but the one that ends the sequence by its id (end of text, a stop
    token): that one has no text. Once it has `stopped`, text and tokens end there.
    """

    def __init__(
        self, tokenizer: Decoder, params: SamplingParams, prompt_ids: PromptIds = ()
    ) -> None:
        self._stream = text_stream(tokenizer, params.skip_special_tokens, prompt_ids)
        self._skipped = tokenizer.special_ids if params.skip_special_tokens else ()
        self._min_tokens = params.min_tokens
        markers = params.thought_markers
        self._headers = Headers(markers) if markers is not None and markers.between else None
        self._search: StopSearch | None = None
        if params.stop:
            self._search = StopSearch(tuple(params.stop), params.include_stop_str_in_output)
        self._shown: list[str] = []
        self.num_tokens = 0  # pushed; up to the one that completed the stop string, if one did

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._search.found if self._search else None

    @property
    def stopped(self) -> bool:
        return self.stop is not None

    @property
    def text(self) -> str:
        """All that `push` and `flush` have given out."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that can be shown now that these tokens have come."""
        shown = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.num_tokens += 1
            is_hidden = self._headers is not None and self._headers.hide(token_id)
            if token_id not in self._skipped:
                shown.append(self._safe(self._stream.push(token_id), is_hidden))
        return self._show("".join(shown))

    def flush(self) -> str:
        """What was held back, when no more tokens come."""
        if self.stopped:
            return ""
        rest = self._safe(self._stream.flush())
        if self._search is not None:
            rest += self._search.flush()
        return self._show(rest)

    def fork(self) -> Detokenizer:
        """Another that has had the same tokens; what either gets from now on is its own."""
        twin = copy(self)
        twin._stream, twin._search = self._stream.fork(), copy(self._search)
        twin._headers = copy(self._headers)
        twin._shown = list(self._shown)
        return twin

    def _safe(self, text: str, is_hidden: bool = False) -> str:
        """`is_hidden`: its reader will not see it, so that no stop string is looked for."""
        if self._search is None:
            return text
        if is_hidden:
            return self._search.pass_by(text)
        return self._search.feed(text, may_stop=self.num_tokens >= self._min_tokens)

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text


def whole_text(
    tokenizer: Decoder,
    params: SamplingParams,
    token_ids: Sequence[int],
    prompt_ids: PromptIds = (),
) -> str:
    """What a `Detokenizer` without stop strings makes of all tokens, in one go."""
    ids = [int(token_id) for token_id in token_ids]
    if tokenizer.is_byte_level:
        return tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
    context = prompt_context(tokenizer, prompt_ids)
    text = decode_behind(tokenizer, context, ids, params.skip_special_tokens)
    if BROKEN not in text:
        return text
    # Some decoders spoil all bytes around a broken one; streaming has shown the good ones.
    stream = text_stream(tokenizer, params.skip_special_tokens, prompt_ids)
    skipped = tokenizer.special_ids if params.skip_special_tokens else ()
    return "".join([stream.push(each) for each in ids if each not in skipped]) + stream.flush()


def text_stream(tokenizer: Decoder, skip_special: bool, prompt_ids: PromptIds = ()) -> TextStream:
    if tokenizer.is_byte_level:
        return ByteStream(tokenizer)
    return ContextStream(tokenizer, skip_special, prompt_ids)
