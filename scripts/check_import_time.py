"""Fail when `import quire` or `quire --help` takes half a second or more (best of five)."""

from __future__ import annotations

import subprocess
import sys
import time

LIMIT_S = 0.5
COMMANDS = {
    "import quire": [sys.executable, "-c", "import quire"],
    "quire --help": [sys.executable, "-m", "quire", "--help"],
}


def best_of(command: list[str], runs: int = 5) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> int:
    slow = False
    for name, command in COMMANDS.items():
        seconds = best_of(command)
        slow |= seconds >= LIMIT_S
        print(f"{name}: {seconds:.2f} s (limit {LIMIT_S} s, interpreter included)")
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
