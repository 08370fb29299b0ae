"""One engine for many tasks: every answer is that of an LLM, and the end of one is its own affair.

Each test runs an event loop of its own, one after another, over the same AsyncLLM.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S, eventually
from tiny_model import write_tiny_model

from quire import LLM, AsyncLLM, QuireError, RequestError, RequestOutput, SamplingParams
from quire.errors import ConfigError

SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "device": "cpu",
    "num_blocks": 512,
    "max_num_seqs": 64,
    "use_tqdm": False,
}
ENDLESS = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
FORTY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def short(**changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, **changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny"), smollm2_path))


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(model, **SETTINGS)
    yield llm
    run(llm.close())


@pytest.fixture(scope="module")
def plain(model: str) -> Iterator[LLM]:
    with LLM(model, **SETTINGS) as plain:
        yield plain


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE_S))


async def last(outputs: Any) -> RequestOutput:
    async for output in outputs:
        latest = output
    assert latest.finished
    return latest


async def until_idle(llm: AsyncLLM) -> None:
    while (await llm.stats())["blocks"]["in_use"]:
        await asyncio.sleep(0.01)


def test_hundreds_of_callers_get_what_a_batch_gets(llm: AsyncLLM, plain: LLM):
    prompts = [f"Number {i} of" for i in range(300)]
    expected = plain.generate(prompts, short(), use_tqdm=False)

    async def main() -> list[RequestOutput]:
        return await asyncio.gather(*(last(llm.generate(each, short())) for each in prompts))

    for got, wanted in zip(run(main()), expected, strict=True):
        assert got.prompt == wanted.prompt
        assert got.prompt_token_ids == wanted.prompt_token_ids
        assert got.outputs == wanted.outputs


def test_every_output_has_the_whole_text_so_far(llm: AsyncLLM):
    async def main() -> list[RequestOutput]:
        return [each async for each in llm.generate("Once", FORTY, "a name")]

    outputs = run(main())
    assert len(outputs) > 1
    assert {each.request_id for each in outputs} == {"a name"}
    assert [each.finished for each in outputs] == [False] * (len(outputs) - 1) + [True]
    for before, after in itertools.pairwise(outputs):
        assert after.outputs[0].text.startswith(before.outputs[0].text)
        ids = before.outputs[0].token_ids
        assert after.outputs[0].token_ids[: len(ids)] == ids
        assert len(after.outputs[0].token_ids) > len(ids)


def test_without_stream_there_is_one_output(llm: AsyncLLM):
    async def main() -> list[RequestOutput]:
        return [each async for each in llm.generate("Once", FORTY, stream=False)]

    [output] = run(main())
    assert output.finished and len(output.outputs[0].token_ids) == 40


@pytest.mark.parametrize(
    "changes",
    [{"n": 3, "seed": 7}, {"logprobs": 3}, {"prompt_logprobs": 2}, {"stop": ["e", "a"]}],
    ids=str,
)
def test_parameters_do_what_they_do_in_an_llm(llm: AsyncLLM, plain: LLM, changes: dict[str, Any]):
    prompt = {"prompt_token_ids": [5, 6, 7, 8]}
    params = short(**changes)
    [wanted] = plain.generate(prompt, params, use_tqdm=False)
    got = run(last(llm.generate(prompt, params)))
    assert got.prompt_logprobs == wanted.prompt_logprobs
    for mine, other in zip(got.outputs, wanted.outputs, strict=True):
        assert mine.cumulative_logprob == pytest.approx(other.cumulative_logprob)
        mine.cumulative_logprob = other.cumulative_logprob
        assert mine == other


def test_a_chat_goes_through_the_template(llm: AsyncLLM, plain: LLM):
    messages = [{"role": "user", "content": "Hello"}]
    [wanted] = plain.chat(messages, short(), use_tqdm=False)
    got = run(last(llm.chat(messages, short())))
    assert got.prompt_token_ids == wanted.prompt_token_ids
    assert got.outputs == wanted.outputs


def test_a_chat_without_thoughts_is_within_any_budget(llm: AsyncLLM, plain: LLM):
    messages = [{"role": "user", "content": "Hello"}]
    [wanted] = plain.chat(messages, short(), use_tqdm=False)
    held = short(thinking_token_budget=0)
    assert plain.chat(messages, held, use_tqdm=False)[0].outputs == wanted.outputs
    assert run(last(llm.chat(messages, held))).outputs == wanted.outputs
    *_, streamed = plain.stream_chat(messages, held)
    assert streamed.outputs[0].token_ids == wanted.outputs[0].token_ids


def test_closing_the_iterator_gives_the_blocks_back(llm: AsyncLLM):
    async def main() -> None:
        outputs = llm.generate("Once upon a time", ENDLESS)
        await anext(outputs)
        assert (await llm.stats())["blocks"]["in_use"]
        await outputs.aclose()
        await until_idle(llm)

    run(main())


def test_a_loop_that_is_left_gives_the_blocks_back(llm: AsyncLLM):
    async def main() -> None:
        async for _ in llm.generate("Once upon a time", ENDLESS):
            break
        await until_idle(llm)

    run(main())


def test_half_of_the_callers_are_cancelled(llm: AsyncLLM):
    async def main() -> None:
        begun = [asyncio.Event() for _ in range(40)]

        async def call(i: int) -> RequestOutput:
            params = ENDLESS if i % 2 else short()
            async for output in llm.generate(f"Caller {i}", params):
                begun[i].set()
                latest = output
            return latest

        tasks = [asyncio.create_task(call(i)) for i in range(40)]
        await asyncio.gather(*(each.wait() for each in begun))
        for task in tasks[1::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(len(each.outputs[0].token_ids) == 6 for each in results[::2])
        assert all(isinstance(each, asyncio.CancelledError) for each in results[1::2])
        await until_idle(llm)

    run(main())


def test_a_cancelled_caller_that_has_not_begun(llm: AsyncLLM):
    async def main() -> None:
        tasks = [asyncio.create_task(last(llm.generate("Once", ENDLESS))) for _ in range(10)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until_idle(llm)

    run(main())


def test_abort_ends_a_request_by_its_id(llm: AsyncLLM):
    async def main() -> RequestOutput:
        outputs = llm.generate("Once", ENDLESS, request_id="mine")
        await anext(outputs)
        await llm.abort(["mine", "nobody's"])
        output = await last(outputs)
        await until_idle(llm)
        return output

    output = run(main())
    assert output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].token_ids


def test_an_id_is_taken_once_at_a_time(llm: AsyncLLM):
    async def main() -> None:
        first = llm.generate("Once", ENDLESS, request_id="same")
        await anext(first)
        with pytest.raises(RequestError, match="in use"):
            await last(llm.generate("Once", short(), request_id="same"))
        await anext(first)  # the first goes on
        await first.aclose()
        while True:  # the id is free again as soon as the first has ended
            try:
                return await last(llm.generate("Once", short(), request_id="same"))
            except RequestError:
                await asyncio.sleep(0.01)

    assert run(main()).request_id == "same"


def test_what_is_wrong_with_a_request_is_raised_in_its_loop_alone(llm: AsyncLLM):
    async def main() -> list[Any]:
        wrong = [
            llm.generate("", short()),
            llm.generate([10**6], short()),
            llm.generate([5] * 9000, short()),
            llm.generate("Once", {"temperature": 0}),  # type: ignore[arg-type]
            llm.generate("Once", short(), priority=3),
            llm.generate({"text": "Once"}, short()),
        ]
        right = llm.generate("Once", short())
        calls = [last(each) for each in [*wrong, right]]
        return await asyncio.gather(*calls, return_exceptions=True)

    *wrong, right = run(main())
    assert all(isinstance(each, RequestError) for each in wrong), wrong
    assert len(right.outputs[0].token_ids) == 6


def test_the_loop_goes_on_while_the_engine_steps(llm: AsyncLLM):
    async def main() -> int:
        turns = 0
        task = asyncio.create_task(last(llm.generate("Once", FORTY, stream=False)))
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert run(main()) > 40  # there were that many steps


def test_several_loops_at_once(llm: AsyncLLM):
    found: list[RequestOutput] = []

    def call() -> None:
        found.append(run(last(llm.generate("At once", short()))))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(found) == 4
    assert all(each.outputs == found[0].outputs for each in found)


def test_a_loop_that_is_closed_in_the_middle_gives_the_blocks_back(llm: AsyncLLM):
    loop = asyncio.new_event_loop()
    outputs = llm.generate("Once", ENDLESS)
    loop.run_until_complete(anext(outputs))
    loop.close()  # without a word to the generator
    run(until_idle(llm))


def test_close_ends_open_requests_and_the_process(model: str):
    async def main() -> None:
        async with AsyncLLM(model, **SETTINGS) as llm:
            process = llm._starting.result().client._process
            outputs = llm.generate("Once", ENDLESS)
            await anext(outputs)
            reading = asyncio.create_task(last(outputs))
        with pytest.raises(QuireError, match="closed"):
            await reading
        assert process.poll() == 0
        with pytest.raises(QuireError, match="closed"):
            await last(llm.generate("Once", short()))
        with pytest.raises(QuireError, match="closed"):
            await llm.stats()
        await llm.close()  # once more does no harm

    run(main())


def test_an_engine_that_is_killed_ends_every_request_with_a_sentence(model: str):
    async def main() -> None:
        async with AsyncLLM(model, **SETTINGS) as llm:
            outputs = [llm.generate("Once", ENDLESS) for _ in range(3)]
            for each in outputs:
                await anext(each)
            llm._starting.result().client._process.kill()
            for each in outputs:
                with pytest.raises(QuireError, match="make a new AsyncLLM"):
                    await last(each)
            with pytest.raises(QuireError, match="make a new AsyncLLM"):
                await last(llm.generate("Once", short()))
            with pytest.raises(QuireError, match="make a new AsyncLLM"):
                await llm.stats()

    run(main())


def test_a_model_that_is_not_there():
    with pytest.raises(ConfigError):
        AsyncLLM("smollm2", block_size=-1)

    async def main() -> None:
        async with AsyncLLM("/nowhere/at/all", use_tqdm=False):
            pass

    with pytest.raises(QuireError, match="/nowhere/at/all"):
        run(main())


def test_close_before_the_model_is_loaded(model: str):
    async def main() -> None:
        llm = AsyncLLM(model, **SETTINGS)
        waiting = asyncio.create_task(last(llm.generate("Once", short())))
        await asyncio.sleep(0)
        await llm.close()
        with pytest.raises(QuireError, match="closed"):
            await waiting

    run(main())


def test_one_that_is_dropped_ends_its_thread(model: str):
    llm = AsyncLLM(model, **SETTINGS)
    thread = llm._background._thread
    del llm
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_program_may_end_without_closing(model: str):
    program = f"""
        import asyncio, quire

        async def main():
            llm = quire.AsyncLLM({model!r}, **{SETTINGS!r})
            params = quire.SamplingParams(max_tokens=4000, ignore_eos=True)
            async for output in llm.generate("Once", params):
                print(llm._starting.result().client.pid, flush=True)
                return

        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    eventually(lambda: not is_running(int(done.stdout)), "the engine lives on")


def is_running(pid: int) -> bool:
    """A zombie is not: not every container has a process that reaps orphans."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
