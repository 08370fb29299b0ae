"""A prompt that vLLM has computed before comes back from Quire's tiers, also after a restart.

    python examples/vllm_connector.py /models/qwen3-0.6b --folder /tmp/kv
    python examples/vllm_connector.py /models/qwen3-0.6b --folder /tmp/kv     and once more

The second run finds on the disk what the first has computed. vLLM has to be installed.
"""

from __future__ import annotations

import argparse
import time

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("--folder", required=True, help="where blocks are kept")
    args = parser.parse_args()
    llm = LLM(
        args.model,
        kv_transfer_config=KVTransferConfig(
            kv_connector="QuireConnector",
            kv_connector_module_path="quire.connectors.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "host_cache_bytes": "1GiB",
                "ssd_cache_dir": args.folder,
                "ssd_cache_bytes": "4GiB",
            },
        ),
    )
    prompt = "You are a librarian who knows every book. " * 200 + "Which one is about the sea?"
    started = time.perf_counter()
    (answer,) = llm.generate(prompt, SamplingParams(max_tokens=16, temperature=0))
    seconds = time.perf_counter() - started
    cached, total = answer.num_cached_tokens, len(answer.prompt_token_ids or ())
    print(f"{cached} of {total} prompt tokens were cached; {seconds:.2f} s")


if __name__ == "__main__":
    main()
