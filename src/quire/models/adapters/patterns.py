"""Regular expressions that come with adapters: which names they match, with a bound on the time.

An adapter's author is not trusted, and `(a+)+b` takes longer than the machine lasts. Python cannot
bound a part of a process. So patterns that repeat anything are matched in a process of their own,
which the system ends; others are matched here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence

from quire.checks import shown
from quire.errors import ModelError

MOST_SECONDS = 5  # of the CPU: thousands of names take milliseconds
MOST_WAIT_S = 120.0  # where the machine has much else to do
MOST_MEMORY = 1 << 30
REPEATS = frozenset("*+?{")

# Not `-m`: with it Python looks for modules in the folder that the user stands in.
CHILD = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from quire.models.adapters.patterns import serve; serve()"
)


def first_matches(
    patterns: Sequence[str], names: Sequence[str], *, after_dot: bool = False
) -> dict[str, str]:
    """Each name's first pattern that matches all of it, or with `after_dot` all behind one of its
    dots; names that none matches are left out."""
    if not any(REPEATS.intersection(pattern) for pattern in patterns):
        found = match_all(patterns, names, after_dot)
    else:
        found = match_in_child(patterns, names, after_dot)
    if isinstance(found, str):
        raise ModelError(f"The adapter's pattern {shown(found)} is no regular expression.")
    return found


def match_all(
    patterns: Sequence[str], names: Sequence[str], after_dot: bool
) -> dict[str, str] | str:
    """What `first_matches` answers; or a pattern that is none."""
    found: dict[str, str] = {}
    for pattern in patterns:
        try:
            compiled = re.compile(rf"(?:.*\.)?(?:{pattern})" if after_dot else pattern)
        except (re.error, OverflowError, RecursionError):
            return pattern
        for name in names:
            if name not in found and compiled.fullmatch(name):
                found[name] = pattern
    return found


def match_in_child(
    patterns: Sequence[str], names: Sequence[str], after_dot: bool
) -> dict[str, str] | str:
    path = json.dumps([entry for entry in sys.path if entry])
    asked = json.dumps([list(patterns), list(names), after_dot])
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-c", CHILD, path],
            input=asked,
            capture_output=True,
            text=True,
            timeout=MOST_WAIT_S,
        )
        child.check_returncode()
        found: dict[str, str] | str = json.loads(child.stdout)
    except (subprocess.SubprocessError, OSError):
        raise ModelError(
            f"The adapter's patterns ({shown(patterns[0])} is the first) take more than "
            f"{MOST_SECONDS} seconds to match: name its modules in a list instead."
        ) from None
    return found


def serve() -> None:
    """The child: answer once."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    patterns, names, after_dot = json.load(sys.stdin)
    json.dump(match_all(patterns, names, after_dot), sys.stdout)
