"""What an engine gives to the library, checked before a byte moves.

A wrong block id, a pool of another type or a token that does not fit would not fail by itself: it
would keep, or bring back, the bytes of something else.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Integral, Real
from threading import TIMEOUT_MAX
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.checks import INT32_MAX, shown
from quire.errors import ConfigError, KVError

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]


def check_images(images: Tensor, image_bytes: Sequence[int]) -> None:
    """Whether `images` can be a pool: `[num_blocks, block_bytes]` of bytes, a row a block."""
    if not isinstance(images, Tensor):
        raise ConfigError(f"A pool of images is over a tensor, not a {type(images).__name__}.")
    check_device(images.device)
    if images.dtype != torch.uint8 or images.dim() != 2:
        raise ConfigError(
            f"A pool of images is bytes of two dimensions, [num_blocks, block_bytes], not "
            f"{images.dtype} {list(images.shape)}; give kv.view(num_blocks, -1).view(torch.uint8)."
        )
    num_blocks, block_bytes = images.shape
    if not num_blocks or not block_bytes:
        raise ConfigError(f"A pool of shape {list(images.shape)} holds nothing; make it larger.")
    is_spread = num_blocks > 1 and images.stride(0) < block_bytes
    if is_spread or (block_bytes > 1 and images.stride(1) != 1):
        raise ConfigError(
            f"The bytes of a block stand side by side and apart from other blocks; strides of "
            f"{list(images.stride())} do not; give a pool that is contiguous in each block."
        )
    if not isinstance(image_bytes, Sequence) or not all(
        isinstance(size, Integral) for size in image_bytes
    ):
        raise ConfigError(
            f"image_bytes is a list of sizes, one for each KV group, not {shown(image_bytes)}."
        )
    for size in image_bytes:
        if not 0 < size <= block_bytes:
            raise ConfigError(
                f"An image of {size:,} bytes does not fit blocks of {block_bytes:,}; give sizes "
                "from 1 to that."
            )


def check_device(device: torch.device) -> None:
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"Blocks on {device.type} cannot be copied; give a pool over memory of a CPU or of a "
            "CUDA device."
        )


def checked_blocks(blocks: Sequence[Any], num_blocks: int) -> list[int]:
    """Ids of blocks of a pool of `num_blocks`, each of them once."""
    try:
        ids = list(map(operator.index, blocks))
    except TypeError:
        raise KVError(f"Block ids are whole numbers, not {shown(blocks)}.") from None
    if ids:
        low, high = min(ids), max(ids)
        if low < 0 or high >= num_blocks:
            wrong = low if low < 0 else high
            raise KVError(
                f"There is no block {wrong}: give ids of the pool, which has 0 to {num_blocks - 1}."
            )
        if len(set(ids)) < len(ids):
            twice = next(block for block in ids if ids.count(block) > 1)
            raise KVError(f"Block {twice} is given twice: each holds the KV of its own tokens.")
    return ids


def count_of(blocks: Sequence[Any]) -> int:
    """How many block ids, or rows of slots, were given."""
    try:
        return len(blocks[:])  # sets have a length, too, but no order
    except (TypeError, LookupError):
        raise KVError(f"Blocks are given as a list of ids, not as {shown(blocks)}.") from None


def lengths_of(tables: Sequence[Sequence[Any]]) -> list[int]:
    """How many block ids each table has."""
    try:
        return [len(table[:]) for table in tables]
    except (TypeError, LookupError):
        raise KVError(
            f"Tables are a list of block ids for each KV group, not {shown(tables)}."
        ) from None


def check_tables_of_hit(tables: Sequence[Sequence[Any]], hit: int, needed: Sequence[int]) -> None:
    """Whether there is a table for each group, of all blocks of the hit or of those it needs."""
    lengths = lengths_of(tables)
    if len(lengths) != len(needed) or any(
        length not in (hit, least) for length, least in zip(lengths, needed, strict=True)
    ):
        raise KVError(
            f"Tables of {_in_words(lengths)} blocks cannot take a hit of {hit}; give one for each "
            f"of {len(needed)} KV groups, with {hit} ids or the last {_in_words(needed)}."
        )


def _in_words(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts)) or "no"


def checked_slots(blocks: Sequence[Any], num_slots: int, block_size: int) -> list[tuple[int, ...]]:
    """Rows of token slots of a pool of `num_slots`, one a block, each slot once."""
    rows = np.asarray(blocks)
    if not rows.size:
        return []
    if rows.dtype.kind not in "iu" or rows.ndim != 2 or rows.shape[1] != block_size:
        raise KVError(
            f"A block of a pool of slots is a row of {block_size} slots, not {shown(blocks)}; give "
            f"slots.view(-1, {block_size})."
        )
    low, high = int(rows.min()), int(rows.max())
    if low < 0 or high >= num_slots:
        wrong = low if low < 0 else high
        raise KVError(
            f"There is no slot {wrong}: give slots of the pool, which has 0 to {num_slots - 1}."
        )
    if len(np.unique(rows)) < rows.size:
        raise KVError("A slot is given twice: each holds the KV of its own token.")
    return [tuple(row) for row in rows.tolist()]


def checked_tokens(token_ids: TokenIds) -> npt.NDArray[np.int32]:
    """Token ids as they are hashed: little-endian int32."""
    ids = np.asarray(token_ids)
    if not ids.size and ids.ndim == 1:
        return ids.astype("<i4")
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise KVError(
            f"Token ids are one row of whole numbers, not {shown(token_ids)}; pass a list of int."
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > INT32_MAX:
        wrong = low if low < 0 else high
        raise KVError(f"Token ids are from 0 to {INT32_MAX}, and {wrong} is not one.")
    return ids.astype("<i4")


def check_salt(salt: str) -> None:
    if not isinstance(salt, str):
        raise KVError(f'A salt is text, not {shown(salt)}; without a tenant it is "".')


def check_timeout(seconds: float) -> None:
    if not isinstance(seconds, Real) or not seconds <= TIMEOUT_MAX:  # neither is NaN
        raise KVError(f"A timeout is a number of seconds such as 30, not {shown(seconds)}.")


def check_block_size(block_size: int) -> None:
    if not isinstance(block_size, int) or block_size < 1 or block_size & (block_size - 1):
        raise ConfigError(f"block_size must be a power of two such as 16, not {shown(block_size)}.")
