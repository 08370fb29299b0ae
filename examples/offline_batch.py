"""Many prompts in one call: Quire batches them, and returns the answers in their order."""

from __future__ import annotations

from quire import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "The three primary colours are",
    "To make bread you need",
    "Once upon a time, in a small village,",
]


def main() -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=32)
    with LLM("smollm2") as llm:
        for output in llm.generate(PROMPTS, params):
            print(f"[{output.prompt}]{output.outputs[0].text}\n")


if __name__ == "__main__":
    main()
