"""Products of tiles of eight tokens with sixteen rows, whose codes were unpacked into memory.

A few steps are unpacked for all tiles, so that nearly all that is left to do are dot products. Of a
step there are

    8 vectors, each with four neighbouring codes of every row │ scales │ minima
"""

from __future__ import annotations

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quire.kernels.numba.code.gguf.dot import bytes_of, register_lanes
from quire.kernels.numba.code.gguf.formats import FORMATS
from quire.kernels.numba.code.gguf.reader import INT64, VECTORS, Step, floats_of, steps_of
from quire.kernels.numba.code.gguf.tile import add_step
from quire.kernels.numba.code.memory import CACHE_LINE, emit_prefetch
from quire.kernels.numba.sizes import LANES, STEP, TILE

PARTS = LANES // register_lanes()  # that sixteen rows are computed in
FETCHING = 4  # tiles at least that share in fetching: one alone would wait for it
UNPACKED_FLOATS = LANES * (VECTORS + 4)  # of a step: codes, two scales, two minima


@intrinsic
def unpack(typing_context, kind, weights, apart, first, end, unpacked):
    """Of some blocks of sixteen rows, what `multiply_unpacked` reads; `apart`: see `tile.py`."""
    format_ = FORMATS[kind.name]

    def generate(context, builder, signature, arguments):
        _, weights, apart, first, end, unpacked = arguments
        for part, number, step in steps_of(builder, format_, weights, apart, first, end):
            vectors = _Vectors(builder, unpacked, number, part)
            for index, vector in enumerate([*step.codes, *step.scales, *step.minima]):
                vectors.store(index, vector)
        return context.get_dummy_value()

    return types.void(kind, weights, apart, types.int64, types.int64, unpacked), generate


@intrinsic
def multiply_unpacked(typing_context, kind, unpacked, x, steps, next_weights, is_all, out):
    """Some steps of sixteen rows with a tile of tokens: added to `out[tokens, 16]`. Beside them
    what is unpacked next is fetched, from `next_weights` on: all of it, or the share of a tile."""
    format_ = FORMATS[kind.name]
    lines, share = lines_of_step(format_)

    def generate(context, builder, signature, arguments):
        _, unpacked, x, steps, next_weights, is_all, out = arguments
        stride = builder.select(is_all, INT64(lines * CACHE_LINE), INT64(share * CACHE_LINE))
        with cgutils.for_range(builder, INT64(PARTS)) as parts:
            places = builder.gep(out, [builder.mul(parts.index, INT64(register_lanes()))])
            with cgutils.for_range(builder, steps) as loop:
                number = builder.add(builder.mul(parts.index, steps), loop.index)
                fetched = builder.gep(next_weights, [builder.mul(number, stride)])
                for line in range(share):
                    emit_prefetch(builder, builder.gep(fetched, [INT64(line * CACHE_LINE)]))
                with builder.if_then(is_all):
                    for line in range(share, lines):
                        emit_prefetch(builder, builder.gep(fetched, [INT64(line * CACHE_LINE)]))
                record = builder.gep(
                    x, [builder.mul(loop.index, INT64(TILE * format_.token_bytes))]
                )
                step = _Vectors(builder, unpacked, loop.index, parts.index).step(format_)
                add_step(builder, format_, step, record, range(TILE), TILE, places)
        return context.get_dummy_value()

    returned = types.void(kind, unpacked, x, types.int64, next_weights, types.boolean, out)
    return returned, generate


@intrinsic
def bytes_of_share(typing_context, kind, steps):
    """How much each of `FETCHING` tiles fetches beside so many steps."""
    _, share = lines_of_step(FORMATS[kind.name])

    def generate(context, builder, signature, arguments):
        return builder.mul(arguments[1], INT64(PARTS * share * CACHE_LINE))

    return types.int64(kind, types.int64), generate


def lines_of_step(format_):
    """Cache lines of a step of a part, and what each of `FETCHING` tiles fetches of them."""
    step_bytes = LANES * format_.block.bytes * STEP // format_.block.values
    lines = -(-step_bytes // PARTS // CACHE_LINE)
    return lines, -(-lines // FETCHING)


class _Vectors:
    """Those of a step, of the rows of a part."""

    def __init__(self, builder, unpacked, number, part):
        self._builder, self._lanes = builder, register_lanes()
        first = builder.mul(number, INT64(UNPACKED_FLOATS))
        first = builder.add(first, builder.mul(part, INT64(self._lanes)))
        self._first = builder.gep(unpacked, [first])

    def store(self, index, vector):
        self._builder.store(vector, self._place(index, vector.type), align=4 * self._lanes)

    def step(self, format_):
        count, floats = format_.scales + format_.minima, floats_of(self._lanes)
        numbers = [self._load(VECTORS + i, floats) for i in range(count)]
        return Step(self, numbers[: format_.scales], numbers[format_.scales :])

    def __getitem__(self, index):
        """Codes, loaded where they are multiplied: beside all sums there is room for a few."""
        return self._load(index, bytes_of(self._lanes))

    def _load(self, index, kind):
        return self._builder.load(self._place(index, kind), align=4 * self._lanes)

    def _place(self, index, kind):
        place = self._builder.gep(self._first, [INT64(LANES * index)])
        return self._builder.bitcast(place, kind.as_pointer())
