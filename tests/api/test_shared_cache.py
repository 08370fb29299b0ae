"""Two engines and a third process over one server's cache, each of them killed in its turn."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from effort import effort
from patience import PATIENCE_S, eventually
from tiny_ranks import open_ranks, write_weights

from quire import LLM, SamplingParams
from quire.kv.tiers.remote.deadline import Deadline
from quire.kv.tiers.shared.channel import Channel
from quire.kv.tiers.shared.protocol import Operation, Shape
from quire.kv.tiers.ssd.inspector import stat

HERE = Path(__file__).parent
KILLS = effort(3, 50)
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Victim:
    """A process that is killed and started again."""

    def __init__(self, *command: str) -> None:
        self._command = [sys.executable, *command]
        self._path = os.pathsep.join([str(HERE.parent), *sys.path])
        self.begin()

    def begin(self) -> None:
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": self._path},
        )

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline() or "null")

    def kill(self) -> None:
        assert self.process.poll() is None, "it ended before it was killed"
        self.process.kill()
        self.process.communicate()


class Engine(Victim):
    def submit(self, prompt: list[int], calm: bool = False) -> None:
        """With `calm`, once the cache is there."""
        print(json.dumps({"prompt": prompt, "calm": calm}), file=self.process.stdin, flush=True)

    def answer(self, prompt: list[int]) -> dict[str, Any]:
        self.submit(prompt, calm=True)
        found: dict[str, Any] = self.hear()
        return found


class Library(Victim):
    """It talks all the time, and a thread listens; how many blocks it loaded last."""

    def begin(self) -> None:
        super().begin()
        assert self.hear() == "ready"
        self.num_loaded = 0
        self._listener = threading.Thread(target=self._listen, args=(self.process,), daemon=True)
        self._listener.start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.num_loaded = json.loads(line)

    def kill(self) -> None:
        assert self.process.poll() is None, "it met a wrong byte"
        self.process.kill()
        self.process.wait()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_weights(tmp_path / "model", num_hidden_layers=2)


@pytest.fixture
def reference(model: Path) -> Iterator[LLM]:
    """An engine without any cache below it."""
    with open_ranks(model, 1, num_blocks=200, enable_prefix_caching=False) as llm:
        yield llm


@pytest.mark.long
def test_each_in_turn_is_killed_and_no_answer_is_wrong(
    model: Path, reference: LLM, tmp_path: Path
) -> None:
    shared_memory = sorted(os.listdir("/dev/shm"))
    folder, dice = tmp_path / "kv", random.Random(0)
    url = f"quire://{folder}/quire-kv.sock"
    sizes = ["--ssd-cache-bytes", "8MiB", "--host-cache-bytes", "2MiB"]
    server = Victim("-m", "quire", "cache", "serve", str(folder), *sizes)
    worker = str(HERE / "shared_worker.py")
    engines = [Engine(worker, "engine", url, str(model)) for _ in range(2)]
    assert [engine.hear() for engine in engines] == ["ready", "ready"]

    def right(prompt: list[int]) -> list[int]:
        [output] = reference.generate([prompt], PARAMS, use_tqdm=False)
        found: list[int] = output.outputs[0].token_ids
        return found

    def new_prompt() -> list[int]:
        return [dice.randrange(3, 199) for _ in range(dice.randrange(40, 120))]

    def share_a_prompt() -> bool:
        """What one engine computed, the other finds; unless a busy machine missed a deadline."""
        prompt = new_prompt()
        first, second = dice.sample(engines, 2)
        answers = [first.answer(prompt), second.answer(prompt)]
        assert [answer["ids"] for answer in answers] == [right(prompt)] * 2
        return answers[1]["from"].get("remote", 0) >= len(prompt) // 8 * 8 - 8

    assert eventually(share_a_prompt, "the engines share nothing")
    image_bytes = stat(folder).image_bytes
    third = Library(worker, "library", url, str(image_bytes))
    victims: list[Victim] = [server, third, *engines]
    for number in range(KILLS):
        victim = victims[number % len(victims)]
        prompts = [new_prompt() for _ in engines]
        for engine, prompt in zip(engines, prompts, strict=True):
            engine.submit(prompt)
        time.sleep(dice.uniform(0, 0.2))
        victim.kill()
        for engine, prompt in zip(engines, prompts, strict=True):
            if engine is not victim:
                assert engine.hear()["ids"] == right(prompt)
        victim.begin()
        if isinstance(victim, Engine):
            assert victim.hear() == "ready"
        assert eventually(share_a_prompt, "the engines share nothing any more")
        assert eventually(lambda: third.num_loaded == 4, "the third process finds nothing")

    for victim in (*engines, third):
        victim.kill()
    eventually(lambda: exchanges_of(server) == 0, "the server keeps memory of the dead")
    shape = Shape(8, (image_bytes,))
    client = Channel().open(folder / "quire-kv.sock", shape, Deadline(PATIENCE_S))
    told = client.json(Operation.STATS, Deadline(PATIENCE_S))
    assert told["connections"] == 1 and told["host"]["held"] == 0
    assert not told["host"]["drops"].get("corrupt") and not told["ssd"]["drops"].get("corrupt")
    client.close()
    server.process.terminate()
    assert server.process.wait(PATIENCE_S) == 0
    assert sorted(os.listdir("/dev/shm")) == shared_memory


def exchanges_of(server: Victim) -> int:
    """Memory of connections that the server has mapped."""
    return Path(f"/proc/{server.process.pid}/maps").read_text().count("memfd:quire-exchange")
