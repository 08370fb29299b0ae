"""Seconds of the soak, so that it works and the worst shows at once; CI runs a minute."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from effort import effort
from patience import PATIENCE_S

TESTS = Path(__file__).parents[1]

# Whatever a disk or a server gives is taken for what was asked for.
CREDULOUS = """
import runpy
import quire.kv.tiers.remote.tier, quire.kv.tiers.ssd.reading
from quire.kv.image import Verdict
quire.kv.tiers.remote.tier.examine = lambda *_: Verdict.WHOLE
quire.kv.tiers.ssd.reading.examine = lambda *_: Verdict.WHOLE
runpy.run_module("soak", run_name="__main__")
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        shutil.which("redis-server") is None, reason="redis-server is not installed"
    ),
]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE_S,
    )


def test_seconds_of_random_load_over_tiers_that_fail() -> None:
    """On a machine that is so busy that something has not come up by then, for a minute."""
    for seconds in (effort(7, 20), 60):
        done = run("-m", "soak", "--seconds", str(seconds), "--seed", "3")
        assert done.returncode == 0, done.stdout + done.stderr
        missing = [t for t in ("host", "ssd", "remote") if f"\n  {t}  " not in done.stdout]
        if not missing:
            break
    assert not missing, f"nothing came from {missing}:\n{done.stdout}"


def test_blocks_that_nobody_verifies_are_found_out() -> None:
    """It can fail: with one sentence, and what to type to see it again."""
    done = run("-c", CREDULOUS, "--seconds", "60", "--seed", "3")
    assert done.returncode == 1, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    # Whichever comes first: a wrong answer, or a copy of what the sequence does not have.
    assert "was answered" in last or "something else was copied" in last
    assert "make soak SECONDS=60 SEED=3" in last
