"""A model out of a GGUF file, its tensors in Hugging Face's names and order.

Converters store the q and k rows of llama-architecture models in another order, with the two
halves of a rotated pair side by side; here they get back the order that Hugging Face has:

    stored   a0 b0 a1 b1 a2 b2        pair i is (a_i, b_i)
    wanted   a0 a1 a2 b0 b1 b2
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.models.gguf_config import ROPE_DIVISORS, architecture_of, read_config
from quire.models.gguf_file import GGUFFile
from quire.models.tokenizer import Tokenizer

PAIRS_SIDE_BY_SIDE = ("llama", "mistral")

TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MOST_THREADS = 8


class GGUFSource:
    """A `ModelSource` over one GGUF file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = GGUFFile(Path(path))
        self._architecture = architecture_of(self._file)
        self.config = read_config(self._file)
        self.fingerprint = f"gguf:{self._file.fingerprint()}"

    def tokenizer(self) -> Tokenizer | None:
        if "tokenizer.ggml.tokens" not in self._file.metadata:
            return None
        return Tokenizer.from_gguf(self._file.metadata)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor in file order; a few are dequantised ahead, by several threads."""
        names = [name for name in self._file.tensors if name != ROPE_DIVISORS]
        threads = min(torch.get_num_threads(), MOST_THREADS)
        ahead: deque[Future[tuple[str, Tensor]]] = deque()
        with ThreadPoolExecutor(threads) as pool:
            for name in names:
                ahead.append(pool.submit(self._tensor, name))
                if len(ahead) > threads:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def _tensor(self, name: str) -> tuple[str, Tensor]:
        tensor = self._file.read(name)
        if self._architecture in PAIRS_SIDE_BY_SIDE:
            if ".attn_q." in name:
                tensor = split_pairs(tensor, self.config.num_heads)
            elif ".attn_k." in name:
                tensor = split_pairs(tensor, self.config.num_kv_heads)
        return hugging_face_name(name), tensor


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`; unknown names stay."""
    stem, _, kind = name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}"
    block, _, part = stem.removeprefix("blk.").partition(".")
    if stem.startswith("blk.") and part in BLOCK_NAMES:
        return f"model.layers.{block}.{BLOCK_NAMES[part]}.{kind}"
    return name


def split_pairs(tensor: Tensor, heads: int) -> Tensor:
    """Undo the converter's order of rows; see the top of this file."""
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise ModelError(
            f"The file has q or k weights of {rows} rows, which {heads} heads cannot share;"
            " convert the model anew."
        )
    pairs = tensor.view(heads, rows // heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(tensor.shape)
