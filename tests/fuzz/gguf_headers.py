"""Mutated GGUF headers: counts, lengths, types, dimensions, offsets, and any bytes at all.

A small whole file is walked once, so that a mutation can hit the numbers that matter. Each file is
opened, its tokenizer is used, and its weights are loaded.
"""

from __future__ import annotations

import random
import struct
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fuzz.bounded import Case, Outcome, main, run_bounded

FULL, SMALL = 10_000, 600
NUMBERS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # kind: bytes
STRING, ARRAY = 8, 9
PADDING = 64  # twice the alignment
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
NASTY = [
    *(0, 1, 2, 3, 7, 8, 9, 10, 12, 13, 31, 255, 2**15, 2**16, 2**20, 2**24, 2**31 - 1, 2**31),
    *(2**32 - 1, 2**32, 2**48, 2**60, 2**62, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 32, 2**64 - 1),
]
VALUES = {
    "true": struct.pack("<I?", 7, True),
    "-1": struct.pack("<Ii", 5, -1),
    "0": struct.pack("<II", 4, 0),
    "2**63": struct.pack("<IQ", 10, 2**63),
    "NaN": struct.pack("<If", 6, float("nan")),
    "inf": struct.pack("<Id", 12, float("inf")),
    "empty": struct.pack("<IQ", STRING, 0),
    "none": struct.pack("<IQ", STRING, 4) + b"none",
    "lines": struct.pack("<IQ", STRING, 2000) + b"x\n" * 1000,
    "not UTF-8": struct.pack("<IQ", STRING, 2) + b"\xff\xfe",
    "no items": struct.pack("<IIQ", ARRAY, 4, 0),
    "numbers": struct.pack("<IIQ3I", ARRAY, 4, 3, 1, 2, 3),
    "the same numbers": struct.pack("<IIQ3I", ARRAY, 4, 3, 2, 2, 2),
    "NaNs": struct.pack("<IIQ2f", ARRAY, 6, 2, float("nan"), float("nan")),
    "strings": struct.pack("<IIQ", ARRAY, STRING, 2) + (struct.pack("<Q", 1) + b"a") * 2,
}


class Place(NamedTuple):
    """A number in the header."""

    what: str
    start: int
    size: int


def run(seed: int, count: int) -> Outcome:
    return run_bounded("fuzz.gguf_headers", seed, count)


def cases(good: bytes, rng: random.Random, count: int) -> Iterator[Case]:
    places = list(Walk(good).places)
    yield Case("nothing changed", partial(play, good))
    for i in range(count - 1):
        kind = rng.choice((numbers, numbers, retyped, retyped, any_bytes, cut, doubled, inserted))
        name, content = kind(good, places, rng)
        # The data move with the header's end; behind them is room, or else all were called cut.
        padding = b"" if kind is cut else bytes(PADDING)
        yield Case(f"{i}: {name}", partial(play, content + padding))


def numbers(good: bytes, places: list[Place], rng: random.Random) -> tuple[str, bytes]:
    """One or two numbers that the reader goes by."""
    content, names = bytearray(good), []
    for place in rng.sample(places, rng.choice((1, 1, 1, 2))):
        old = int.from_bytes(good[place.start : place.start + place.size], "little")
        near = (old - 1, old + 1, old * 2, -old)
        value = rng.choice((*NASTY, *near)) % 2 ** (8 * place.size)
        content[place.start : place.start + place.size] = value.to_bytes(place.size, "little")
        names.append(f"{place.what} {old} is {value}")
    return ", ".join(names), bytes(content)


def any_bytes(good: bytes, places: list[Place], rng: random.Random) -> tuple[str, bytes]:
    content = bytearray(good)
    for _ in range(rng.choice((1, 3, 16))):
        content[rng.randrange(header_end(places))] = rng.choice(
            (0, 1, 8, 9, 255, rng.randrange(256))
        )
    return "bytes", bytes(content)


def cut(good: bytes, places: list[Place], rng: random.Random) -> tuple[str, bytes]:
    length = rng.choice((rng.randrange(header_end(places)), rng.randrange(len(good))))
    return f"cut to {length}", good[:length]


def doubled(good: bytes, places: list[Place], rng: random.Random) -> tuple[str, bytes]:
    """One of the pairs or tensors a second time, and counted."""
    what = rng.choice(("pair", "tensor"))
    start, end = rng.choice(entries(places, what))
    content = good[:start] + good[start:end] + good[start:]
    return f"{what} at {start} doubled", one_more(content, places, what)


def retyped(good: bytes, places: list[Place], rng: random.Random) -> tuple[str, bytes]:
    """A value of another type, well formed."""
    start, end = rng.choice(entries(places, "pair"))
    length = int.from_bytes(good[start : start + 8], "little")
    key = good[start + 8 : start + 8 + length].decode()
    label, value = rng.choice(list(VALUES.items()))
    head = start + 8 + length
    return f"{key} is {label}", good[:head] + value + good[end:]


def entries(places: list[Place], what: str) -> list[tuple[int, int]]:
    """Where the pairs or the tensors begin and end."""
    starts = [place.start for place in places if place.what == f"{what} name's length"]
    count = len(starts)
    later = [place.start for place in places if place.what == "tensor name's length"]
    ends = [*starts[1:], later[0] if what == "pair" else header_end(places)]
    return list(zip(starts, ends[:count], strict=True))


def one_more(content: bytes, places: list[Place], what: str) -> bytes:
    """With another pair or tensor counted."""
    start = next(place.start for place in places if place.what == f"{what} count")
    number = int.from_bytes(content[start : start + 8], "little") + 1
    return content[:start] + number.to_bytes(8, "little") + content[start + 8 :]


def inserted(good: bytes, places: list[Place], rng: random.Random) -> tuple[str, bytes]:
    """A pair more: lists in lists, a list of very many, a string that is longer than the file."""
    name, value = rng.choice(
        [
            ("lists in lists", struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 10_000),
            ("a list of many", struct.pack("<IIQ", ARRAY, 0, 2**60)),
            ("a list of strings", struct.pack("<IIQ", ARRAY, STRING, 2**31)),
            ("a long string", struct.pack("<IQ", STRING, 2**60)),
            ("an alignment of 0", struct.pack("<II", 4, 0)),
            ("an alignment of 2**31", struct.pack("<II", 4, 2**31)),
            ("an alignment of a string", struct.pack("<IQ", STRING, 1) + b"x"),
        ]
    )
    key = b"general.alignment" if "alignment" in name else b"a.key"
    pair = struct.pack("<Q", len(key)) + key + value
    first, _ = entries(places, "pair")[0]
    return name, one_more(good[:first] + pair + good[first:], places, "pair")


def header_end(places: list[Place]) -> int:
    return max(place.start + place.size for place in places)


class Walk:
    """Where the numbers of a whole file's header are."""

    def __init__(self, content: bytes) -> None:
        self.content, self.offset, self.places = content, 4, []
        self.number("version", 4)
        tensors, pairs = self.number("tensor count", 8), self.number("pair count", 8)
        for _ in range(pairs):
            name = self.string("pair name")
            self.value(name, self.number(f"type of {name}", 4))
        for _ in range(tensors):
            name = self.string("tensor name")
            for i in range(self.number(f"dimensions of {name}", 4)):
                self.number(f"dimension {i} of {name}", 8)
            self.number(f"type of {name}", 4)
            self.number(f"offset of {name}", 8)

    places: list[Place]

    def number(self, what: str, size: int) -> int:
        self.places.append(Place(what, self.offset, size))
        self.offset += size
        return int.from_bytes(self.content[self.offset - size : self.offset], "little")

    def string(self, what: str) -> str:
        length = self.number(f"{what}'s length", 8)
        self.offset += length
        return self.content[self.offset - length : self.offset].decode()

    def value(self, name: str, kind: int) -> None:
        if kind == STRING:
            self.string(name)
        elif kind == ARRAY:
            item, count = self.number(f"items of {name}", 4), self.number(f"length of {name}", 8)
            for i in range(count):
                self.value(f"{name}[{i}]", item)
        else:
            self.number(name, NUMBERS[kind])


def write_good(path: Path) -> bytes:
    """A whole model of forty tokens, some of its weights quantised."""
    import gguf
    import numpy as np
    from gguf.quants import quantize

    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(8)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(2.0)
    writer.add_rope_scaling_orig_ctx_len(64)
    writer.add_sliding_window(32)
    tokens = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)
    for name, shape in shapes().items():
        tensor = rng.standard_normal(shape, dtype=np.float32)
        if "ffn" in name and len(shape) == 2:
            type_ = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(tensor, type_), raw_dtype=type_)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def shapes() -> dict[str, tuple[int, ...]]:
    every: dict[str, tuple[int, ...]] = {"token_embd.weight": (40, 32), "output_norm.weight": (32,)}
    for layer in ("blk.0", "blk.1"):
        every |= {f"{layer}.{name}_norm.weight": (32,) for name in ("attn", "ffn")}
        for name, rows in (("q", 32), ("k", 16), ("v", 16)):
            every |= {
                f"{layer}.attn_{name}.weight": (rows, 32),
                f"{layer}.attn_{name}.bias": (rows,),
            }
        every |= {f"{layer}.attn_output.weight": (32, 32), f"{layer}.ffn_down.weight": (32, 64)}
        every |= {f"{layer}.ffn_{name}.weight": (64, 32) for name in ("gate", "up")}
    return every


def play(content: bytes, folder: Path) -> None:
    import torch

    from quire.models.source import build_model, open_model

    path = folder / "x.gguf"
    path.write_bytes(content)
    source = open_model(str(path))
    tokenizer = source.tokenizer()
    if tokenizer is not None:
        ids: list[Any] = tokenizer.encode("ab aaaa c")
        tokenizer.decode(ids)
    build_model(source, torch.float32, torch.device("cpu"), progress=False)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(partial(cases, write_good(Path(scratch) / "good.gguf")), Path(scratch))
