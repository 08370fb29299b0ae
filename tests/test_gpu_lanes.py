"""Processes that end in the midst of their tests: each of the tests is told of all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from gpu_lanes import PART, parts_of
from patience import PATIENCE_S

TESTS = Path(__file__).parent
ALONE = "import os\ndef test_alone(): os._exit(1)\n"
MANY = """
import os, pytest
@pytest.mark.parametrize("n", range(60))
def test_kernel(n):
    assert n != 7, "its reason"
    if n in (30, 59):
        os._exit(1)
"""


def test_files_stay_whole_and_those_of_kernels_do_not() -> None:
    model = [f"tests/api/test_a.py::test[{n}]" for n in range(100)]
    kernel = [f"tests/kernels/test_b.py::test[{n}]" for n in range(2 * PART + 1)]
    parts = parts_of([*model, *kernel])
    assert {parts[test] for test in model} == {"tests/api/test_a.py"}
    assert [*Counter(parts[test] for test in kernel).values()] == [PART, PART, 1]


def test_what_ends_a_process_is_not_tried_again_and_the_rest_is(tmp_path: Path) -> None:
    for name, text in {"api/test_alone.py": ALONE, "kernels/test_many.py": MANY}.items():
        (tmp_path / "tests" / name).parent.mkdir(parents=True)
        (tmp_path / "tests" / name).write_text(text)
    (tmp_path / "pytest.ini").touch()
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "gpu_lanes"]
    told = subprocess.run(
        [*command, "-n", "2", "--dist", "loadfile", "-rf"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    ).stdout
    assert "4 failed, 57 passed" in told and "its reason" in told, told
    for test in ("test_alone", "test_kernel[30]", "test_kernel[59]"):
        assert f"::{test}'" in told, told  # "crashed while running '…'"
