"""`quant_method` compressed-tensors: groups of layers, each with a format of its own.

float-quantized, int-quantized, naive-quantized    weight, weight_scale, weight_zero_point
pack-quantized           weight_packed: words of codes along the inputs; weight_g_idx
nvfp4-pack-quantized     weight_packed, weight_scale (e4m3), weight_global_scale (a divisor)
mxfp4-pack-quantized     weight_packed, weight_scale (exponents)
mixed-precision          each group names one of these
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from quire.checks import shown
from quire.errors import ModelError
from quire.layers.formats import Dense, MatrixFormat
from quire.layers.quantized.fp4 import MXFP4_GROUP, NVFP4_GROUP, Mxfp4, Nvfp4
from quire.layers.quantized.grouped import Grouped
from quire.layers.quantized.matrix import QuantizedFormat
from quire.layers.quantized.scaled import Fp8, Int8, Scaled
from quire.models.checkpoints.json_fields import Raw, flag, mapping, refusal, text
from quire.models.checkpoints.lazy_tensor import LazyTensor
from quire.models.quantization.checkpoint import CheckpointFormats, check_words, matrix_rows
from quire.models.quantization.fp8 import read_block
from quire.models.quantization.groups import read_bits, read_group
from quire.models.quantization.names import REGEX, is_embedding, matches, read_names, spellings
from quire.models.quantization.views import (
    AsBytes,
    UnpackedRows,
    Unsigned,
    is_in_order,
    is_zero,
    row_scales,
    whole,
)

METHOD = "compressed-tensors"
INDEX = ".weight_g_idx"
LINEAR = "Linear"  # the class of layers that targets name
MIXED = "mixed-precision"
PACKED, INTS, FLOATS, NAIVE = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
)
NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
KNOWN = (FLOATS, NAIVE, INTS, PACKED, NVFP4, MXFP4)
MOST_GROUPS = 64


@dataclass(frozen=True)
class TargetedFormat:
    """What the layers that `targets` name are stored as."""

    targets: tuple[str, ...]
    format: QuantizedFormat


def indexed(group: TargetedFormat) -> TargetedFormat:
    assert isinstance(group.format, Grouped)
    return replace(group, format=replace(group.format, by_index=True))


@dataclass(frozen=True)
class CompressedTensors(CheckpointFormats):
    groups: tuple[TargetedFormat, ...] = ()

    def fitted_to(self, tensors: Mapping[str, LazyTensor]) -> CompressedTensors:
        """An index counts even where the config does not announce it by `actorder`."""
        fitted = super().fitted_to(tensors)
        unannounced: set[MatrixFormat] = set()
        for name, tensor in tensors.items():
            found = fitted.of(name.removesuffix(INDEX)) if name.endswith(INDEX) else None
            if not isinstance(found, Grouped) or found.by_index or found in unannounced:
                continue
            if not is_in_order(tensor, found.group):
                unannounced.add(found)
        groups = (
            indexed(group) if fitted._with_scales(group.format) in unannounced else group
            for group in self.groups
        )
        return replace(fitted, groups=tuple(groups))

    def format_of(self, *names: str) -> MatrixFormat:
        """By name before pattern before class, and by the first in the alphabet of those that
        match, as the library that writes them does; what no group names is dense."""
        full = spellings(names)
        for target, group in self._by_target:
            if any(matches(target, name) for name in full):
                return self._with_scales(group.format)
        for group in self.groups:
            if LINEAR in group.targets and not is_embedding(names):
                return self._with_scales(group.format)
        return Dense()

    @cached_property
    def _by_target(self) -> list[tuple[str, TargetedFormat]]:
        """Names before patterns."""
        pairs = [(target, group) for group in self.groups for target in group.targets]
        named = [pair for pair in pairs if pair[0] != LINEAR]
        return sorted(named, key=lambda pair: (is_pattern(pair[0]), pair[0]))

    def _with_scales(self, found: QuantizedFormat) -> QuantizedFormat:
        if isinstance(found, Grouped):
            return replace(found, scale_dtype=self.scale_dtype)
        return found

    def is_quantised(self, of_layer: Mapping[str, LazyTensor]) -> bool:
        return "weight_scale" in of_layer

    def layer(self, name: str, tensors: Mapping[str, LazyTensor]) -> Mapping[str, LazyTensor]:
        stored_as = self.of(name)
        stored = dict(tensors)
        shape = stored.pop("weight_shape", None)
        codes = "weight_packed" if "weight_packed" in stored else "weight"
        if codes not in stored or not isinstance(stored_as, QuantizedFormat):
            return stored
        rows = matrix_rows(f"{name}.{codes}", stored[codes])
        weight, scales = stored.pop(codes), stored.pop("weight_scale")
        zeros = stored.pop("weight_zero_point", None)
        index = stored.pop("weight_g_idx", None)
        if index is not None:
            inputs = num_inputs(name, codes, weight, shape, stored_as)
            check_length(f"{name}.weight_g_idx", index, codes, inputs)
        if not (isinstance(stored_as, Grouped) and stored_as.by_index):
            refuse_order(f"{name}.weight_g_idx", index, scales)
        if not (isinstance(stored_as, Grouped) and stored_as.has_zeros):
            refuse_zeros(f"{name}.weight_zero_point", zeros)
        if isinstance(stored_as, Nvfp4) and "weight_global_scale" in stored:
            over_all = row_scales(stored.pop("weight_global_scale"), rows, inverted=True)
            stored["weight_scale_over_all"] = over_all
        if isinstance(stored_as, Mxfp4 | Nvfp4):
            return {"weight": weight, "weight_scale": scales, **stored}
        if isinstance(stored_as, Grouped):
            is_packed = codes == "weight_packed"
            for end, each in ((codes, weight), ("weight_zero_point", zeros)):
                if is_packed and each is not None:
                    check_words(f"{name}.{end}", each)
            if is_packed:
                weight = codes_of_words(f"{name}.weight_shape", weight, shape, stored_as)
            else:
                weight = Unsigned(weight)
            if stored_as.has_zeros and zeros is not None:
                bits = stored_as.bits
                zeros = UnpackedRows(zeros, rows, bits) if is_packed else Unsigned(zeros)
                stored["weight_zero"] = zeros
            if stored_as.by_index and index is not None:
                stored["g_idx"] = index
        in_rows = not isinstance(stored_as, Scaled) or stored_as.block is None
        scales = row_scales(scales, rows) if in_rows else scales
        return {"weight": weight, "weight_scale": scales, **stored}


def codes_of_words(
    name: str, words: LazyTensor, shape: LazyTensor | None, kind: Grouped
) -> LazyTensor:
    """Without what fills up the last word of a row, which `weight_shape` tells."""
    may_be_filled = kind.group is None or kind.group % (32 // kind.bits)
    if not may_be_filled:
        return AsBytes(words)
    columns = columns_of_words(name, words, shape, kind)
    return AsBytes(words, -(-columns * kind.bits // 8))


def columns_of_words(name: str, words: LazyTensor, shape: LazyTensor | None, kind: Grouped) -> int:
    """As `weight_shape` tells, unless the words are those of another matrix."""
    per_word = 32 // kind.bits
    filled = words.shape[1] * per_word
    if shape is None or tuple(shape.shape) != (2,):
        return filled
    if shape.dtype.is_floating_point:
        raise ModelError(f"{name} is not two sizes: download the model again.")
    columns = int(whole(shape)[1])
    return columns if -(-columns // per_word) == words.shape[1] else filled


def num_inputs(
    name: str, codes: str, stored: LazyTensor, shape: LazyTensor | None, kind: QuantizedFormat
) -> int:
    """How many inputs the codes of a layer are for."""
    if isinstance(kind, Mxfp4 | Nvfp4):
        return 2 * stored.shape[1]
    if isinstance(kind, Grouped) and codes == "weight_packed":
        return columns_of_words(f"{name}.weight_shape", stored, shape, kind)
    return stored.shape[1]


def check_length(name: str, index: LazyTensor, codes: str, inputs: int) -> None:
    """Refuse an index of other inputs than the codes'. Loading would not find it: an index that is
    in order is never loaded."""
    if tuple(index.shape) != (inputs,):
        raise ModelError(
            f"{name} is {list(index.shape[:4])}, and {codes} has {inputs} inputs: download the "
            f"model again."
        )


def refuse_order(name: str, index: LazyTensor | None, scales: LazyTensor) -> None:
    """Refuse an index, where none is used, unless it says nothing."""
    if index is None:
        return
    groups = scales.shape[1] if len(scales.shape) == 2 else 1
    if not is_in_order(index, -(-index.shape[0] // max(1, groups))):
        raise ModelError(
            f"{name} has inputs in groups out of order, which Quire reads of integers in groups "
            f"alone: choose a model without it."
        )


def refuse_zeros(name: str, zeros: LazyTensor | None) -> None:
    """Refuse zero points, where none are used, unless all are zero."""
    if zeros is not None and not is_zero(zeros):
        raise ModelError(
            f"{name} has zero points where the model's config says that there are none: download "
            f"the model again, or say symmetric=false in its quantization_config."
        )


def is_pattern(target: str) -> bool:
    return target.startswith(REGEX)


def read_compressed_tensors(raw: Raw) -> CompressedTensors:
    for key in ("sparsity_config", "transform_config"):
        refuse_transformed(key, raw.get(key))
    groups = mapping(raw, "config_groups")
    if len(groups) > MOST_GROUPS:
        raise refusal("quantization_config.config_groups", groups, "a few groups of layers")
    written_as = text(raw, "format")
    found = [read_config_group(mapping(groups, key), written_as) for key in groups]
    kept = tuple(group for group in found if group is not None)
    return CompressedTensors(read_names(raw, "ignore"), head=True, groups=kept)


def read_config_group(raw: Raw, written_as: str | None) -> TargetedFormat | None:
    """None of a group without weights: what is quantised of an attention is its KV."""
    if raw.get("weights") is None:
        return None
    own = text(raw, "format")
    name = own if own is not None and written_as in (None, MIXED) else written_as
    if name not in KNOWN:
        raise ModelError(
            f"The weights are quantised by {METHOD} in the format {shown(name)}, which Quire does "
            f"not read; it reads {', '.join(KNOWN)}."
        )
    found = read_scheme(name, mapping(raw, "weights"))
    if isinstance(found, Int8):
        found = replace(found, rounds_inputs=has_int8_inputs(raw.get("input_activations")))
    return TargetedFormat(read_names(raw, "targets"), found)


def has_int8_inputs(raw: object) -> bool:
    """Whether the weights were made for activations in int8."""
    return isinstance(raw, Mapping) and (raw.get("type", "int"), raw.get("num_bits")) == ("int", 8)


def read_scheme(name: str, raw: Raw) -> QuantizedFormat:
    """How the weights of a group are quantised."""
    if name == NVFP4:
        read_bits(raw, "num_bits", name, (4,))
        check_group(raw, name, NVFP4_GROUP)
        return Nvfp4()
    if name == MXFP4:
        read_bits(raw, "num_bits", name, (4,))
        check_group(raw, name, MXFP4_GROUP)
        return Mxfp4()
    is_float = text(raw, "type") == "float"
    is_symmetric = flag(raw, "symmetric", True)
    block, group = read_strategy(raw, name)
    if name == PACKED and not is_float:
        bits = read_bits(raw, "num_bits", name)
        by_index = raw.get("actorder") in ("group", "dynamic", True)
        return Grouped(bits=bits, group=group, has_zeros=not is_symmetric, by_index=by_index)
    read_bits(raw, "num_bits", name, (8,) if is_float else (4, 8))  # a byte each, either way
    if is_float and is_symmetric and name in (FLOATS, NAIVE):
        return Fp8(block=block)
    if not is_float and name in (INTS, NAIVE):
        if block is None and is_symmetric:
            return Int8()
        if block is None or group is not None:
            return Grouped(bits=8, group=group, has_zeros=not is_symmetric)
    kind = "floats" if is_float else "integers"
    raise ModelError(
        f"The weights are quantised by {METHOD} in the format {name} to {kind} in a way that Quire "
        f"does not read: choose a model in another format."
    )


def read_strategy(raw: Raw, name: str) -> tuple[tuple[int, int] | None, int | None]:
    """The block and the group that share a scale; with neither, a row has its own."""
    strategy = text(raw, "strategy")
    if strategy is None:
        strategy = "channel" if raw.get("group_size") in (None, -1) else "group"
    if strategy in ("tensor", "channel"):
        return None, None
    if strategy == "block":
        block = read_block(raw, "block_structure")
        if block is None:
            raise refusal("quantization_config.block_structure", None, "two sizes of a block")
        return block, None
    if strategy == "group":
        group = read_group(raw, "group_size")
        return None if group is None else (1, group), group
    raise ModelError(
        f"The weights are quantised by {METHOD} ({name}) with the strategy {shown(strategy)}, "
        f"which Quire does not read; it reads tensor, channel, group and block."
    )


def check_group(raw: Raw, name: str, size: int) -> None:
    if read_group(raw, "group_size", size) != size:
        raise refusal(f"{name}'s group_size", raw.get("group_size"), f"{size}")


def refuse_transformed(key: str, value: Any) -> None:
    """What changes a model's numbers beyond its scales."""
    if not value:
        return
    is_dense = isinstance(value, dict) and value.get("format") in (None, "dense")
    if key != "sparsity_config" or not is_dense:
        raise ModelError(
            f"The model's quantization_config has a {key}, which Quire does not apply: choose a "
            f"model without one."
        )
