"""What a model is read from, found by name, and the model built from it."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.errors import ConfigError, ModelError
from quire.host_memory import free_host_memory
from quire.layers.linear import lay_out_matrices, store_matrices
from quire.layers.tp import SINGLE, TensorParallel
from quire.layers.weights import make_room, room_needed
from quire.models.causal_lm import CausalLM, CheckpointModel
from quire.models.checkpoints import hub
from quire.models.checkpoints.digest import Fingerprint
from quire.models.checkpoints.dummy import SHAPES, DummySource, fill_at_random
from quire.models.checkpoints.folder import read_config, read_tokenizer
from quire.models.checkpoints.lazy_tensor import LazyTensor
from quire.models.checkpoints.safetensors import FolderSource
from quire.models.checkpoints.weights import check_weights, load_weights
from quire.models.config import ModelConfig, no_mtp
from quire.models.deepseek_mtp import DeepseekMTP
from quire.models.deepseek_v2 import DeepseekConfig
from quire.models.deepseek_v3 import layer_of
from quire.models.hf_config import read_hf_config
from quire.models.quantization.checkpoint import CheckpointFormats
from quire.models.quantization.making import (
    MADE,
    described,
    made_at_random,
    quantized_while_loading,
)
from quire.models.registry import family

if TYPE_CHECKING:
    from quire.models.text.tokenizer import Tokenizer

DEMO = "smollm2"
NUMBERS = "none"  # of `quantization`
WHAT_A_MODEL_IS = (
    f"a model is {DEMO}, a Hugging Face folder, a .gguf file, a name on the Hugging Face Hub such "
    f"as Qwen/Qwen3-0.6B, or with load_format=dummy {' or '.join(SHAPES)}"
)


class TensorSource(Protocol):
    def tensors(self) -> Iterator[tuple[str, LazyTensor]]:
        """The weights by their Hugging Face names; nothing is read before it is asked for."""
        ...


@runtime_checkable
class NamedSource(TensorSource, Protocol):
    """One whose files may have other names than Hugging Face's."""

    def stored_name(self, name: str) -> str:
        """What its files call a tensor."""
        ...


class ModelSource(TensorSource, Protocol):
    """A model before it is built."""

    config: ModelConfig
    fingerprint: Fingerprint  # the same for the same weights and config, wherever they lie

    def tokenizer(self) -> Tokenizer | None: ...


def open_model(
    name: str,
    load_format: str = "auto",
    progress: bool = True,
    *,
    quantization: str | None = None,
    max_len: int | None = None,
    keeps_types: bool = False,
    on_gpu: bool = False,
) -> ModelSource:
    """Find a model: built in, in a folder, in a GGUF file, or on the Hugging Face Hub.

    `quantization`: what its matrices are quantised to while they are loaded; by default, or by
    `auto`, they are as they are stored, and `none` is for numbers alone. `max_len` is that of
    its texts, where it is less than the model was made for. `keeps_types`: matrices of a GGUF file
    stay in their types; else they are dequantised. So do MXFP4 experts, for the same kernels of a
    CPU. `on_gpu`: it is a GPU's kernels that are to multiply them.
    """
    keeps_types = keeps_types and quantization not in MADE
    source = _open(name, load_format, progress, keeps_types, quantization != NUMBERS, on_gpu)
    if max_len is not None:
        source.config = source.config.for_length(max_len)
    if quantization == NUMBERS and isinstance(source.config.formats, CheckpointFormats):
        raise ModelError(
            f"{name} is quantised, so quantization=none cannot be: leave it out, or use the "
            f"model's original weights."
        )
    if quantization in MADE:
        source.config = quantized_while_loading(source.config, name, quantization)
        source.fingerprint = source.fingerprint.variant(described(quantization))
    elif isinstance(source, DummySource):
        source.config = made_at_random(source.config)
    return source


def rounded_twice(source: ModelSource, quantization: str | None) -> str | None:
    """What to say of a file that is rounded already, and whose numbers are rounded once more."""
    if quantization not in MADE:
        return None
    from quire.models.checkpoints.gguf import GGUFSource

    if not isinstance(source, GGUFSource) or not source.quantised_types:
        return None
    types = ", ".join(source.quantised_types)
    return (
        f"The GGUF file's matrices ({types}) are dequantised and rounded once more, to "
        f"{quantization}; weights in 16 bits would lose less."
    )


def _open(
    name: str,
    load_format: str,
    progress: bool,
    keeps_types: bool,
    keeps_codes: bool,
    on_gpu: bool,
) -> ModelSource:
    dummy = load_format == "dummy"
    if name in SHAPES:
        if not dummy:
            raise ModelError(
                f"{name} is a shape without weights, for benchmarks: use load_format=dummy with "
                f"it, or name a model that has some."
            )
        return DummySource(read_hf_config(SHAPES[name]))
    path = find(name, weights=not dummy, progress=progress)
    if path.is_dir():
        if dummy:
            return DummySource(read_config(path), lambda: read_tokenizer(path))
        return FolderSource(path, keeps_types and not on_gpu)
    from quire.models.checkpoints.gguf import GGUFSource

    source = GGUFSource(path, keeps_types and keeps_codes and not dummy, on_gpu)
    return DummySource(source.config, source.tokenizer) if dummy else source


def find(name: str, weights: bool, progress: bool) -> Path:
    """The folder or GGUF file that `name` stands for, fetched if it is not here."""
    if name == DEMO:
        from quire.models.checkpoints import demo

        return demo.fetch(progress)
    path = Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.exists():
        raise ModelError(f"{name} is neither a .gguf file nor a folder: {WHAT_A_MODEL_IS}.")
    if hub.NAME.fullmatch(name):
        return hub.fetch(name, weights, progress)
    near = difflib.get_close_matches(name.lower(), [DEMO, *SHAPES], n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ModelError(f"There is no model {name!r}: {hint}{WHAT_A_MODEL_IS}.")


def build_model(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool = True,
    tp: TensorParallel = SINGLE,
) -> CausalLM:
    """The model with its weights in place, ready to run; of each tensor, only this rank's part."""
    model = shapes(source.config, tp)
    fill_model(model, source, dtype, device, progress)
    return model


def check_mtp(source: ModelSource) -> None:
    """Refuse a checkpoint that lacks the MTP layer which its config counts, as it does unless it
    says otherwise."""
    if isinstance(source, DummySource):
        return
    behind = source.config.num_layers
    if all(layer_of(name) != behind for name, _ in source.tensors()):
        raise no_mtp()


def build_mtp(
    source: ModelSource, dtype: torch.dtype, device: torch.device, progress: bool = True
) -> DeepseekMTP:
    """The MTP layer of a model that has one, ready to run."""
    assert isinstance(source.config, DeepseekConfig)
    with torch.device("meta"):
        model = DeepseekMTP(source.config)
        store_matrices(model, source.config.formats)
    fill_model(model, source, dtype, device, progress)
    return model


def fill_model(
    model: CheckpointModel,
    source: TensorSource | None,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
) -> None:
    """Give a model of `shapes` its memory and its weights; without a source, random ones.

    What is in the files is held against the config before the model gets its memory.
    """
    if source is None or isinstance(source, DummySource):
        take_memory(model, dtype, device)
        fill_at_random(model)
    else:
        stored_name = source.stored_name if isinstance(source, NamedSource) else str
        check_weights(model, source.tensors(), stored_name)
        take_memory(model, dtype, device)
        load_weights(model, source.tensors(), progress)
    with _enough_memory(model, dtype, device):  # one matrix is there twice
        lay_out_matrices(model)
    model.freeze()


def empty_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, tp: TensorParallel = SINGLE
) -> CausalLM:
    """The model with memory for its weights, which hold what was there before."""
    model = shapes(config, tp)
    take_memory(model, dtype, device)
    lay_out_matrices(model)
    return model


def shapes(config: ModelConfig, tp: TensorParallel = SINGLE) -> CausalLM:
    """The model without memory: its weights get theirs once, where they stay."""
    with torch.device("meta"):
        model = family(config.architecture)(config, tp)
        store_matrices(model, config.formats)
    return model


def take_memory(model: CheckpointModel, dtype: torch.dtype, device: torch.device) -> None:
    """Give the weights their memory, unless it is more than the device has."""
    with _enough_memory(model, dtype, device):
        if room_needed(model, dtype) > free_memory(device):
            raise MemoryError
        make_room(model, dtype, device)


@contextmanager
def _enough_memory(
    model: CheckpointModel, dtype: torch.dtype, device: torch.device
) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch raises the latter, on any device
        if not isinstance(error, MemoryError) and "memory" not in str(error):
            raise
        needed, name = room_needed(model, dtype) / 2**30, str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"The model's weights take {needed:,.1f} GiB in {name}, more than is free on "
            f"{device}: choose a smaller model or dtype, or free some memory."
        ) from None


def free_memory(device: torch.device) -> int:
    if device.type == "meta":
        return sys.maxsize
    if device.type != "cuda":
        return free_host_memory()
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def read_whole(source: ModelSource) -> dict[str, Tensor]:
    """All weights of a model in memory, for oracles that build it another way."""
    return {name: tensor[()] for name, tensor in source.tensors()}
