"""A model out of a GGUF file, its tensors in Hugging Face's names and order.

Converters store the q and k rows of llama-architecture models in another order, with the two
halves of a rotated pair side by side; here they get back the order that Hugging Face has:

    stored   a0 b0 a1 b1 a2 b2        pair i is (a_i, b_i)
    wanted   a0 a1 a2 b0 b1 b2
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from quire.checks import shorten
from quire.errors import ModelError
from quire.kernels.gguf_blocks import TYPES
from quire.layers.quantized.gguf import GGUFFormats, keeps_codes_on_gpu, keeps_halves
from quire.layers.quantized.gguf_experts import KEPT
from quire.models.checkpoints.digest import Fingerprint
from quire.models.checkpoints.gguf_config import ROPE_TENSORS, architecture_of, read_config
from quire.models.checkpoints.gguf_file import QUANTISED, GGUFFile
from quire.models.checkpoints.lazy_tensor import LazyTensor
from quire.models.checkpoints.tensor_views import HeadsOfTwo, OneRow, ReorderedRows, Shifted
from quire.models.text.tokenizer import Tokenizer

ENDING = ".weight"
SHARED_GATE = ".ffn_gate_inp_shexp.weight"
# Matrices of layers that take no format: numbers, whatever type the file has them in.
GATES = (".ffn_gate_inp.weight", SHARED_GATE)
OF_EXPERTS = re.compile(rf"(blk\.\d+)\.ffn_(gate|up|down)_exps\{ENDING}")
LATENT_K, LATENT_V = ".attn_k_b.weight", ".attn_v_b.weight"


class GGUFSource:
    """A `ModelSource` over one GGUF file.

    `keeps_types`: matrices stay in the file's types, for a CPU's kernels or (`on_gpu`) for those of
    a GPU; else all is dequantised as it is read.
    """

    def __init__(
        self, path: str | os.PathLike[str], keeps_types: bool = False, on_gpu: bool = False
    ) -> None:
        # All of the file, its tokenizer too, so that no parser decides which bytes count.
        self.fingerprint = Fingerprint("gguf", [Path(path)])
        self._file = GGUFFile(Path(path))
        self._names = architecture_of(self._file)
        self.config = read_config(self._file)
        self._kept = self._types_to_keep(on_gpu) if keeps_types else {}
        if self._kept:
            names = {self._layer(name): kind for name, kind in self._kept.items()}
            self.config = replace(self.config, formats=GGUFFormats.from_types(names, on_gpu))

    def tokenizer(self) -> Tokenizer | None:
        if "tokenizer.ggml.tokens" not in self._file.metadata:
            return None
        return Tokenizer.from_gguf(self._file.metadata)

    @property
    def quantised_types(self) -> list[str]:
        """Those that the matrices between both ends of the model are in."""
        matrices = (info for name, info in self._file.tensors.items() if name.startswith("blk."))
        return sorted({info.type.name for info in matrices if info.type.name in QUANTISED})

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that were read since this source was opened."""
        return self._file.content.bytes_read

    def tensors(self) -> Iterator[tuple[str, LazyTensor]]:
        for name in self._file.tensors:
            if name in ROPE_TENSORS or name.endswith(LATENT_V):
                continue
            if name.endswith(LATENT_K):  # and those of V, which converters keep apart
                tensor = self._latent_heads(name, name.removesuffix(LATENT_K) + LATENT_V)
            else:
                tensor = self._tensor(name)
            yield self._names.hugging_face_name(name), tensor

    def stored_name(self, name: str) -> str:
        return self._names.gguf_name(name)

    def _latent_heads(self, k: str, v: str) -> LazyTensor:
        if v not in self._file.tensors:
            raise ModelError(f"The file has {shorten(k)} and no {shorten(v)}: convert it anew.")
        of_k, of_v = self._file.tensor(k), self._file.tensor(v)
        is_three = len(of_k.shape) == len(of_v.shape) == 3
        if not is_three or of_k.shape[:2] != (of_v.shape[0], of_v.shape[2]):
            raise ModelError(
                f"{shorten(k)} is {list(of_k.shape[:4])} and {shorten(v)} {list(of_v.shape[:4])}, "
                f"which are no two parts of the same heads: convert the model anew."
            )
        return HeadsOfTwo(of_k, of_v)

    def _types_to_keep(self, on_gpu: bool) -> dict[str, str]:
        matrices = {
            name: info
            for name, info in self._file.tensors.items()
            if info.type.name in TYPES
            and len(info.shape) > 1
            and name.endswith(ENDING)
            and not name.endswith((LATENT_K, LATENT_V, *GATES))
        }
        codes = {name for name, info in matrices.items() if TYPES[info.type.name].has_codes}
        if on_gpu:
            types = {name: matrices[name].type.name for name in codes}
            return {name: type_ for name, type_ in types.items() if self._is_for_gpu(name, types)}
        return {
            name: info.type.name
            for name, info in matrices.items()
            if name in codes or keeps_halves(self._layer(name), info.shape, bool(codes))
        }

    def _is_for_gpu(self, name: str, types: Mapping[str, str]) -> bool:
        """Of experts, if all of a layer are: no kernel multiplies codes beside numbers."""
        of_experts = OF_EXPERTS.fullmatch(name)
        if of_experts is None:
            return keeps_codes_on_gpu(self._layer(name), self._file.tensors[name].shape)
        names = (f"{of_experts[1]}.ffn_{each}_exps{ENDING}" for each in ("gate", "up", "down"))
        return all(types.get(each) == KEPT for each in names)

    def _layer(self, name: str) -> str:
        return self._names.hugging_face_name(name).removesuffix(ENDING)

    def _tensor(self, name: str) -> LazyTensor:
        tensor: LazyTensor = (
            self._file.rows(name) if name in self._kept else self._file.tensor(name)
        )
        if name.endswith(SHARED_GATE):  # one row, which converters store as a vector
            return OneRow(tensor) if len(tensor.shape) == 1 else tensor
        if self._names.unit_offset and name.endswith("norm.weight"):
            return Shifted(tensor, -1.0)
        if self._names.pairs_side_by_side:
            if ".attn_q." in name:
                return paired_rows(tensor, self.config.num_heads)
            if ".attn_k." in name:
                return paired_rows(tensor, self.config.num_kv_heads)
        return tensor


def paired_rows(stored: LazyTensor, heads: int) -> LazyTensor:
    """q or k weights in the converter's order of rows, read in ours; see the top of this file."""
    rows = stored.shape[0]
    if rows % (2 * heads):
        raise ModelError(
            f"The file has q or k weights of {rows} rows, which {heads} heads cannot share;"
            " convert the model anew."
        )
    head = rows // heads
    return ReorderedRows(stored, (*range(0, head, 2), *range(1, head, 2)))
