"""Regular expressions of parsers that explode (CVE-2025-48887).

Every pattern of Quire's that meets a caller's or a model's text, and every parser of tool calls, is
given long texts that almost match. What backtracks takes years for them, and not minutes.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

import quire

SOURCE = Path(quire.__file__).parent
LENGTH = 50_000
# Patterns over what an operator types, or over names of a checkpoint's own.
NOT_FOR_CALLERS = {"bench", "config.py", "keys.py", "hub.py", "weights.py"}

HOSTILE = [
    " ", "a", "A", "{", "[", '"', "\\", "\\\\", "\\u", ",", ":", "<", "<tool_call>", "</", "[[",
    "\n", '{"name": ', '{"name":"a",', '{"name": "f", "arguments": {', "a.", "A:", "_?!", "é",
    "\t {", "x=1,", "[TOOL_CALLS]", "<|python_tag|>", "f(a=", '"\\', "1.", "-", "A [", "A.1",
]  # fmt: skip

MATCH = """
import json, re, sys
patterns, hostile, length = json.load(sys.stdin)
for pattern, flags in patterns:
    compiled = re.compile(pattern, flags)
    for unit in hostile:
        for end in ("", "!", "\\x00", "}"):
            text = unit * (length // len(unit)) + end
            compiled.match(text), compiled.search(text), compiled.fullmatch(text)
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


def patterns() -> list[tuple[str, int, str]]:
    """(pattern, flags, file) of what is compiled when a module is imported."""
    import re
    from importlib import import_module

    found = []
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).parts
        if NOT_FOR_CALLERS & set(parts) or "re." not in path.read_text():
            continue
        module = import_module(".".join(["quire", *path.relative_to(SOURCE).with_suffix("").parts]))
        found += [
            (value.pattern, value.flags, path.name)
            for value in vars(module).values()
            if isinstance(value, re.Pattern)
        ]
        found += _spelt_out(path)
    return found


def _spelt_out(path: Path) -> list[tuple[str, int, str]]:
    """Patterns in calls such as `re.split(r"…", …)`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, args = node.func.value, node.args
            is_re = isinstance(owner, ast.Name) and owner.id == "re" and node.func.attr != "compile"
            if is_re and args and isinstance(args[0], ast.Constant):
                found.append((str(args[0].value), 0, path.name))
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
    assert {"call_reader.py", "source.py", "definitions.py"} <= {name for *_, name in found}
    run(MATCH, [[(pattern, flags) for pattern, flags, _ in found], HOSTILE, LENGTH])


def test_the_search_finds_one_that_explodes():
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(
            [sys.executable, "-c", MATCH],
            input=json.dumps([[(r"(a+)+$", 0)], ["a"], 60]),
            capture_output=True,
            text=True,
            timeout=5,
        )


def test_parsers_of_tool_calls_take_time_in_proportion():
    run(PARSE, [HOSTILE, LENGTH])
