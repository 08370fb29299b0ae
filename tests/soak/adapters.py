"""Adapters loaded, replaced and unloaded while a server answers: `make soak-adapters`.

Callers ask for names that come and go, and hang up now and then. Every answer must be that of some
contents which the name stood for between question and answer; a name that is not served must have
been unloaded at some moment of that time. In the end nothing may be held, and the memory of the
two processes may not have grown. The exit status is 1, with one sentence, if any of this fails.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
from patience import PATIENCE_S
from server_process import ServerProcess
from tiny_adapters import write_adapter
from tiny_model import CONFIG, write_tiny_model

from quire import LLM, LoRARequest, SamplingParams
from quire.models.checkpoints import demo
from soak.server import resident
from soak.violation import Violation, require

KEY = "sk-soak"
NUM_CONTENTS = 12
NAMES = [f"name{i}" for i in range(8)]
PROMPTS = [[(13 * i * i + 5 * i + salt) % 1000 + 3 for i in range(40)] for salt in range(4)]
TOKENS = 8
AT_ONCE = 8
ALLOWED = 0.1  # of growth of memory, since a fifth of the time
SETTINGS = {"max_loras": 3, "max_cpu_loras": 5}

Contents = int | None  # of an adapter; None: its name is not served
BASE = -1


def main() -> int:
    options = _options()
    print(f"soak: {options.seconds:.0f} s with seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="quire-soak-") as folder:
        model = write_tiny_model(Path(folder) / "model", demo.fetch())
        for i in range(NUM_CONTENTS):
            write_adapter(Path(folder) / "adapters" / f"c{i}", seed=i, model=CONFIG)
        keys = Path(folder) / "keys.txt"
        keys.write_text(KEY)
        soak = Soak(_expected(model, Path(folder) / "adapters"), random.Random(options.seed))
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
        flags += ["--lora-folder", f"{folder}/adapters", "--api-keys-file", str(keys)]
        server = ServerProcess.tiny(str(model), "--no-log-requests", *flags)
        try:
            asyncio.run(soak.run(server, options.seconds))
        except Violation as error:
            print(f"soak: {error} {dict(soak.counts)}", flush=True)
            return 1
        finally:
            server.stop()
    print(f"soak: no wrong answer and no leak; {dict(soak.counts)}", flush=True)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="soak.adapters", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _expected(model: Path, folder: Path) -> dict[tuple[int, int], list[int]]:
    """By contents and prompt, what one request alone gives, with nothing cached."""
    settings: dict[str, Any] = {"enable_lora": True, "enable_prefix_caching": False}
    settings |= {"load_format": "dummy", "dtype": "float32", "device": "cpu", "num_blocks": 64}
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    found = {}
    with LLM(str(model), use_tqdm=False, **settings) as llm:
        for i in range(BASE, NUM_CONTENTS):
            lora = None if i == BASE else LoRARequest(f"c{i}", i + 1, str(folder / f"c{i}"))
            for place, prompt in enumerate(PROMPTS):
                [output] = llm.generate([prompt], params, False, lora_request=lora)
                found[i, place] = output.outputs[0].token_ids
    return found


class Name:
    """What a name may stand for now, and the requests that are open under it."""

    def __init__(self) -> None:
        self.may_be: set[Contents] = {None}
        self.open: list[set[Contents]] = []

    def begin_change(self, contents: Contents) -> None:
        for seen in (self.may_be, *self.open):
            seen.add(contents)

    def end_change(self, contents: Contents) -> None:
        self.may_be = {contents}


class Soak:
    def __init__(self, expected: dict[tuple[int, int], list[int]], dice: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self._expected = expected
        self._dice = dice
        self._names = {name: Name() for name in NAMES}
        self._is_over = False

    async def run(self, server: ServerProcess, seconds: float) -> None:
        timeout = aiohttp.ClientTimeout(total=300)
        headers = {"Authorization": f"Bearer {KEY}"}
        began = time.monotonic()
        async with aiohttp.ClientSession(server.url, timeout=timeout, headers=headers) as session:
            work = [self._change(session), *(self._ask(session) for _ in range(AT_ONCE))]
            tasks = [asyncio.create_task(each) for each in work]
            sizes: list[dict[str, int]] = []
            while (passed := time.monotonic() - began) < seconds:
                done, _ = await asyncio.wait(tasks, timeout=min(5.0, seconds - passed))
                if done:
                    break  # one has failed
                if passed > seconds / 5:
                    sizes.append(_sizes(server))
            self._is_over = True
            await asyncio.gather(*tasks)
            await self._check_idle(session)
        if len(sizes) > 1:
            self._check_growth(sizes)

    # --- callers --------------------------------------------------------------------------------

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        while not self._is_over:
            name = self._dice.choice([*NAMES, "tiny"])
            if name == "tiny":
                await self._complete(session, name, {BASE})
                continue
            known = self._names[name]
            seen = set(known.may_be)
            known.open.append(seen)
            try:
                await self._complete(session, name, seen)
            finally:
                known.open = [each for each in known.open if each is not seen]

    async def _complete(
        self, session: aiohttp.ClientSession, name: str, seen: set[Contents]
    ) -> None:
        place, length = self._dice.randrange(len(PROMPTS)), self._dice.randint(1, TOKENS)
        body = {"model": name, "prompt": PROMPTS[place], "temperature": 0, "max_tokens": length}
        body |= {"ignore_eos": True, "return_token_ids": True}
        if self._dice.random() < 0.1:
            await self._hang_up(session, {**body, "stream": True})
            return
        async with session.post("/v1/completions", json=body) as response:
            told = await response.json()
        if response.status == 404:
            self.counts["not served"] += 1
            require(None in seen, f"{name} was not served, but was never unloaded.")
            return
        require(response.status == 200, f"{name} was answered {response.status}: {told}.")
        self.counts["answers"] += 1
        drawn = told["choices"][0]["token_ids"]
        wanted = [self._expected[each, place][:length] for each in seen if each is not None]
        require(drawn in wanted, f"{name} was answered {drawn}, and not one of {wanted}.")

    async def _hang_up(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        async with session.post("/v1/completions", json=body) as response:
            await response.content.readline()
            response.close()
        self.counts["hung up"] += 1

    # --- the operator ---------------------------------------------------------------------------

    async def _change(self, session: aiohttp.ClientSession) -> None:
        while not self._is_over:
            name = self._dice.choice(NAMES)
            known = self._names[name]
            [before] = known.may_be
            after = self._dice.choice([None, *range(NUM_CONTENTS)])
            if before is None and after is None:
                continue
            known.begin_change(after)
            what = "unload" if after is None else "load"
            body: dict[str, Any] = {"lora_name": name}
            if after is not None:
                body |= {"lora_path": f"c{after}", "load_inplace": before is not None}
            async with session.post(f"/v1/{what}_lora_adapter", json=body) as response:
                text = await response.text()
                require(response.status == 200, f"To {what} {name} gave {text}.")
            known.end_change(after)
            self.counts[f"{what}s"] += 1
            await asyncio.sleep(self._dice.random() * 0.05)

    # --- the end --------------------------------------------------------------------------------

    async def _check_idle(self, session: aiohttp.ClientSession) -> None:
        for name, known in self._names.items():
            if None not in known.may_be:
                await session.post("/v1/unload_lora_adapter", json={"lora_name": name})
        until = time.monotonic() + PATIENCE_S  # for requests whose callers have hung up
        while (held := await self._held(session)) and time.monotonic() < until:
            await asyncio.sleep(0.2)
        require(not held, f"At idle there are {held}.")

    async def _held(self, session: aiohttp.ClientSession) -> dict[str, float]:
        """Blocks in use and adapters, by the names of their metrics."""
        async with session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        names = ("quire_num_in_use_blocks", "quire_adapters_in_host", "quire_adapters_in_slots")
        values = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line[0] != "#"}
        return {name: values[name] for name in names if values[name]}

    def _check_growth(self, sizes: list[dict[str, int]]) -> None:
        for process, before in sizes[0].items():
            after = sizes[-1][process]
            self.counts[f"bytes of the {process} at first"] = before
            self.counts[f"bytes of the {process} at last"] = after
            share = after / before - 1
            require(share < ALLOWED, f"The {process}'s memory has grown by {share:.1%}.")


def _sizes(server: ServerProcess) -> dict[str, int]:
    pids = {"server": server.process.pid, "engine": server.engine_pid}
    return {name: resident(pid) for name, pid in pids.items()}


if __name__ == "__main__":
    sys.exit(main())
