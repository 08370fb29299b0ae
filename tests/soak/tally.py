"""What a soak has done so far: a line now and then, and a table at the end."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    started: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    hits: Counter[str] = field(default_factory=Counter)  # prompt tokens, by tier
    loaded: Counter[str] = field(default_factory=Counter)  # tokens, by tier, preempted ones too
    drops: Counter[str] = field(default_factory=Counter)  # blocks, by tier and reason
    faults: Counter[str] = field(default_factory=Counter)
    longest_wait: float = 0.0
    longest_step: float = 0.0
    longest_drain: float = 0.0
    memory_mib: float = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def line(self) -> str:
        counts = self.counts
        loaded = ", ".join(f"{tier} {count:,}" for tier, count in sorted(self.loaded.items()))
        return (
            f"{self.seconds:6.0f} s  round {counts['rounds']}: {counts['requests']:,} requests, "
            f"{counts['steps']:,} steps; tokens loaded: {loaded or 'none'}; "
            f"{sum(self.faults.values()):,} faults; longest wait {self.longest_wait:.1f} s; "
            f"{self.memory_mib:.0f} MiB"
        )

    def table(self) -> str:
        bounds = {
            "longest request": f"{self.longest_wait:.2f} s",
            "longest step": f"{self.longest_step:.2f} s",
            "longest drain": f"{self.longest_drain:.2f} s",
            "resident memory": f"{self.memory_mib:.0f} MiB",
        }
        parts = [
            ("in all", {**self.counts}),
            ("prompt tokens found in", self.hits),
            ("tokens loaded from", self.loaded),
            ("blocks dropped", self.drops),
            ("faults injected", self.faults),
            ("bounds", bounds),
        ]
        return "\n".join(_part(title, rows) for title, rows in parts)


def _part(title: str, rows: dict[str, int] | dict[str, str]) -> str:
    lines = [title]
    for name, value in rows.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        lines.append(f"  {name:<44}{shown:>14}")
    return "\n".join(lines)
