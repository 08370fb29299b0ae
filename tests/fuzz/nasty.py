"""Values that a field of JSON may have and that hardly any field should have."""

from __future__ import annotations

import math
import random
from typing import Any

SCALARS = [
    0, -1, 1, 2, 3, 7, 64, 65, 0.5, -0.0, 1e-300, 1e308, -1e308, math.nan, math.inf, -math.inf,
    2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64, 10**400, True, False, None, "", "x", "7", "1e5",
    "NaN", "\x00", "\ud800", "é", "\u202e", "💩" * 50, "x" * 2000, "<|im_end|>", "{{ 7 * 7 }}",
    "../../etc/passwd", "http://127.0.0.1:1/", "file:///etc/passwd", "a b\r\nX-Y: z", "(a+)+$",
    "json_object", "required", "auto", "user",
]  # fmt: skip
KEYS = ["", "type", "role", "content", "function", "name", "json_schema", "regex", "$ref", "1", "²"]


def nasty(dice: random.Random, depth: int = 0) -> Any:
    kind = dice.random()
    if depth > 3 or kind < 0.6:
        return dice.choice(SCALARS)
    if kind < 0.75:
        return [nasty(dice, depth + 1) for _ in range(dice.randrange(4))]
    if kind < 0.9:
        keys = dice.sample(KEYS, dice.randrange(4))
        return {key: nasty(dice, depth + 1) for key in keys}
    if kind < 0.96:
        return [dice.choice(SCALARS[:30])] * dice.choice([20, 65, 1025, 5000, 100_000])
    if kind < 0.98:
        return {str(i): dice.choice(SCALARS[:30]) for i in range(dice.choice([65, 1025, 20_000]))}
    deep: Any = 1
    for _ in range(dice.choice([50, 300])):
        deep = [deep] if dice.random() < 0.5 else {"items": deep}
    return deep
