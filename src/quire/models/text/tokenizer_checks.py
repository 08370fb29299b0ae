"""What a tokenizer.json may not be: one whose parts make much of little, or make the library panic.

The `tokenizers` library reads the file, so its parts are looked at here once they are loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from tokenizers import Tokenizer as Backend

from quire.checks import shorten
from quire.errors import QuireError
from quire.models.checkpoints.json_fields import MOST_TOKENS

MOST_GROWTH = 256  # times the text, by all replacements one after the other
MOST_FRAME = 64  # tokens around a text
MOST_TEXT = 4096  # characters of a replacement, a prefix or a pattern
MOST_WORD = 10_000  # characters that WordPiece, whose time is quadratic, takes for a word
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")

Node = dict[str, Any]  # a part, as the file writes it: its type and its settings


def refuse(error: BaseException, refusal: Callable[[str], QuireError]) -> NoReturn:
    """Raise what `refusal` makes of anything that the library raised, its panics included.

    To be called where BaseException is caught: a panic is no Exception.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit, QuireError)):
        raise error
    raise refusal(shorten(str(error).partition("\n")[0].rstrip("."))) from error


def check_backend(backend: Backend) -> None:
    """Raise a ValueError that says what is wrong."""
    if max(backend.get_vocab().values(), default=0) >= MOST_TOKENS:
        raise ValueError(f"it has token ids of {MOST_TOKENS:,} and more")
    if getattr(backend.model, "max_input_chars_per_word", 0) > MOST_WORD:
        raise ValueError(f"its words may have more than {MOST_WORD:,} characters")
    for name in PARTS:
        growth = 1
        for node in _nodes(getattr(backend, name)):
            growth *= _growth(node)
            if growth > MOST_GROWTH:
                raise ValueError(f"its {name} makes texts many times longer")
            _check_node(node)


def _nodes(part: Any) -> Iterator[Node]:
    """A part and those within it."""
    waiting = [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += [child for value in node.values() for child in _children(value)]


def _children(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _growth(node: Node) -> int:
    """How many characters become of one, at most."""
    if node.get("type") != "Replace":
        return 1
    found = node["pattern"].get("String")  # a regular expression may find nothing, everywhere
    put = len(node["content"])
    return -(-put // len(found)) or 1 if found else 1 + put


def _check_node(node: Node) -> None:
    kind = node.get("type")
    texts = [node.get("content"), node.get("prepend"), *dict(node.get("pattern") or {}).values()]
    if any(isinstance(text, str) and len(text) > MOST_TEXT for text in texts):
        raise ValueError(f"a {kind} of it has more than {MOST_TEXT:,} characters")
    if kind == "FixedLength" and not node["length"]:
        raise ValueError("it cuts texts into words of length 0")
    if kind == "TemplateProcessing":
        _check_frame(node)


def _check_frame(node: Node) -> None:
    """The library panics if a special token is named and not there."""
    known = node["special_tokens"]
    for piece in (*node["single"], *node["pair"]):
        if "SpecialToken" in piece and piece["SpecialToken"]["id"] not in known:
            raise ValueError("it puts a special token around texts that it does not have")
    count = sum(len(token["ids"]) for token in known.values())
    if max(count, len(node["single"])) > MOST_FRAME:
        raise ValueError(f"it puts more than {MOST_FRAME} tokens around texts")
