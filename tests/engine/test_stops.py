"""Stop strings in pieces of text, against a search of the whole text."""

from __future__ import annotations

import itertools

import pytest
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.engine.text.stops import StopSearch

TEXT = st.text("ab\u0e01", max_size=30)
STOPS = st.lists(st.text("ab\u0e01", min_size=1, max_size=5), min_size=1, max_size=4, unique=True)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Cut where the first match ends; of matches that end together the longest counts."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def pieces(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@settings(deadline=None, max_examples=examples(400), suppress_health_check=[HealthCheck.too_slow])
@given(TEXT, STOPS, st.lists(st.integers(0, 40)), st.booleans())
def test_any_text_stops_and_pieces(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    expected, match = reference(text, stops, include)
    search = StopSearch(tuple(stops), include)
    shown = ""
    for piece in pieces(text, cuts):
        shown += search.feed(piece)
        if search.found is not None:
            break
        assert expected.startswith(shown)
    else:
        shown += search.flush()
    assert (shown, search.found) == (expected, match)


def test_no_more_is_held_back_than_must_be() -> None:
    search = StopSearch(("<end>", "stop"), include_stop=False)
    assert search.feed("text <e") == "text "
    assert search.feed("x <en") == "<ex "
    assert search.feed(" s") == "<en "
    assert search.feed("to") == ""
    assert search.feed("a<") == "stoa"
    assert search.flush() == "<"


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("xabcd", ["bcd", "abc"], "x"),  # abc ends first
        ("xabc", ["bc", "abc"], "x"),  # both end together: the longer
        ("aaab", ["aab"], "a"),  # a match that begins inside a failed one
        ("abab", ["abac"], "abab"),
    ],
)
def test_which_of_several_wins(text: str, stops: list[str], expected: str) -> None:
    search = StopSearch(tuple(stops), include_stop=False)
    shown = "".join(search.feed(char) for char in text if search.found is None)
    assert shown + search.flush() == expected


def test_matches_may_be_put_off() -> None:
    search = StopSearch(("ab",), include_stop=False)
    assert search.feed("ab", may_stop=False) + search.feed("cab") == "abc"
    assert search.found == "ab"
    late = StopSearch(("ab",), include_stop=False)
    assert late.feed("a", may_stop=False) == "" and late.feed("b") == ""
    assert late.found == "ab"  # it ends where stopping is allowed


def test_the_largest_set_that_is_allowed() -> None:
    stops = tuple("a" * 1000 + chr(0x4E00 + i) * 24 for i in range(64))
    search = StopSearch(stops, include_stop=False)
    assert search.feed("a" * 5000) == "a" * 4000
    assert search.feed("b") == "a" * 1000 + "b"
    assert search.feed("x" + stops[63]) == "x"
    assert search.found == stops[63]
