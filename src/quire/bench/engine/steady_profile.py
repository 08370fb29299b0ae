"""A stretch of steps in which all sequences decode, for the profiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.bench.engine.session import Session
from quire.bench.engine.workloads import Workload
from quire.bench.report.profile import described, record
from quire.engine.engine import Engine
from quire.errors import ConfigError

GPU_STEPS, CPU_STEPS = 200, 20
WARM_UP_STEPS = 5


def profile_steady_steps(session: Session, workload: Workload, path: Path) -> dict[str, Any]:
    engine = session.llm.engine
    most = GPU_STEPS if session.device.type == "cuda" else CPU_STEPS
    names = [f"profiled-{i}" for i in range(len(workload.prompts))]
    session.llm.reset_prefix_cache()
    try:
        for name, prompt, params in zip(names, workload.prompts, workload.params, strict=True):
            engine.add_request(name, prompt, params)
        while engine.has_unfinished_requests() and not _is_steady(engine):
            engine.step()
        steps: list[int] = []
        findings = record(
            lambda: steps.append(_step(engine, most)),
            lambda: _step(engine, WARM_UP_STEPS),
            session.device,
            path,
        )
    finally:
        for name in names:
            engine.abort_request(name)
    if not steps[0]:
        raise ConfigError(
            "The answers end before there is a steady step to profile; choose another --workload."
        )
    return described(findings, "steady steps", steps[0], path)


def _is_steady(engine: Engine) -> bool:
    """As many run as can, and each has its first token."""
    scheduler = engine.scheduler
    full = not len(scheduler.waiting) or len(scheduler.running) >= scheduler.max_num_seqs
    return full and all(sequence.num_output for sequence in scheduler.running)


def _step(engine: Engine, most: int) -> int:
    for count in range(most):
        if not engine.has_unfinished_requests():
            return count
        engine.step()
    return most
