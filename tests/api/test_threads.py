"""One LLM and many threads: every answer is what a single thread gets, and they share the steps."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from fake_model import check_idle, expected, greedy, make_engine
from spelling import tokenizer
from tiny_llm import ids, open_tiny, write_config

from quire import LLM, BeamSearchParams, QuireError, SamplingParams
from quire.api import shared_engine
from quire.engine import commit as commit_module
from quire.engine import engine as engine_module
from quire.engine.engine import Engine
from quire.errors import EngineFailed

PATIENCE_S = 120.0  # a thread that is still there then hangs


class FakeLLM(LLM):
    """Steps take a moment, in which other threads run, and give what the context's hash says."""

    def __init__(self, **settings: Any) -> None:
        self._settings = {"num_blocks": 512, "budget": 256, "max_seqs": 64} | settings
        super().__init__("smollm2")
        self.fake = self.engine
        self.num_sequences: list[int] = []  # of each step
        self.fake.runner.before_launch = self._launched

    def _build_engine(self, progress: bool) -> Engine:
        return make_engine(**self._settings)

    def _launched(self, plan: Any) -> None:
        self.num_sequences.append(len(plan.counts))
        time.sleep(0.0005)


@pytest.fixture(autouse=True)
def many_switches() -> Iterator[None]:
    """Threads change places all the time, wherever they are."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(params=[False, True], ids=["in-turn", "overlapped"])
def llm(request: pytest.FixtureRequest) -> Iterator[FakeLLM]:
    with FakeLLM(overlap=request.param) as llm:
        yield llm
        llm.stats()  # what was left to be aborted is
        assert not llm.fake.has_unfinished_requests()
        check_idle(llm.fake)


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """What each call returned or raised, all made at the same time by a thread each."""
    results: list[Any] = [None] * len(calls)
    start = threading.Barrier(len(calls))

    def call(i: int) -> None:
        start.wait()
        try:
            results[i] = calls[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    return results


def prompt_of(number: int) -> list[int]:
    return [number % 50, 7, number // 50, *range(1, 3 + number % 9)]


def tokens(output: Any) -> list[int]:
    assert output.error is None
    return output.outputs[0].token_ids


def generate(llm: LLM, *prompts: list[int], length: int = 12) -> list[list[int]]:
    return [tokens(each) for each in llm.generate(list(prompts), greedy(length), use_tqdm=False)]


def stream(llm: LLM, prompt: list[int], length: int = 12, pause_s: float = 0.0) -> list[int]:
    seen: list[int] = []
    for output in llm.stream(prompt, greedy(length)):
        new = output.outputs[0].token_ids
        assert new[: len(seen)] == seen
        seen = new
        time.sleep(pause_s)
    return seen


def test_answers_are_right_and_batched(llm):
    threads, rounds, length = 12, 4, 16

    def client(number: int) -> None:
        for i in range(rounds):
            prompts = [prompt_of(100 * number + 10 * i + j) for j in range(3)]
            assert generate(llm, *prompts, length=length) == [expected(p, length) for p in prompts]

    results = together([lambda n=n: client(n) for n in range(threads)])
    assert results == [None] * threads
    assert max(llm.num_sequences) > 2 * 3
    assert len(llm.num_sequences) < threads * rounds * length / 2


def test_streams_of_many_threads_whoever_is_slow(llm):
    pauses = [0.0, 0.0, 0.002, 0.03] * 3
    streams = [
        lambda n=n, pause=pause: stream(llm, prompt_of(n), 20, pause)
        for n, pause in enumerate(pauses)
    ]
    assert together(streams) == [expected(prompt_of(n), 20) for n in range(len(pauses))]


def test_a_stream_that_is_not_read_holds_nobody_up_and_stays_small(llm):
    unread = llm.stream([1, 2, 3], greedy(300))
    next(unread)
    [answer] = together([lambda: generate(llm, [4, 5], length=400)])
    assert answer == [expected([4, 5], 400)]
    rest = [tokens(output) for output in unread]
    assert rest == [expected([1, 2, 3], 300)]  # one output has all that came meanwhile


def test_all_kinds_of_calls_at_random(llm):
    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    alone = [
        each.token_ids for each in llm.beam_search([9, 8, 7], beams, use_tqdm=False)[0].outputs
    ]

    def beam() -> None:
        [output] = llm.beam_search([9, 8, 7], beams, use_tqdm=False)
        assert [each.token_ids for each in output.outputs] == alone

    def leave() -> None:
        for _ in llm.stream([3, 1, 4], greedy(200)):
            break

    def look() -> None:
        blocks = llm.stats()["blocks"]
        assert blocks["free"] + blocks["cached"] + blocks["in_use"] == blocks["total"]
        assert "in use" in llm.describe_pool()
        llm.reset_prefix_cache()

    def client(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(12):
            prompt, length = prompt_of(draw.randrange(200)), draw.randrange(1, 30)
            kind = draw.choice(["generate", "stream", "beams", "leave", "look"])
            if kind == "generate":
                assert generate(llm, prompt, length=length) == [expected(prompt, length)]
            elif kind == "stream":
                assert stream(llm, prompt, length) == expected(prompt, length)
            else:
                {"beams": beam, "leave": leave, "look": look}[kind]()

    assert together([lambda n=n: client(n) for n in range(10)]) == [None] * 10


def test_closing_ends_the_calls_of_all_threads(llm):
    begun = threading.Semaphore(0)

    def call() -> None:
        streaming = llm.stream([1, 2], greedy(2000))
        next(streaming)
        begun.release()
        list(streaming)

    def close() -> None:
        for _ in range(8):
            begun.acquire(timeout=PATIENCE_S)
        together([llm.close] * 3)

    generating = lambda n: lambda: (begun.release(), generate(llm, prompt_of(n), length=2000))  # noqa: E731
    results = together([*[call] * 4, *map(generating, range(4)), close])
    assert results.pop() is None
    for error in results:
        assert type(error) is QuireError and str(error) == "This LLM is closed; make a new one."
    for use in (llm.stats, lambda: generate(llm, [1]), lambda: list(llm.stream([1]))):
        with pytest.raises(QuireError, match="is closed; make a new one"):
            use()
    llm.stats = dict  # for the fixture
    for request in list(llm.fake._requests):
        llm.fake.abort_request(request)


def test_a_stream_that_another_thread_drops_is_aborted(llm):
    streaming = [llm.stream([1, 2, 3], greedy(500))]
    next(streaming[0])
    assert llm.stats()["requests"]["running"] == 1
    assert together([streaming.clear]) == [None]
    assert llm.stats()["requests"]["running"] == 0


def test_a_stream_that_the_collector_finds_in_mid_step_is_aborted(llm):
    class Holder:
        pass

    holder = Holder()
    holder.itself, holder.stream = holder, llm.stream([1, 2, 3], greedy(500))
    next(holder.stream)
    del holder
    llm.fake.runner.before_launch = lambda plan: gc.collect()
    assert generate(llm, [4, 5]) == [expected([4, 5], 12)]
    assert llm.stats()["requests"]["running"] == 0


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_of_the_thread_that_steps_is_its_own_affair(llm, when):
    """Also where the outputs of others were in its hands."""
    step, struck = llm.fake.step, []

    def interrupted() -> Any:
        is_struck = len(llm.num_sequences) % 7 == 5 and len(struck) < 3
        if is_struck:
            struck.append(threading.get_ident())
        if is_struck and when == "before":
            raise KeyboardInterrupt
        outputs = step()
        if is_struck:
            raise KeyboardInterrupt
        return outputs

    llm.fake.step = interrupted
    results = together([lambda n=n: generate(llm, prompt_of(n), length=6 + n) for n in range(10)])
    interrupts = [n for n, each in enumerate(results) if isinstance(each, KeyboardInterrupt)]
    assert len(interrupts) == len(struck) > 0
    for n in set(range(10)) - set(interrupts):
        assert results[n] == [expected(prompt_of(n), 6 + n)]


def test_an_interrupt_at_any_line_leaves_the_others_alone():
    """Of all lines that threads share the engine by, in a thread that steps."""
    file, struck = shared_engine.__file__, list[str]()
    wanted = {"submitted", "_take_turn", "_end_turn", "_submit", "_step", "_deliver"}
    with FakeLLM() as llm:
        for line in lines_until(wanted, struck, [range(1, 200)] * 20):
            interrupted = lambda n=line: strike((file,), n, struck, lambda: generate(llm, [1, 2]))  # noqa: E731
            others = [lambda: generate(llm, [3, 4]), lambda: [stream(llm, [5, 6])]]
            first, *rest = together([interrupted, *others])
            assert isinstance(first, KeyboardInterrupt) or first == [expected([1, 2], 12)]
            assert rest == [[expected([3, 4], 12)], [expected([5, 6], 12)]]
        llm.stats()
        check_idle(llm.fake)
    assert wanted <= {*struck}


def test_an_interrupt_at_any_line_of_a_step_changes_no_other_answer():
    """Tokens, texts and stop strings, of requests that are in the same steps."""
    files, struck = (engine_module.__file__, commit_module.__file__), list[str]()
    wanted, every_ninth = {"_step", "step", "append"}, [range(n, 1200, 9) for n in range(1, 10)]
    prompts = [[3, 4], [5, 6, 7], [8, 9]]
    drawn = SamplingParams(seed=3, max_tokens=4, ignore_eos=True)
    params = [greedy(12), greedy(12, stop=["c"]), drawn]

    def answers(llm: LLM) -> list[Any]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [each.outputs[0] for each in outputs]

    with FakeLLM(tokenizer=tokenizer()) as llm:
        alone = answers(llm)
        assert {each.finish_reason for each in alone} == {"length", "stop"}
        text = alone[0].text
        for line in lines_until(wanted, struck, every_ninth * 2):
            interrupted = lambda n=line: strike(files, n, struck, lambda: generate(llm, [1, 2]))  # noqa: E731
            first, *rest = together(
                [interrupted, lambda: answers(llm), lambda: streamed_text(llm, prompts[0])]
            )
            assert isinstance(first, KeyboardInterrupt) or first == [expected([1, 2], 12)]
            assert rest == [alone, text]
        llm.stats()
        check_idle(llm.fake)
    assert wanted <= {*struck}


def streamed_text(llm: LLM, prompt: list[int]) -> str:
    return [output.outputs[0].text for output in llm.stream(prompt, greedy(12))][-1]


def lines_until(
    wanted: set[str], struck: list[str], passes: Iterable[Iterable[int]]
) -> Iterator[int]:
    """Pass after pass until all of these functions were struck: which thread comes first, and so
    what it gets to do for the others, is up to the machine."""
    for lines in passes:
        yield from lines
        if wanted <= {*struck}:
            return


def strike(
    files: tuple[str, ...], line: int, struck: list[str], function: Callable[[], Any]
) -> Any:
    """Call a function and interrupt it at the n-th line of these files that it comes to."""
    left = line

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        left -= event == "line"
        if event == "line" and left == 0:
            struck.append(frame.f_code.co_name)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        return function()
    finally:
        sys.settrace(None)


def test_a_bug_in_a_step_ends_one_call_in_one_sentence(llm, caplog):
    step, raised = llm.fake.step, []

    def broken() -> Any:
        if len(llm.num_sequences) == 8 and not raised:
            raised.append(True)
            raise KeyError(next(iter(llm.fake._requests.values())).sequences[0])
        return step()

    llm.fake.step = broken
    results = together([lambda n=n: generate(llm, prompt_of(n), length=20) for n in range(8)])
    errors = [each for each in results if isinstance(each, Exception)]
    assert [str(each) for each in errors] == [
        "The engine failed (KeyError); its log has the reason."
    ]
    assert isinstance(errors[0], QuireError)
    assert caplog.text.count("Traceback") == 1
    right = [[expected(prompt_of(n), 20)] for n in range(8)]
    assert [e for e in zip(results, right, strict=True) if e[0] == e[1]] == [
        e for e in zip(results, right, strict=True) if not isinstance(e[0], Exception)
    ]


def test_an_engine_that_has_failed_tells_every_thread(llm):
    step = llm.fake.step

    def failing() -> Any:
        if len(llm.num_sequences) >= 5:
            raise EngineFailed("Rank 1 of 2 was killed; the engine has ended, start a new one.")
        return step()

    llm.fake.step = failing
    calls = [lambda n=n: generate(llm, prompt_of(n), length=50) for n in range(6)]
    calls += [lambda n=n: stream(llm, prompt_of(n), 50) for n in range(6)]
    for error in together(calls):
        assert type(error) is EngineFailed and "Rank 1 of 2" in str(error)
    with pytest.raises(EngineFailed):
        generate(llm, [1])


def test_what_is_called_in_the_middle_of_the_own_step_waits_for_no_step(llm):
    """As a signal's handler may do it."""
    errors = []

    def handler(plan: Any) -> None:
        for use in (llm.stats, lambda: generate(llm, [1])):
            with pytest.raises(QuireError, match="in the middle of a step") as error:
                use()
            errors.append(error)

    llm.fake.runner.before_launch = handler
    assert together([lambda: generate(llm, [4, 5], length=3)]) == [[expected([4, 5], 3)]]
    assert errors


def test_closing_in_the_middle_of_the_own_step(llm):
    llm.fake.runner.before_launch = lambda plan: llm.close()
    [error] = together([lambda: generate(llm, [4, 5], length=3)])
    assert type(error) is QuireError and "is closed" in str(error)
    llm.stats = dict  # for the fixture
    for request in list(llm.fake._requests):
        llm.fake.abort_request(request)


# --- on a real model ------------------------------------------------------------------------------

PROMPTS = [ids(5 + 3 * i, salt=i) for i in range(12)]
SAMPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_config(tmp_path_factory.mktemp("tiny"))
    with open_tiny(folder, "cpu", num_blocks=128) as llm:
        yield llm


@pytest.fixture(scope="module")
def right(tiny: LLM) -> list[list[int]]:
    return [tokens(o) for o in tiny.generate(PROMPTS, SAMPLED, use_tqdm=False)]


def test_a_thread_pool(tiny, right):
    with ThreadPoolExecutor(8) as pool:
        outputs = pool.map(lambda p: tiny.generate(p, SAMPLED, use_tqdm=False)[0], PROMPTS)
        assert [tokens(output) for output in outputs] == right


def test_asyncio_with_calls_and_streams_in_threads(tiny, right):
    async def streamed(prompt: list[int]) -> list[int]:
        streaming, last = tiny.stream(prompt, SAMPLED), None
        while (output := await asyncio.to_thread(next, streaming, None)) is not None:
            last = output
        return tokens(last)

    async def called(prompt: list[int]) -> list[int]:
        return tokens((await asyncio.to_thread(tiny.generate, prompt, SAMPLED, False))[0])

    async def all_of_them() -> list[list[int]]:
        kinds = [streamed, called] * len(PROMPTS)
        return await asyncio.gather(*(kind(p) for kind, p in zip(kinds, PROMPTS, strict=False)))

    assert asyncio.run(all_of_them()) == right


def test_a_web_server_with_a_thread_for_each_request(tiny, right):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            [output] = tiny.generate([prompt], SAMPLED, use_tqdm=False)
            body = json.dumps(tokens(output)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    url = f"http://127.0.0.1:{server.server_port}/"

    def ask(prompt: list[int]) -> list[int]:
        body = json.dumps(prompt).encode()
        with urllib.request.urlopen(url, body, timeout=PATIENCE_S) as answer:
            return json.load(answer)

    try:
        assert together([lambda p=p: ask(p) for p in PROMPTS]) == right
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
