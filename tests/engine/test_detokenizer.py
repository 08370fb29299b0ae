"""Streaming text: joined, the pieces are the plain text cut at the earliest stop string."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from quire.engine.text.detokenizer import ContextStream, Detokenizer, whole_text
from quire.models.text.tokenizer import Tokenizer
from quire.params import SamplingParams

SPECIAL = "<|end|>"
WORDS = [
    "he",
    "hello",
    "wor",
    "ld",
    "a",
    "b",
    ".",
    "ไท",
    "ย",
    "中",
    "文",
    "é",
    "👍",
    "\u0301",
    "\ufffd",
]
thorough = settings(
    deadline=None, max_examples=examples(250), suppress_health_check=[HealthCheck.too_slow]
)


def byte_level() -> Tokenizer:
    """Tokens are bytes: single ones, words, and pieces that cut characters in the middle."""
    alphabet = _bytes_to_text()
    pieces = [bytes([value]) for value in range(256)]
    for word in [*WORDS, " hello", " wor"]:
        encoded = word.encode()
        pieces += [encoded, encoded[:2], encoded[1:]]
    pieces += ["é中".encode()[1:4], "👍👍".encode()[2:6]]
    texts = ["".join(alphabet[value] for value in piece) for piece in pieces if piece]
    vocab = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return _finish(backend)


def metaspace() -> Tokenizer:
    """Spaces are `▁`, the first one is dropped, and rare characters are spelt in bytes."""
    words = [f"▁{word}" for word in WORDS] + WORDS + ["▁", "▁▁"]
    texts = [f"<0x{value:02X}>" for value in range(256)] + words
    vocab = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _finish(backend)


def _finish(backend: Backend) -> Tokenizer:
    backend.add_special_tokens([AddedToken(SPECIAL, special=True, normalized=False)])
    return Tokenizer(backend, {"eos_token": SPECIAL}, None)


def _bytes_to_text() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {v: chr(v) for v in printable} | {v: chr(256 + i) for i, v in enumerate(others)}


BYTES, SPACES = byte_level(), metaspace()
assert BYTES.is_byte_level and not SPACES.is_byte_level
BOTH = pytest.mark.parametrize("tokenizer", [BYTES, SPACES], ids=["byte-level", "metaspace"])


def spell(tokenizer: Tokenizer, text: str) -> list[int]:
    """`text` in single bytes."""
    if tokenizer is BYTES:
        alphabet = _bytes_to_text()
        names = [alphabet[value] for value in text.encode()]
    else:
        names = [f"<0x{value:02X}>" for value in text.encode()]
    return [tokenizer.backend.token_to_id(name) for name in names]


def named(tokenizer: Tokenizer, *names: str) -> list[int]:
    return [tokenizer.backend.token_to_id(name) for name in names]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Anything: whole words, text in bytes, broken bytes, special tokens."""
    words = [i for i in range(tokenizer.vocab_size) if i >= 256]
    special = tokenizer.eos_token_id
    assert special is not None
    spelt = [*WORDS, "👨‍👩‍👧", "ก็", "e\u0301", " hello", "한"]
    run = st.one_of(
        st.sampled_from(words).map(lambda i: [i]),
        st.sampled_from(spelt).map(lambda text: spell(tokenizer, text)),
        st.sampled_from([0xFF, 0xC3, 0xE4, 0xF0, 0x9F, 0x80]).map(
            lambda value: [tokenizer.backend.token_to_id(_byte_name(tokenizer, value))]
        ),
        st.just([special]),
    )
    return st.lists(run, max_size=14).map(lambda runs: [i for each in runs for i in each])


def _byte_name(tokenizer: Tokenizer, value: int) -> str:
    return _bytes_to_text()[value] if tokenizer is BYTES else f"<0x{value:02X}>"


STOP_WORDS = [
    "he",
    "hello",
    "lo w",
    " ",
    "world",
    "ab",
    "ไทย",
    "中",
    "👍",
    "\ufffd",
    "\u0301a",
    SPECIAL,
]
STOPS = st.lists(st.sampled_from(STOP_WORDS), max_size=3, unique=True)


def chunks(ids: Sequence[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [list(ids[a:b]) for a, b in itertools.pairwise(edges)]


def cut_at_stop(text: str, params: SamplingParams) -> str:
    for end in range(1, len(text) + 1):
        matches = [stop for stop in params.stop if text[:end].endswith(stop)]
        if matches:
            keep = end if params.include_stop_str_in_output else end - max(map(len, matches))
            return text[:keep]
    return text


def stream(detokenizer: Detokenizer, parts: list[list[int]]) -> list[str]:
    deltas = []
    for part in parts:
        deltas.append(detokenizer.push(part))
        if detokenizer.stopped:
            return deltas
    return [*deltas, detokenizer.flush()]


@BOTH
@thorough
@given(
    data=st.data(),
    stops=STOPS,
    cuts=st.lists(st.integers(0, 60)),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_joined_deltas_are_the_plain_text_cut_at_the_earliest_stop(
    tokenizer: Tokenizer, data: Any, stops: list[str], cuts: list[int], flags: tuple[bool, bool]
) -> None:
    ids = data.draw(ids_of(tokenizer))
    prompt = data.draw(ids_of(tokenizer))
    skip, include = flags
    params = SamplingParams(
        stop=stops, skip_special_tokens=skip, include_stop_str_in_output=include
    )
    plain = whole_text(tokenizer, params, ids, prompt)
    detokenizer = Detokenizer(tokenizer, params, prompt)
    deltas = stream(detokenizer, chunks(ids, cuts))
    assert "".join(deltas) == cut_at_stop(plain, params) == detokenizer.text
    assert detokenizer.stopped == (detokenizer.stop in stops)


@BOTH
@settings(thorough, max_examples=examples(60))
@given(data=st.data(), stops=STOPS)
def test_forks_go_their_own_ways(tokenizer: Tokenizer, data: Any, stops: list[str]) -> None:
    """Each says what one would that had all its tokens from the beginning."""
    params = SamplingParams(stop=stops)
    common, *tails = (data.draw(ids_of(tokenizer)) for _ in range(3))
    first = Detokenizer(tokenizer, params)
    first.push(common)
    second = first.fork()
    for forked, tail in zip((first, second), tails, strict=True):
        alone = Detokenizer(tokenizer, params)
        alone.push([*common, *tail])
        for token_id in tail:
            forked.push([token_id])
        for each in (forked, alone):
            each.flush()
        assert (forked.text, forked.stop) == (alone.text, alone.stop)
        assert forked.num_tokens == alone.num_tokens


@thorough
@given(ids=ids_of(BYTES), skip=st.booleans())
def test_plain_text_of_bytes_is_what_the_tokenizer_decodes(ids: list[int], skip: bool) -> None:
    params = SamplingParams(skip_special_tokens=skip)
    expected = BYTES.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(Detokenizer(BYTES, params), [[i] for i in ids])) == expected
    assert whole_text(BYTES, params, ids) == expected


@thorough
@given(ids=ids_of(SPACES), skip=st.booleans())
def test_plain_text_of_pieces_is_what_the_tokenizer_decodes(ids: list[int], skip: bool) -> None:
    """Broken bytes aside, where the library's decoder spoils good characters too."""
    params = SamplingParams(skip_special_tokens=skip)
    streamed = "".join(stream(Detokenizer(SPACES, params), [[i] for i in ids]))
    assert whole_text(SPACES, params, ids) == streamed
    expected = SPACES.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in expected:
        assert streamed == expected


@thorough
@given(ids=ids_of(BYTES), stops=STOPS.filter(bool), cuts=st.lists(st.integers(0, 60)))
def test_tokens_count_up_to_the_one_that_completes_the_stop(
    ids: list[int], stops: list[str], cuts: list[int]
) -> None:
    detokenizer = Detokenizer(BYTES, SamplingParams(stop=stops, skip_special_tokens=False))
    decoder, text, expected = codecs.getincrementaldecoder("utf-8")("replace"), "", len(ids)
    for count, token_id in enumerate(ids, start=1):
        text += decoder.decode(BYTES.token_bytes(token_id))
        if any(stop in text for stop in stops):
            expected = count
            break
    for part in chunks(ids, cuts):
        detokenizer.push(part)
    assert detokenizer.num_tokens == expected
    if detokenizer.stopped:
        assert detokenizer.push(ids) == "" and detokenizer.flush() == ""
        assert detokenizer.num_tokens == expected


@BOTH
def test_half_a_character_waits_for_the_rest(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, SamplingParams())
    deltas = [detokenizer.push([i]) for i in spell(tokenizer, "👍中")]
    assert deltas == ["", "", "", "👍", "", "", "中"]
    assert detokenizer.push(spell(tokenizer, "é")[:1]) == ""
    assert detokenizer.flush() == "\ufffd"  # it never came


@BOTH
def test_a_prompt_cut_in_mid_character_does_not_leak(tokenizer: Tokenizer) -> None:
    emoji = spell(tokenizer, "👍")
    for cut in (1, 2, 3):
        detokenizer = Detokenizer(
            tokenizer, SamplingParams(), [*spell(tokenizer, "hi"), *emoji[:cut]]
        )
        output = [*emoji[cut:], *named(tokenizer, "a", "b")]
        text = "".join(stream(detokenizer, [[i] for i in output]))
        assert text == "\ufffd" * (4 - cut) + "ab"  # bytes that begin nothing, then what is whole


@pytest.mark.parametrize("as_array", [False, True])
def test_the_space_behind_the_prompt_is_kept(as_array: bool) -> None:
    """Without its prompt a decoder takes the first token for the beginning of a text."""
    output = named(SPACES, "▁wor", "ld")
    for prompt, expected in [
        (named(SPACES, "▁hello"), " world"),
        (spell(SPACES, "👍"), " world"),
        (named(SPACES, "▁hello", SPECIAL), "world"),  # a new text begins
        ([], "world"),
    ]:
        ids: Any = np.array(prompt, dtype=np.int32) if as_array else prompt
        detokenizer = Detokenizer(SPACES, SamplingParams(), ids)
        assert "".join(stream(detokenizer, [[i] for i in output])) == expected
        assert whole_text(SPACES, SamplingParams(), output, ids) == expected


@BOTH
def test_a_stop_string_over_several_tokens(tokenizer: Tokenizer) -> None:
    ids = [*spell(tokenizer, "say "), *named(tokenizer, "he", "hello"), *spell(tokenizer, "!")]
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="hehe"))
    assert "".join(stream(detokenizer, [[i] for i in ids])) == "say "
    assert detokenizer.stop == "hehe" and detokenizer.num_tokens == 6


def test_min_tokens_puts_stops_off() -> None:
    params = SamplingParams(stop=["a"], min_tokens=4)
    ids = spell(BYTES, "abcabca")
    detokenizer = Detokenizer(BYTES, params)
    assert "".join(stream(detokenizer, [ids])) == "abc"
    assert detokenizer.num_tokens == 4


@BOTH
def test_special_tokens_show_only_when_asked_for(tokenizer: Tokenizer) -> None:
    ids = [*spell(tokenizer, "x"), *named(tokenizer, SPECIAL), *spell(tokenizer, "y")]
    for skip, expected in [(True, "xy"), (False, f"x{SPECIAL}y")]:
        params = SamplingParams(skip_special_tokens=skip)
        assert "".join(stream(Detokenizer(tokenizer, params), [ids])) == expected
        assert whole_text(tokenizer, params, ids) == expected


def test_a_skipped_token_inside_a_character() -> None:
    first, *rest = spell(BYTES, "👍")
    ids = [first, *named(BYTES, SPECIAL), *rest]
    assert "".join(stream(Detokenizer(BYTES, SamplingParams()), [ids])) == "👍"


def test_ids_without_text() -> None:
    unknown = SPACES.vocab_size + 5
    ids = [*named(SPACES, "▁"), *[unknown] * 30, *named(SPACES, "▁hello"), unknown]
    assert "".join(stream(Detokenizer(SPACES, SamplingParams()), [ids])) == " hello"
    ids = [BYTES.vocab_size + 5, *spell(BYTES, "a")]
    assert "".join(stream(Detokenizer(BYTES, SamplingParams()), [ids])) == "a"


@pytest.mark.parametrize("name", ["<0xFF>", "<0xE4>", "▁", "\ufffd", "a", None])
def test_a_token_costs_the_same_however_long_the_text_is(name: str | None) -> None:
    token_id = SPACES.vocab_size + 1 if name is None else named(SPACES, name)[0]
    longest = 0

    def decode(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return Tokenizer.decode(SPACES, ids, skip_special_tokens)

    with mock.patch.object(SPACES, "decode", decode):
        stream(Detokenizer(SPACES, SamplingParams(stop="zz")), [[token_id]] * 400)
    assert longest <= 3 * ContextStream.MOST_PENDING


def test_nothing_pushed() -> None:
    for tokenizer in (BYTES, SPACES):
        detokenizer = Detokenizer(tokenizer, SamplingParams(stop="x"))
        assert detokenizer.push([]) == detokenizer.flush() == detokenizer.text == ""
        assert whole_text(tokenizer, SamplingParams(), []) == ""
