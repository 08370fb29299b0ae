"""A closed LLM gives its memory back to the system, and opening and closing does not grow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_llm import write_config

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SCRIPT = """
import json, sys
from pathlib import Path
from quire import LLM, SamplingParams

def megabytes():  # of the process's own memory, without what is mapped from files
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))

def use(folder, num_blocks):
    settings = {"dtype": "float32", "device": "cpu", "load_format": "dummy", "use_tqdm": False}
    with LLM(folder, num_blocks=num_blocks, **settings) as llm:
        llm.generate([[1, 2, 3], [4] * 200], SamplingParams(max_tokens=4), use_tqdm=False)
        return megabytes()

small, large = sys.argv[1:]
use(small, 16)  # libraries are imported and kernels compiled
seen = [megabytes()]
for _ in range(2):
    seen += [use(large, 512), megabytes()]
print(json.dumps(seen))
"""


def test_closing_gives_the_memory_back_to_the_system(tmp_path: Path) -> None:
    small = write_config(tmp_path / "small")
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8}
    large = write_config(tmp_path / "large", **sizes, vocab_size=4000)
    command = [sys.executable, "-c", SCRIPT, str(small), str(large)]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    before, *rest = json.loads(told.stdout)
    for opened, closed in zip(rest[::2], rest[1::2], strict=True):
        assert opened - before > 250
        assert closed - before < 0.1 * (opened - before)
    assert rest[-1] - rest[1] < 0.02 * (rest[0] - before)
