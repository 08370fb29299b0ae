"""A process of its own that answers golden prompts with a tiered cache, and may die without notice.

python tier_worker.py '{"settings": {...}, "prompts": [0, 5], "tokens": 16, "kill": true}'
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from quire import LLM, SamplingParams

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2.json"


def main() -> None:
    job = json.loads(sys.argv[1])
    prompts = [json.loads(GOLDEN.read_text())["prompts"][i]["ids"] for i in job["prompts"]]
    params = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True)
    with LLM("smollm2", dtype="float32", use_tqdm=False, **job["settings"]) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        flushed = llm.engine.scheduler.tiering.store.flush(120)
        answers = [
            {"ids": output.outputs[0].token_ids, "from": output.cached_tokens_by_tier}
            for output in outputs
        ]
        print(json.dumps({"answers": answers, "flushed": flushed}), flush=True)
        if job.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)


main()
