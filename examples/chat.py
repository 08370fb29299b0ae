"""A conversation from Python: each turn finds the turns before it in the cache."""

from __future__ import annotations

from quire import LLM, SamplingParams

QUESTIONS = [
    "What is the capital of France?",
    "And of Italy?",
    "Which of the two cities lies by the river Seine?",
]


def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=80)
    messages = [{"role": "system", "content": "You answer in one short sentence."}]
    with LLM("smollm2") as llm:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            print(f"> {question}")
            shown = ""
            for output in llm.stream_chat(messages, params):
                text = output.outputs[0].text
                print(text[len(shown) :], end="", flush=True)
                shown = text
            cached, asked = output.num_cached_tokens, len(output.prompt_token_ids)
            print(f"\n  ({cached} of {asked} prompt tokens came from the cache)\n")
            messages.append({"role": "assistant", "content": shown})


if __name__ == "__main__":
    main()
