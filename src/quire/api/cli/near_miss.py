"""The flag that was probably meant."""

from __future__ import annotations

from collections.abc import Collection

from quire.checks import did_you_mean

# What other tools call the same thing, where the name itself gives no hint.
ELSEWHERE = {
    "--context-length": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--data-parallel-size": "--replicas",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--dp": "--replicas",
    "--dp-size": "--replicas",
    "--endpoint": "--url",
    "--file": "--prompt-file",
    "--max-length": "--max-model-len",
    "--max-seq-len": "--max-model-len",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--n-predict": "--max-tokens",
    "--num-prompts": "--num-requests",
    "--num-return-sequences": "--n",
    "--num-samples": "--n",
    "--speculative-model": "--speculative",
    "--swap-space": "--host-cache-bytes",
    "--text": "--prompt",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
}


def near_flag(typed: str, known: Collection[str]) -> str:
    """The end of an error sentence: by another tool's name, by spelling, or by a common word."""
    if ELSEWHERE.get(typed) in known:
        return f"; did you mean {ELSEWHERE[typed]}?"
    words = set(_words(typed))
    longer = [flag for flag in known if flag.startswith(typed)]  # --temp begins --temperature
    shorter = [flag for flag in known if words.issuperset(_words(flag))]  # --base-url has --url
    return _shortest(longer) or did_you_mean(typed, known) or _shortest(shorter)


def _shortest(flags: Collection[str]) -> str:
    return f"; did you mean {min(flags, key=len)}?" if flags else ""


def _words(flag: str) -> list[str]:
    return flag.lstrip("-").replace("_", "-").split("-")
