"""Prompts of a given number of tokens, made when they are sent: equal blocks make equal text.

A block's text is a few words that no other block has, then a stretch of a long text that all
share. Common short words with a space before them are one token each in the vocabularies of today,
so that a text of N words has about N tokens; prompts of token ids have exactly N.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import accumulate
from typing import Protocol

from quire.bench.engine.workloads import LARGEST_ID
from quire.bench.request_trace import BLOCK_TOKENS, Name

HEAD_TOKENS = 8  # with 256 words, 64 bits that tell a block from all others
SMALLEST_ID = 100  # the ids before it are special in some vocabularies
PLACES = 1 << 16  # where a block may begin in the long text

VOCABULARY = """
about above across after again air all almost along also always an and animals another any are
around as asked at away back be because been before began being below best better between big both
boy but by called came can children come could country day did different do does down during each
earth end enough even ever every far father feet few find first food for form found four from get
give go going good got great had hand hard has have head help her here high him his home house how
however if important in into is it its just keep kind knew know land large last left let life
light like line little live long look looked made make man many may me men might more most mother
much must my name near need never new next night no not now number of off often old on once one
only or other our out over own page paper part people picture place put read right said same saw
say school second see sentence set she should show side since small so some something soon sound
still story study such sure take tell than that the their them then there these they things think
this those thought three through time to today together told too took try two under until up us
use used very want was water way we well went were what when where which while white who why will
with without word words work world would write year years young your
"""
WORDS = VOCABULARY.split()  # 256, one for each byte


class Prompt(Protocol):
    def text(self) -> str: ...

    def ids(self) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class FixedPrompt:
    """Ids that a workload prescribes."""

    token_ids: list[int]

    def text(self) -> str:
        raise NotImplementedError("prescribed ids have no text")

    def ids(self) -> list[int]:
        return self.token_ids


@dataclass(frozen=True, slots=True)
class BlockPrompt:
    """Blocks by name, cut to `length` tokens; what they lack is filled with the request's own."""

    blocks: tuple[Name, ...]
    length: int
    own: str

    def text(self) -> str:
        return "".join(_words(name, count) for name, count in self._parts())

    def ids(self) -> list[int]:
        return [token for name, count in self._parts() for token in _ids(name, count)]

    def _parts(self) -> Iterator[tuple[str, int]]:
        """The name of each block, and how many of its tokens are wanted."""
        for number, at in enumerate(range(0, self.length, BLOCK_TOKENS)):
            shared = number < len(self.blocks)
            # 7 and "7" are two names.
            name = repr(self.blocks[number]) if shared else f"{self.own}/{number}"
            yield name, min(BLOCK_TOKENS, self.length - at)


def _words(name: str, count: int) -> str:
    head, start = _head_and_place(name)
    text, places = _long_text()
    own = "".join(f" {WORDS[byte]}" for byte in head[:count])
    return own + text[places[start] : places[start + max(0, count - HEAD_TOKENS)]]


def _ids(name: str, count: int) -> list[int]:
    head, start = _head_and_place(name)
    own = [SMALLEST_ID + byte for byte in head[:count]]
    return own + _many_ids()[start : start + max(0, count - HEAD_TOKENS)]


def _head_and_place(name: str) -> tuple[bytes, int]:
    """What tells this block from others, and where the rest of it begins."""
    digest = blake2b(name.encode(), digest_size=HEAD_TOKENS + 2).digest()
    return digest[:HEAD_TOKENS], int.from_bytes(digest[HEAD_TOKENS:], "big") % PLACES


@cache
def _long_text() -> tuple[str, list[int]]:
    """Words that any block may take a stretch of, and where each of them begins."""
    words = [f" {word}" for word in random.Random(0).choices(WORDS, k=PLACES + BLOCK_TOKENS)]
    return "".join(words), [0, *accumulate(map(len, words))]


@cache
def _many_ids() -> list[int]:
    r = random.Random(0)
    return [r.randint(SMALLEST_ID, LARGEST_ID) for _ in range(PLACES + BLOCK_TOKENS)]
