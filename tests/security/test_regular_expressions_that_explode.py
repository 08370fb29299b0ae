"""Regular expressions of parsers that explode (CVE-2025-48887).

Every pattern of Quire's that meets a caller's or a model's text, and every parser of tool calls, is
given long texts that almost match. What backtracks takes years for them, and not minutes.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
from patience import PATIENCE_S

import quire

SOURCE = Path(quire.__file__).parent
LENGTH = 50_000
# Patterns over what an operator types, or over names of a checkpoint's own.
NOT_FOR_CALLERS = {"bench", "config.py", "keys.py", "hub.py", "weights.py"}

METHODS = ["match", "search", "fullmatch", "findall", "finditer", "split", "sub"]
HOSTILE = [
    " ", "a", "A", "{", "[", '"', "\\", "\\\\", "\\u", ",", ":", "<", "<tool_call>", "</", "[[",
    "\n", '{"name": ', '{"name":"a",', '{"name": "f", "arguments": {', "a.", "A:", "_?!", "é",
    "\t {", "x=1,", "[TOOL_CALLS]", "<|python_tag|>", "<|start|>", "<|channel|>", "<|message|>",
    "f(a=", '"\\', "1.", "-", "A [", "A.1",
]  # fmt: skip
IN_GRAMMARS = ["::=", "root ::= ", "%", "#", "//", "(", "|", "/a", "start: ", " \n", "\r\n", "\n#"]

MATCH = """
import json, re, sys
patterns, hostile, length = json.load(sys.stdin)
for pattern, flags, methods in patterns:
    compiled = re.compile(pattern, flags)
    for unit in hostile:
        for end in ("", "!", "\\x00", "}"):
            text = unit * (length // len(unit)) + end
            for method in methods:
                getattr(compiled, method)(*([""] if method == "sub" else []), text)
print("done")
"""

PARSE = """
import json, sys
from quire.api.tools.formats import FORMATS
hostile, length = json.load(sys.stdin)
for tool_format in FORMATS.values():
    for start in ("", *tool_format.parser.tags):
        for unit in hostile:
            parser, text = tool_format.parser(), start + unit * (length // len(unit))
            for at in range(0, len(text), 997):
                parser.push(text[at : at + 997])
            parser.flush()
print("done")
"""


class Used(NamedTuple):
    """A pattern of Quire's, and how it is used."""

    pattern: str
    flags: int
    methods: list[str]
    file: str


READ = """
import json, sys
from quire.engine.grammar.source import _as_lark
from quire.errors import QuireError
hostile, length = json.load(sys.stdin)
for start in ("", "root ::= ", "start: "):
    for unit in hostile:
        try:
            _as_lark(start + unit * (length // len(unit)))
        except QuireError:
            pass
print("done")
"""


def patterns() -> list[Used]:
    found = []
    for path in SOURCE.rglob("*.py"):
        place, source = path.relative_to(SOURCE), path.read_text()
        if NOT_FOR_CALLERS & set(place.parts) or "\nimport re\n" not in source:
            continue
        module = import_module(".".join(["quire", *place.with_suffix("").parts]))
        for name, value in vars(module).items():
            if isinstance(value, re.Pattern):
                methods = set(re.findall(rf"\b{name}\.(\w+)\(", source)) & {*METHODS}
                found.append(Used(_as_text(value), value.flags, sorted(methods), path.name))
        found += _spelt_out(ast.parse(source), path.name)
    return found


def _as_text(pattern: re.Pattern[str] | re.Pattern[bytes]) -> str:
    """One over bytes is tried over the characters that have their numbers."""
    spelt = pattern.pattern
    return spelt.decode("latin-1") if isinstance(spelt, bytes) else spelt


def _spelt_out(tree: ast.AST, file: str) -> list[Used]:
    """Patterns in calls such as `re.split(r"…", …)`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, method, args = node.func.value, node.func.attr, node.args
            is_re = isinstance(owner, ast.Name) and owner.id == "re" and method in METHODS
            if is_re and args and isinstance(args[0], ast.Constant):
                found.append(Used(str(args[0].value), 0, [method], file))
    return found


def run(script: str, given: object) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert done.stdout == "done\n", done.stderr[-3000:]


def test_patterns_take_time_in_proportion():
    found = patterns()
    assert {"call_reader.py", "source.py", "definitions.py"} <= {each.file for each in found}
    assert all(each.methods for each in found)
    run(MATCH, [[each[:3] for each in found], HOSTILE, LENGTH])


def test_the_search_finds_one_that_explodes():
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, "-c", MATCH],
            input=json.dumps([[(r"(a+)+$", 0, ["match"])], ["a"], 60]),
            capture_output=True,
            text=True,
            timeout=2,
        )


def test_parsers_of_tool_calls_take_time_in_proportion():
    run(PARSE, [HOSTILE, LENGTH])


def test_grammars_are_read_in_time_in_proportion():
    """Before their compiler bounds them; while one is read, nothing else runs."""
    run(READ, [[*HOSTILE, *IN_GRAMMARS], LENGTH])
