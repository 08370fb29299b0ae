"""Twenty seconds of the soak, so that it works and the worst shows at once; CI runs a minute."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
def test_twenty_seconds_of_random_load_over_tiers_that_fail() -> None:
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-m", "soak", "--seconds", "20", "--seed", "3"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for tier in ("host", "ssd", "remote"):
        assert f"\n  {tier}  " in done.stdout, f"nothing came from {tier}:\n{done.stdout}"
