"""JSON schemas at random, whose texts all end: strings, arrays and numbers are bounded."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

WORDS = ["name", "city", "age", "tags", "id", "note", "is_open", "größe", "kind", "x-y", "count"]
DEEPEST = 3


def random_schema(seed: int) -> Schema:
    """An object, as most people ask for."""
    return _object(random.Random(seed), depth=0)


def _object(choose: random.Random, depth: int) -> Schema:
    names = choose.sample(WORDS, choose.randint(1, 4))
    required = [name for name in names if choose.random() < 0.8]
    return {
        "type": "object",
        "properties": {name: _any(choose, depth + 1) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _any(choose: random.Random, depth: int) -> Schema:
    kinds = [_string, _pattern, _integer, _enum, _const, _simple]
    if depth < DEEPEST:
        kinds += [_array, _object, _either]
    return choose.choice(kinds)(choose, depth)


def _string(choose: random.Random, depth: int) -> Schema:
    least = choose.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + choose.randint(1, 12)}


def _pattern(choose: random.Random, depth: int) -> Schema:
    patterns = [r"^[A-Z]{2}[0-9]{1,4}$", r"^(red|green|blue)$", r"^\d{4}-\d{2}-\d{2}$", "^a*b?$"]
    return {"type": "string", "pattern": choose.choice(patterns), "maxLength": 10}


def _integer(choose: random.Random, depth: int) -> Schema:
    low = choose.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + choose.randint(0, 5000)}


def _enum(choose: random.Random, depth: int) -> Schema:
    return {"enum": choose.sample(["a", "b\n", 'say "x"', 1, 2.5, True, None, "日本"], 3)}


def _const(choose: random.Random, depth: int) -> Schema:
    return {"const": choose.choice(["fixed", 7, False, [1, "two"], {"k": None}])}


def _simple(choose: random.Random, depth: int) -> Schema:
    return {"type": choose.choice(["boolean", "null", ["boolean", "null"]])}


def _array(choose: random.Random, depth: int) -> Schema:
    least = choose.randint(0, 2)
    return {
        "type": "array",
        "items": _any(choose, depth + 1),
        "minItems": least,
        "maxItems": least + choose.randint(0, 2),
    }


def _either(choose: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(choose, depth + 1) for _ in range(2)]}
