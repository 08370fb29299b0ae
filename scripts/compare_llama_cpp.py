"""Quire and llama.cpp on a CPU, side by side, from the same GGUF file.

    pip install llama-cpp-python==0.3.36  # compiles llama.cpp for this machine, in some ten minutes
    python scripts/compare_llama_cpp.py
    python scripts/compare_llama_cpp.py --file model.gguf --threads 4 --case decode:8
    python scripts/compare_llama_cpp.py --random Q4_K_M

Without a file it is the demo model's; `--random` makes one of Qwen3-0.6B's shape with random codes,
which are multiplied as fast as a real model's. Quire is there twice: with activations in 16 bits,
and in 8 (`activation_bits=8`), as llama.cpp has them. Each engine is a process, all are open, and
they take turns: a machine that is slower for a minute is slower for all.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

LARGEST_ID = 10_000
PROMPT, OUT = 32, 48  # tokens before those that are timed, and as many as are timed, of a stream
CONTEXT = 4096  # tokens that either holds, of all streams
MOST_STREAMS = CONTEXT // (PROMPT + OUT)
CASES = ["decode:1", "decode:8", "decode:32", "prompt:512", "prompt:2048"]


# --- one engine's process -------------------------------------------------------------------------


class QuireEngine:
    def __init__(self, file: str, threads: int, activation_bits: int = 16) -> None:
        import torch

        from quire import LLM

        torch.set_num_threads(threads)
        before = resident()
        sizes = {"max_model_len": CONTEXT, "num_blocks": CONTEXT // 16}
        self.llm = LLM(file, device="cpu", activation_bits=activation_bits, **sizes)
        self.prompt(200)
        self.resident = resident() - before

    def decode(self, streams: int) -> float:
        """Tokens a second behind the first."""
        prompts = [random_ids(PROMPT) for _ in range(streams)]
        self._seconds(prompts, 1)
        first = self._seconds(prompts, 1)
        return streams * OUT / (self._seconds(prompts, 1 + OUT) - first)

    def prompt(self, length: int) -> float:
        return length / self._seconds([random_ids(length)], 1)

    def _seconds(self, prompts: list[list[int]], out: int) -> float:
        from quire import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
        started = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started


class LlamaCpp:
    """By the functions of its C library: a batch may hold tokens of many streams."""

    def __init__(self, file: str, threads: int) -> None:
        import llama_cpp

        self.lib = llama_cpp
        self._says_nothing = llama_cpp.llama_log_callback(lambda level, text, data: None)
        self.lib.llama_log_set(self._says_nothing, None)  # which it keeps, and calls later
        before = resident()
        self.lib.llama_backend_init()
        model = self.lib.llama_model_load_from_file(
            file.encode(), self.lib.llama_model_default_params()
        )
        if not model:
            raise SystemExit(f"llama.cpp cannot read {file}.")
        settings = self.lib.llama_context_default_params()
        settings.n_ctx = settings.n_batch = CONTEXT
        settings.n_seq_max = MOST_STREAMS
        settings.kv_unified = True
        settings.n_threads = settings.n_threads_batch = threads
        self.context = self.lib.llama_init_from_model(model, settings)
        self.words = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(model))
        self.batch = self.lib.llama_batch_init(CONTEXT, 0, 1)
        self.prompt(200)
        self.resident = resident() - before

    def decode(self, streams: int) -> float:
        self._forget()
        last = []
        for stream in range(streams):
            self._run([(id, place, stream) for place, id in enumerate(random_ids(PROMPT))])
            last.append(self._most_likely(-1))
        started = time.perf_counter()
        for step in range(OUT):
            place = PROMPT + step
            self._run([(id, place, stream) for stream, id in enumerate(last)], all_last=True)
            last = [self._most_likely(row) for row in range(streams)]
        return streams * OUT / (time.perf_counter() - started)

    def prompt(self, length: int) -> float:
        self._forget()
        tokens = [(id, place, 0) for place, id in enumerate(random_ids(length))]
        started = time.perf_counter()
        self._run(tokens)
        self._most_likely(-1)
        return length / (time.perf_counter() - started)

    def _forget(self) -> None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def _run(self, tokens: list[tuple[int, int, int]], all_last: bool = False) -> None:
        batch = self.batch
        batch.n_tokens = len(tokens)
        for row, (id, place, stream) in enumerate(tokens):
            batch.token[row], batch.pos[row] = id, place
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, stream
            batch.logits[row] = all_last or row == len(tokens) - 1
        if self.lib.llama_decode(self.context, batch) != 0:
            raise SystemExit("llama.cpp could not compute a batch.")

    def _most_likely(self, row: int) -> int:
        logits = self.lib.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (self.words,)).argmax())


ENGINES: dict[str, Callable[[str, int], Any]] = {
    "Quire": QuireEngine,
    "8 bits": partial(QuireEngine, activation_bits=8),
    "llama.cpp": LlamaCpp,
}


def random_ids(length: int) -> list[int]:
    return [random.randint(1, LARGEST_ID) for _ in range(length)]


def resident() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def answer(connection: Connection, name: str, file: str, threads: int) -> None:
    with redirect_stdout(sys.stderr):
        engine = ENGINES[name](file, threads)
        connection.send(engine.resident)
        while question := connection.recv():
            case, _, size = question.partition(":")
            connection.send(getattr(engine, case)(int(size)))


# --- all, in turns --------------------------------------------------------------------------------


class EngineProcess:
    def __init__(self, name: str, file: Path, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._connection, far_end = context.Pipe()
        arguments = (far_end, name, str(file), threads)
        self._process = context.Process(target=answer, args=arguments, daemon=True)
        self._process.start()
        far_end.close()
        self.resident: int = self._answer()

    def measure(self, case: str) -> float:
        self._connection.send(case)
        return float(self._answer())

    def close(self) -> None:
        self._connection.send("")
        self._process.join()

    def _answer(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode  # below 0, the number of a signal
            raise SystemExit(f"{self._name} ended with {code}; its error is above.") from None


def compare(engines: dict[str, EngineProcess], case: str, rounds: int) -> str:
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        for name in list(engines)[:: 1 if number % 2 else -1]:
            speeds[name].append(engines[name].measure(case))
    *own, others = (each[1:] for each in speeds.values())  # without the warm-up
    ratios = [[ours / theirs for ours, theirs in zip(each, others, strict=True)] for each in own]
    medians = " ".join(f"{statistics.median(each):10.1f}" for each in (*own, others))
    to_others = ", ".join(
        f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in ratios
    )
    return f"{case:<12} {medians} tokens/s   {to_others} times"


# --- a model of random codes ----------------------------------------------------------------------


def write_random_model(file: Path, mix: str) -> None:
    """Qwen3-0.6B's shape. Of Q4_K_M the embedding, and half of v and down, are Q6_K."""
    import gguf

    from quire.models.checkpoints import demo

    layers, hidden, heads, kv_heads, head_dim, features = 28, 1024, 16, 8, 128, 3072
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_block_count(layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(features)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    words = copy_tokenizer(gguf.GGUFReader(demo.fetch()), writer, 151_936)
    r = np.random.default_rng(0)

    def add(name: str, rows: int, size: int, is_precise: bool = False) -> None:
        kind = "Q8_0" if mix == "Q8_0" else "Q6_K" if is_precise else "Q4_K"
        quantised = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(f"{name}.weight", random_codes(r, kind, rows, size), raw_dtype=quantised)

    def add_ones(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    add("token_embd", words, hidden, is_precise=True)
    add_ones("output_norm", hidden)
    for layer in range(layers):
        name = f"blk.{layer}"
        is_precise = layer % 2 == 0
        add(f"{name}.attn_q", heads * head_dim, hidden)
        add(f"{name}.attn_k", kv_heads * head_dim, hidden)
        add(f"{name}.attn_v", kv_heads * head_dim, hidden, is_precise)
        add(f"{name}.attn_output", hidden, heads * head_dim)
        add(f"{name}.ffn_gate", features, hidden)
        add(f"{name}.ffn_up", features, hidden)
        add(f"{name}.ffn_down", hidden, features, is_precise)
        for norm, size in [("attn", hidden), ("ffn", hidden), ("attn_q", head_dim)]:
            add_ones(f"{name}.{norm}_norm", size)
        add_ones(f"{name}.attn_k_norm", head_dim)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def copy_tokenizer(source: Any, writer: Any, words: int) -> int:
    """The demo's, with words added that no text has."""
    tokens = source.fields["tokenizer.ggml.tokens"].contents()
    kinds = source.fields["tokenizer.ggml.token_type"].contents()
    more = words - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokens, *(f"<unused {number}>" for number in range(more))])
    writer.add_token_types([*kinds, *[5] * more])
    writer.add_token_merges(source.fields["tokenizer.ggml.merges"].contents())
    writer.add_eos_token_id(0)
    return words


def random_codes(r: Any, kind: str, rows: int, size: int) -> Any:
    """Blocks of random codes whose scales are such that a row's numbers are about 0.03."""
    blocks, scales, halves, bytes_each = {
        "Q8_0": (size // 32, 0.0004, [0], 34),
        "Q4_K": (size // 256, 0.0001, [0, 2], 144),
        "Q6_K": (size // 256, 0.00002, [208], 210),
    }[kind]
    codes = r.integers(0, 256, (rows, blocks, bytes_each), np.uint8)
    for place in halves:
        codes[..., place : place + 2] = np.array([scales], np.float16).view(np.uint8)
    return codes.reshape(rows, blocks * bytes_each)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--file", type=Path, help="a GGUF file")
    model.add_argument("--random", choices=["Q4_K_M", "Q8_0"], help="make one of this mix")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of either")
    parser.add_argument("--rounds", type=int, default=3, help="of each case, after a warm-up")
    parser.add_argument(
        "--case",
        action="append",
        metavar="NAME:SIZE",
        help=f"streams that decode, or a prompt's tokens: {', '.join(CASES)}, unless asked for",
    )
    args = parser.parse_args()
    for case in args.case or ():
        name, _, size = case.partition(":")
        most = {"decode": MOST_STREAMS, "prompt": CONTEXT - 1}.get(name, 0)
        if not (size.isdecimal() and 1 <= int(size) <= most):
            allowed = f"decode:1 to {MOST_STREAMS} or prompt:1 to {CONTEXT - 1}"
            parser.error(f"--case takes {allowed}, not {case!r}")
    if args.rounds < 1 or args.threads < 1:
        parser.error("--rounds and --threads are at least 1")
    if args.file and not args.file.is_file():
        parser.error(f"there is no file {args.file}")
    if find_spec("llama_cpp") is None:
        parser.error("llama.cpp is not there: pip install llama-cpp-python==0.3.36")
    with tempfile.TemporaryDirectory() as folder:
        file = args.file
        if args.random:
            file = Path(folder) / "random.gguf"
            write_random_model(file, args.random)
        if file is None:
            from quire.models.checkpoints import demo

            file = Path(demo.fetch())
        engines = {name: EngineProcess(name, file, args.threads) for name in ENGINES}
        print(f"{file.stat().st_size / 1e6:.0f} MB, {args.threads} threads each")
        held = [f"{name} {engine.resident / 1e6:.0f} MB" for name, engine in engines.items()]
        print(f"resident, beyond the process before it opens the model: {', '.join(held)}")
        print(f"{'':<12} {' '.join(f'{name:>10}' for name in engines)}")
        for case in args.case or CASES:
            print(compare(engines, case, args.rounds), flush=True)
        for engine in engines.values():
            engine.close()


if __name__ == "__main__":
    main()
