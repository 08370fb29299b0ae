"""Which sequences of an engine are preempted."""

from __future__ import annotations

from typing import Any

from quire import LLM


def preempted_adapters(llm: LLM) -> list[Any]:
    """A list that gets the adapter of every sequence that is preempted from now on, or None."""
    queues, found = llm.engine.scheduler.queues, []
    preempt = queues.preempt

    def noted(sequence: Any) -> None:
        found.append(sequence.request.adapter)
        preempt(sequence)

    queues.preempt = noted
    return found
