"""A vLLM in a process of its own, which does what the lines of its standard input say.

    vllm_session.py MODEL EXTRA_CONFIG ANSWERS

EXTRA_CONFIG is JSON, and null where there is no connector. A line is `[what, argument, …]` in JSON,
and so is the answer, on the file descriptor ANSWERS.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

PATIENCE_S = 300.0


def be_patient() -> None:
    """A busy machine must not turn a hit into a miss: where the worker is in this process."""
    from quire.connectors.vllm import hits
    from quire.kv import loads, puts, store

    hits.FETCH_S = PATIENCE_S
    store.ASK_DEADLINE_S = PATIENCE_S
    loads.SLOT_WAIT_S = puts.SLOT_WAIT_S = PATIENCE_S


class Session:
    def __init__(self, model: str, extra: dict[str, Any] | None) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        connector = None
        if extra is not None:
            connector = KVTransferConfig(
                kv_connector="QuireConnector",
                kv_connector_module_path="quire.connectors.vllm",
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=extra,
            )
        self.llm = LLM(
            model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype=os.environ.get("VLLM_TEST_DTYPE", "float32"),
            block_size=32,
            max_model_len=4096,
            max_num_seqs=8,
            disable_log_stats=False,
            kv_transfer_config=connector,
        )
        self._params = SamplingParams
        self._numbers = 0

    def generate(
        self, prompts: list[list[int]], max_tokens: int, salt: str | None = None
    ) -> dict[str, Any]:
        """Greedy tokens, how many prompt tokens were cached, and the seconds that it took."""
        params = self._params(
            temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True
        )
        salted = {} if salt is None else {"cache_salt": salt}
        started = time.perf_counter()
        asked = [{"prompt_token_ids": prompt, **salted} for prompt in prompts]
        answers = self.llm.generate(asked, params, use_tqdm=False)
        return {
            "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
            "cached": [answer.num_cached_tokens for answer in answers],
            "seconds": time.perf_counter() - started,
        }

    def forget(self) -> bool:
        """Empty vLLM's own prefix cache. Saves are reported in steps, so there have to be some."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.generate([[1, 2, 3]], 1)
            if self.llm.reset_prefix_cache():
                return True
        return False

    def abort(self, prompt: list[int], steps: int) -> None:
        """Begin a request, and give it up after so many steps."""
        engine, name = self.llm.llm_engine, f"aborted {self._numbers}"
        self._numbers += 1
        params = self._params(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
        for _ in range(steps):
            engine.step()
        engine.abort_request([name])
        while engine.has_unfinished_requests():
            engine.step()

    def metrics(self) -> dict[str, float]:
        return {each.name: each.value for each in self.llm.get_metrics() if hasattr(each, "value")}


def main() -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["HF_HUB_OFFLINE"] = "1"
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        be_patient()
    session = Session(sys.argv[1], json.loads(sys.argv[2]))
    with os.fdopen(int(sys.argv[3]), "w", buffering=1) as answers:
        print(json.dumps("ready"), file=answers)
        for line in sys.stdin:
            what, *arguments = json.loads(line)
            print(json.dumps(getattr(session, what)(*arguments)), file=answers)
    del session


if __name__ == "__main__":
    main()
