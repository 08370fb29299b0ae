"""The main job: several questions about one document, answered together.

All prompts begin with the same text. The first to run computes its KV; the others take those
blocks as they are and compute only their own question, although all arrive at the same moment.
"""

from __future__ import annotations

import textwrap
import time

from quire import LLM, RequestOutput, SamplingParams

SHARED_TEXT = """\
The Lighthouse of Skerry Point

Skerry Point is a rocky headland on the north coast. Its lighthouse was built in 1862 by the \
engineer Clara Dunmore, after eleven ships had been lost on the reef in a single winter. The tower \
is forty-two metres tall and made of grey granite that was carried to the headland by boat. The \
work took four years, because the masons could land only when the sea was calm, and in the second \
year a storm washed away the pier, two cranes and most of the stone that had been cut.

The first keeper was Thomas Reid. He lived in the tower for thirty-one years with his wife Anna, \
their three children and a black dog named Captain. Every evening he climbed the two hundred and \
six steps to the lamp room, trimmed the wick, and wound the clockwork that turned the lens. The \
lamp burned whale oil until 1880, then paraffin, and since 1931 it has been electric. On a clear \
night its light can be seen from twenty-four miles away. It flashes white three times, then stays \
dark for nine seconds, so that sailors can tell it from every other light on the coast.

In thick fog the light is of no use, and a bell was rung by hand instead, once a minute, for as \
long as the fog lasted. The longest fog on record came in March 1889 and lasted for five days. \
Thomas and Anna took turns at the bell, four hours each, and neither of them left the tower. When \
the sky cleared they found a fishing boat, the Morning Star, anchored two hundred metres from the \
reef. Its crew of seven had steered by the sound of the bell alone. Each year after that the \
fishermen brought the keeper a barrel of herring on the first day of spring.

The last keeper left in 1984, when the light became automatic. For ten years the buildings stood \
empty. Then the village bought them for one pound and turned the keeper's house into a small \
museum. It is open from April to October, every day except Monday. A ticket costs six pounds, and \
children under twelve go in free. Visitors can see the old clockwork, the bell, and the logbook in \
which Thomas Reid wrote down the weather on every day of his service. The most popular thing in \
the museum is the painted portrait of Captain, the dog, which hangs above the kitchen stove.

Question: Where is Skerry Point?
Answer: Skerry Point is on the north coast.

Question: How many children did Thomas Reid have?
Answer: Thomas Reid had three children.

"""

QUESTIONS = [
    "Who built the lighthouse?",
    "How tall is the tower?",
    "Who was the first keeper?",
    "What was the name of the dog?",
    "How long did the longest fog last?",
    "What was the name of the fishing boat?",
    "When did the last keeper leave?",
    "How much does a ticket to the museum cost?",
]


def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=40, stop="\n")
    with LLM("smollm2", num_blocks=128, max_model_len=2048) as llm:
        # Kernels are compiled at the first token of all, which is not what is timed below.
        llm.generate("Hello", SamplingParams(max_tokens=1), use_tqdm=False)
        llm.reset_prefix_cache()
        engine = llm.engine
        for question in QUESTIONS:
            engine.add_request(question, f"{SHARED_TEXT}Question: {question}\nAnswer:", params)

        outputs: list[RequestOutput] = []
        started = time.perf_counter()
        while engine.has_unfinished_requests():
            if not outputs:  # the last picture taken is from when all were running
                picture, blocks = llm.describe_pool(), llm.stats()["blocks"]["in_use"]
            for output in engine.step():
                show(output)
                outputs.append(output)
        seconds = time.perf_counter() - started

        summarise(outputs, seconds)
        apart = sum(-(-len(output.prompt_token_ids) // 16) for output in outputs)
        print(f"\nwhile all were running: {blocks} blocks of 16 tokens; unshared, at least {apart}")
        print(textwrap.indent(picture, "  "))
        print("\nnow: nothing runs, and what was computed waits for the next question")
        print(textwrap.indent(llm.describe_pool(), "  "))


def show(output: RequestOutput) -> None:
    cached, asked = output.num_cached_tokens, len(output.prompt_token_ids)
    print(f"{output.request_id:<44} {cached:>4} of {asked} prompt tokens were cached")
    print(f"  {output.outputs[0].text.strip()}", flush=True)


def summarise(outputs: list[RequestOutput], seconds: float) -> None:
    asked = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    new = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"\n{len(outputs)} prompts of {asked:,} tokens: {asked - cached:,} computed", end=", ")
    print(f"{cached:,} taken from another prompt's blocks")
    print(f"{new} new tokens in {seconds:.1f} s, {new / seconds:.0f} tokens per second in all")


if __name__ == "__main__":
    main()
