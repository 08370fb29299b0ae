"""What compiling may take, whatever the form: time, memory, and other tenants' patience."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from spelling import TOKENS, tokenizer

from quire.engine.grammar import compiler as compiler_module
from quire.engine.grammar.compiler import GrammarCompiler
from quire.engine.grammar.grammar import Grammar
from quire.engine.grammar.queue import CompileQueue
from quire.engine.grammar.state import GrammarState
from quire.structured import StructuredOutput

PATIENCE_S = 120.0
PRIMES = [99999989, 99999971, 99999959, 99999941, 99999931, 99999847, 99999839, 99999827]


def hostile(i: int = 0) -> StructuredOutput:
    """It would go on for minutes and take gigabytes."""
    return StructuredOutput(json_schema={"type": "integer", "multipleOf": PRIMES[i]})


@pytest.fixture
def compiler():
    made = GrammarCompiler(tokenizer(), len(TOKENS), (0,))
    yield made
    made.close()


def until(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


def sandboxes(compiler) -> list[int]:
    return [each._process.pid for each in compiler._sandboxes.values() if each._process]


def forks(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("divisor", [999983, 99999989])
def test_a_form_that_escapes_the_librarys_limits_costs_the_engine_nothing(compiler, divisor):
    form = StructuredOutput(json_schema={"type": "integer", "multipleOf": divisor})
    compiler.compile(StructuredOutput(regex="a")).check()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = compiler.compile(form).error
    says = r"The json_schema cannot be used \(it takes more than (2 s|64 MiB) to compile\)"
    assert re.fullmatch(says + r"; change it\.", error)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # KiB
    assert compiler.compile(form).error == error


LIMITS = {
    "time": ("while True: pass", "it takes more than 1 s to compile"),
    "sleep": ("time.sleep(600)", "it takes more than 1 s to compile"),
    "memory": ("bytearray(1 << 30)", "it takes more than 64 MiB to compile"),
    "abort": ("os.abort()", "it takes more than 64 MiB to compile"),
    "crash": ("os.kill(os.getpid(), signal.SIGSEGV)", "it is nested too deeply to compile"),
    "raise": ("1 / 0", "it is too complex"),
}


@pytest.mark.parametrize("how", LIMITS)
def test_the_kernel_ends_a_form_that_takes_too_much(how):
    """Whatever runs there; the process itself goes on, and tries the next."""
    what, says = LIMITS[how]
    program = f"""
import os, signal, time
from quire.engine.grammar import sandbox_process as process
from quire.structured import StructuredOutput
process.CPU_S, process.WALL_S = 1.0, {1.0 if how == "sleep" else 600.0}
def hostile(form, guided):
    {what}
process.try_form = hostile
forks = process.Forks(None)
print(forks.run(StructuredOutput(regex="a")).decode(), end="")
process.try_form = lambda form, guided: {{"grammar": "fine"}}
print(forks.run(StructuredOutput(regex="a")).decode(), end="")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == f'{{"died": "{says}"}}'
    assert second.startswith('{"grammar": "fine"')


def test_the_sandbox_is_a_light_process(compiler):
    compiler.compile(StructuredOutput(regex="a")).check()
    (pid,) = sandboxes(compiler)
    mapped = Path(f"/proc/{pid}/maps").read_text()
    assert "llguidance" in mapped and "torch" not in mapped and "numpy" not in mapped


def test_another_tenants_form_does_not_wait_for_all_of_ones(compiler):
    many = [compiler.compile(hostile(i), "greedy") for i in range(len(PRIMES))]
    other = compiler.compile(StructuredOutput(regex="[ab]+"), "patient")
    other.wait(PATIENCE_S)
    assert other.is_done and other.error is None
    assert sum(grammar.is_done for grammar in many) < len(many) / 2


def test_tenants_take_turns():
    queue = CompileQueue()
    names = {}
    for name in ("a1", "a2", "a3", "b1", "c1", "b2"):
        names[name] = Grammar(StructuredOutput(regex=name))
        names[name].num_wanted = 1
        queue.add(name[0], names[name])
    queue.add("c", names["a3"])  # another tenant asks for the same form
    order = []
    while (taken := queue.take()) is not None:
        queue.done(taken[0])
        order.append(taken[1].form.regex)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_tenant_with_nothing_under_way_comes_first():
    queue = CompileQueue()
    for name in ("a1", "a2", "a3"):
        grammar = Grammar(StructuredOutput(regex=name))
        grammar.num_wanted = 1
        queue.add("a", grammar)
    assert queue.take() is not None
    late = Grammar(StructuredOutput(regex="b1"))
    late.num_wanted = 1
    queue.add("b", late)
    taken = queue.take()
    assert taken is not None and taken[1] is late


def test_what_nobody_waits_for_is_ended(compiler):
    grammars = [compiler.compile(hostile(i)) for i in range(5)]
    until(lambda: sum(map(len, map(forks, sandboxes(compiler)))) == compiler_module.THREADS)
    for grammar in grammars:
        compiler.abandon(grammar)
    fine = compiler.compile(StructuredOutput(regex="[ab]+"))
    fine.wait(PATIENCE_S)
    assert fine.error is None
    assert [grammar.has_begun for grammar in grammars] == [True, True, False, False, False]
    until(lambda: not any(map(forks, sandboxes(compiler))))


def test_a_form_that_one_of_two_has_left_is_compiled(compiler):
    form = StructuredOutput(json_schema={"type": "integer", "multipleOf": 29989})
    first, second = compiler.compile(form, "a"), compiler.compile(form, "b")
    assert first is second
    compiler.abandon(first)
    assert second.error is None


def test_a_form_that_was_left_is_compiled_when_it_is_asked_for_again(compiler):
    form = StructuredOutput(json_schema={"type": "integer", "multipleOf": 29989})
    left = compiler.compile(form)
    compiler.abandon(left)
    assert compiler.compile(form).error is None


def test_the_compiler_stops_in_the_middle(compiler):
    grammars = [compiler.compile(hostile(i)) for i in range(4)]
    until(lambda: sum(map(len, map(forks, sandboxes(compiler)))) == compiler_module.THREADS)
    started = sandboxes(compiler)
    started += [fork for pid in started for fork in forks(pid)]
    compiler.close()
    assert all(grammar.is_done and grammar.error is not None for grammar in grammars)
    until(lambda: not any(map(is_alive, started)))
    assert not any(thread.is_alive() for thread in compiler._sandboxes)


def test_a_sandbox_that_is_killed_is_started_again(compiler):
    compiler.compile(StructuredOutput(regex="a")).check()
    (pid,) = sandboxes(compiler)
    os.killpg(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid))
    form = StructuredOutput(regex="b")
    error = compiler.compile(form).error
    assert error == "The process that compiles grammars was ended from outside; try again."
    assert compiler.compile(form).error is None


def test_the_sandbox_ends_with_its_engine():
    program = """
import sys, time
from spelling import TOKENS, tokenizer
from quire.engine.grammar.compiler import GrammarCompiler
from quire.structured import StructuredOutput
compiler = GrammarCompiler(tokenizer(), len(TOKENS), (0,))
compiler.compile(StructuredOutput(regex="a")).check()
print(*[each._process.pid for each in compiler._sandboxes.values()], flush=True)
time.sleep(600)
"""
    path = os.pathsep.join(map(str, sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as engine:
        pids = [int(each) for each in engine.stdout.readline().split()]
        assert pids and all(map(is_alive, pids))
        engine.kill()
    until(lambda: not any(map(is_alive, pids)))


def test_forms_wait_while_those_in_use_take_all_the_memory(compiler, monkeypatch):
    large = compiler.compile(StructuredOutput(json_schema={"type": "integer", "multipleOf": 19997}))
    large.check()
    state = GrammarState(large)
    monkeypatch.setattr(compiler_module, "MOST_LIVING_BYTES", large.num_bytes - 1)
    waiting = compiler.compile(StructuredOutput(regex="a"))
    waiting.wait(1.0)
    assert not waiting.is_done
    monkeypatch.setattr(compiler_module, "MOST_KEPT_BYTES", 1)
    compiler.compile(StructuredOutput(regex="a"))  # lets go of what is kept
    state.release()
    del large
    waiting.wait(PATIENCE_S)
    assert waiting.is_done and waiting.error is None
