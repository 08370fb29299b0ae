"""Tiles of GGUF's types on their way: copied to shared memory some steps ahead, then unpacked.

A step's tiles, one for each warp, are one of each of several blocks of 16 rows, one below another.
Threads read words of codes that others copied: `ring_places.py` says which, and
`ring_instructions.py` what becomes of them. In registers, tensors have the dimensions
`[tile, half, g, f, k8, t1, t0, pair]`, those that all share being 1. In Gluon, which cannot be
interpreted.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from quire.kernels.triton.gguf import ring_instructions, ring_places
from quire.kernels.triton.gguf.unpack import BYTES, EXPONENTS, HALVES
from quire.kernels.triton.gluon_names import copy_async

TILES: gl.constexpr = gl.constexpr(4)  # of a step
_FIRST: gl.constexpr = gl.constexpr(2.0**23)  # from here on float32 has whole numbers alone
_FIRST_BITS: gl.constexpr = gl.constexpr(0x4B000000)


@gluon.jit
def make_ring(STEPS: gl.constexpr, matrix, SETTINGS: gl.constexpr):
    """Shared memory for so many steps: codes, their upper bits, scales, those that tiles share."""
    groups: gl.constexpr = 128 // SETTINGS.group
    scale_type: gl.constexpr = gl.int32 if SETTINGS.scale_bytes == 4 else gl.int16
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    codes = _room_for(STEPS, SETTINGS.bits)
    upper = codes
    if SETTINGS.upper:
        upper = _room_for(STEPS, SETTINGS.upper)
    scales = gl.allocate_shared_memory(
        scale_type, [STEPS, TILES, groups, 8 * SETTINGS.scale_words], plain
    )
    wide = scales
    if SETTINGS.has_wide:
        wide = gl.allocate_shared_memory(gl.int32, [STEPS, TILES, 8 * SETTINGS.wide_words], flat)
    return codes, upper, scales, wide


@gluon.jit
def _room_for(STEPS: gl.constexpr, BITS: gl.constexpr):
    rows: gl.constexpr = _rows(BITS)
    swapped: gl.constexpr = gl.SwizzledSharedLayout(4, 1, min(rows, 8), [2, 1, 0])
    return gl.allocate_shared_memory(gl.int32, [STEPS, TILES, rows, 32], swapped)


@gluon.jit
def fetch(
    ring,
    matrix,
    step,
    block,
    tile,
    last_tile,
    blocks,
    columns,
    SETTINGS: gl.constexpr,
):
    """Begin to copy a step's tiles: this one of each block from this on."""
    codes, upper, scales, wide = ring
    codes_of, upper_of, scale_of, wide_of = matrix
    slot = step % codes.shape[0]
    tiles = columns // 128
    _fetch_codes(codes.index(slot), codes_of, block, tile, last_tile, blocks, tiles, SETTINGS.bits)
    if SETTINGS.upper:
        _fetch_codes(
            upper.index(slot), upper_of, block, tile, last_tile, blocks, tiles, SETTINGS.upper
        )
    _fetch_scales(scales.index(slot), scale_of, block, tile, last_tile, blocks, tiles)
    if SETTINGS.has_wide:
        _fetch_wide(wide.index(slot), wide_of, block, tile, last_tile, blocks, tiles)
    async_copy.commit_group()


@gluon.jit
def _fetch_codes(to, codes, block, tile, last_tile, blocks, tiles, BITS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 4, 8], [gl.num_warps(), 1, 1], [2, 1, 0])
    rows: gl.constexpr = to.shape[1]
    number = gl.arange(0, TILES, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    row = gl.arange(0, rows, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    place = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    places: gl.constexpr = ring_places.row_bits(BITS)
    row_of_tile = row * 0
    for bit in gl.static_range(len(places)):
        row_of_tile += ((row >> bit) & 1) << places[bit]
    start = _number_of_tile(number, block, tile, blocks, tiles) * (rows * 32)
    source = codes.to(gl.pointer_type(gl.int32)) + start[:, None, None]
    source += row_of_tile[None, :, None] * 32 + place[None, None, :]
    live = tile + number * 0 < last_tile
    copy_async(to, source, mask=live[:, None, None], eviction_policy="evict_first")


@gluon.jit
def _fetch_scales(to, scale, block, tile, last_tile, blocks, tiles):
    groups: gl.constexpr = to.shape[1]
    width: gl.constexpr = to.shape[2]
    vector: gl.constexpr = 16 // (to.dtype.primitive_bitwidth // 8)
    lanes: gl.constexpr = width // vector
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 1, vector], [1, 32 // lanes, lanes], [gl.num_warps(), 1, 1], [2, 1, 0]
    )
    number = gl.arange(0, TILES, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    group = gl.arange(0, groups, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    place = gl.arange(0, width, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    start = _number_of_tile(number, block, tile, blocks, tiles) * (groups * width)
    source = scale.to(gl.pointer_type(to.dtype)) + start[:, None, None]
    source += group[None, :, None] * width + place[None, None, :]
    live = tile + number * 0 < last_tile
    copy_async(to, source, mask=live[:, None, None])


@gluon.jit
def _fetch_wide(to, wide, block, tile, last_tile, blocks, tiles):
    width: gl.constexpr = to.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    number = gl.arange(0, TILES, layout=gl.SliceLayout(1, layout))
    place = gl.arange(0, width, layout=gl.SliceLayout(0, layout))
    start = (_number_of_tile(number, block, tile, blocks, tiles) >> 1) * width
    source = wide.to(gl.pointer_type(gl.int32)) + start[:, None] + place[None, :]
    live = tile + number * 0 < last_tile
    copy_async(to, source, mask=live[:, None])


@gluon.jit
def _number_of_tile(number, block, tile, blocks, tiles):
    """Those of the last block take the places of others below it: all in memory are numbers."""
    return gl.minimum(block + number, blocks - 1).to(gl.int64) * tiles + tile


@gluon.jit
def take(ring, step, SETTINGS: gl.constexpr):
    """A step's codes, their upper bits, words of scales by chunk, and those that tiles share."""
    codes, upper, scales, wide = ring
    slot = step % codes.shape[0]
    its_codes = _words(codes.index(slot), SETTINGS.bits, SETTINGS.group)
    its_upper = its_codes
    if SETTINGS.bits == 2:
        its_codes = _chosen(its_codes, 2, 0)
    if SETTINGS.upper:
        its_upper = _words(upper.index(slot), SETTINGS.upper, SETTINGS.group)
        its_upper = _chosen(its_upper, SETTINGS.upper, SETTINGS.bits)
    if len(SETTINGS.table) > 0:
        its_codes = _entries(its_codes, SETTINGS)
    at = scales.index(slot)
    its_scales = (
        _scale_words(at, 0, SETTINGS.group, SETTINGS.scale_words),
        _scale_words(at, 1, SETTINGS.group, SETTINGS.scale_words),
        _scale_words(at, 2, SETTINGS.group, SETTINGS.scale_words),
        _scale_words(at, 3, SETTINGS.group, SETTINGS.scale_words),
    )
    its_wide = its_codes
    if SETTINGS.has_wide:
        its_wide = _wide_words(wide.index(slot), SETTINGS.wide_words)
    return its_codes, its_upper, its_scales, its_wide


@gluon.jit
def numbers_of(taken, CHUNK: gl.constexpr, dtype: gl.constexpr, SETTINGS: gl.constexpr):
    """The numbers `[tiles, 16, 32]` of a chunk, where tensor cores take a left factor from."""
    codes, upper, scales, wide = taken
    scale, low = _scales_of(scales[CHUNK], wide, SETTINGS)
    asm: gl.constexpr = _asm(CHUNK, dtype, SETTINGS)
    if SETTINGS.in_bytes:
        found = gl.inline_asm_elementwise(
            asm, "=r,r,r,f,f", [codes, scale], dtype=dtype.value, is_pure=True, pack=2
        )
    elif SETTINGS.upper:
        found = gl.inline_asm_elementwise(
            asm, "=r,r,r,r,r,f,f,f,f", [codes, upper, scale, low],
            dtype=dtype.value, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        found = gl.inline_asm_elementwise(
            asm, "=r,r,r,f,f,f,f", [codes, scale, low], dtype=dtype.value, is_pure=True, pack=2
        )
    return gl.reshape(found, [TILES, 16, 32])


@gluon.jit
def _words(room, BITS: gl.constexpr, GROUP: gl.constexpr):
    """A thread's words of a tile; one of both numbers of a pair is there twice."""
    found = room.load(_words_layout(BITS, GROUP, gl.num_warps()))
    found = gl.reshape(found, _split_shape(BITS).value)
    found = gl.permute(found, _axes(BITS, GROUP).value)
    found = gl.reshape(found, _joined_shape(BITS, GROUP).value)
    if BITS < 8:
        found = gl.join(found, found)
    return gl.convert_layout(found, _layout(gl.num_warps()))


@gluon.jit
def _chosen(words, BITS: gl.constexpr, SHIFT: gl.constexpr):
    """Of words of several pairs, a thread's own of them, so far up in either 16 bits."""
    asm: gl.constexpr = _choosing_asm(BITS, SHIFT)
    t = _numbered(5)
    if BITS == 2:
        which = t * ring_instructions.NEXT_PAIR + ring_instructions.PAIR_BYTES
    else:
        which = t * ring_instructions.NEXT_T + ring_instructions.SINGLE_BYTE
        which += _numbered(0) * ring_instructions.NEXT_HALF
    return gl.inline_asm_elementwise(
        asm, "=r,r,r", [words, which], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _entries(words, SETTINGS: gl.constexpr):
    asm: gl.constexpr = _entries_asm(SETTINGS)
    return gl.inline_asm_elementwise(
        asm, "=&r,=&r,r,r", [words], dtype=gl.int32, is_pure=True, pack=2
    )


@gluon.jit
def _scale_words(room, CHUNK: gl.constexpr, GROUP: gl.constexpr, WORDS: gl.constexpr):
    """Those of a chunk, which has one group or two."""
    groups: gl.constexpr = 32 // GROUP
    warps: gl.constexpr = gl.num_warps()
    part = room.slice(CHUNK * groups, groups, 1)
    found = part.load(_scales_layout(groups, WORDS, warps))
    found = gl.permute(gl.reshape(found, [TILES, groups, 8, WORDS]), [0, 3, 2, 1])
    found = gl.reshape(found, [TILES, WORDS, 8, groups, 1, 1, 1, 1])
    return gl.convert_layout(found, _layout(warps)).to(gl.int32)


@gluon.jit
def _wide_words(room, WORDS: gl.constexpr):
    warps: gl.constexpr = gl.num_warps()
    found = room.load(_wide_layout(WORDS, warps))
    found = gl.permute(gl.reshape(found, [TILES, 8, WORDS]), [0, 2, 1])
    found = gl.reshape(found, [TILES, WORDS, 8, 1, 1, 1, 1, 1])
    return gl.convert_layout(found, _layout(warps))


@gluon.jit
def _scales_of(words, wide, SETTINGS: gl.constexpr):
    """A chunk's scales in float32, and what is added to its codes' products with them."""
    half = _numbered(0)
    if SETTINGS.scales == HALVES:
        scale = _half_of(words, half, 0, SETTINGS.scale_words)
        low = scale
        if SETTINGS.has_lows:
            low = _half_of(words, half, 1, SETTINGS.scale_words)
    elif SETTINGS.scales == EXPONENTS:
        found = (words >> (8 * half)) & 255
        bits = gl.where(found == 0, 0x00400000, found << 23)
        scale = bits.to(gl.float32, bitcast=True) * 0.5
        low = scale
    else:
        if SETTINGS.scales == BYTES:
            size: gl.constexpr = 2 if SETTINGS.has_lows else 1
            scale = _byte_of(words, half * size) - (_FIRST + SETTINGS.scale_zero)
            low = scale
            if SETTINGS.has_lows:
                low = _byte_of(words, half * size + 1) - _FIRST
        else:
            found = words >> (8 * half)
            scale = ((found & 15) | _FIRST_BITS).to(gl.float32, bitcast=True) - _FIRST
            low = (((found >> 4) & 15) | _FIRST_BITS).to(gl.float32, bitcast=True) - _FIRST
        scale *= _half_of(wide, half, 0, SETTINGS.wide_words)
        if SETTINGS.has_lows:
            low *= -_half_of(wide, half, 1, SETTINGS.wide_words)
    excess: gl.constexpr = ring_instructions.IN_BF16 + SETTINGS.zero
    low = low - scale * excess if SETTINGS.has_lows else scale * -excess
    return scale, low


@gluon.jit
def _half_of(words, half, PLACE: gl.constexpr, WORDS: gl.constexpr):
    """A float16: of words of rows g and g + 8 each, that at PLACE; of words of both, either."""
    bits = words >> (16 * PLACE) if WORDS == 2 else words >> (16 * half)
    return bits.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def _byte_of(words, place):
    """As the last bits of a float32, `_FIRST` and that number."""
    which = place + ring_instructions.FLOAT_BYTE
    asm: gl.constexpr = ring_instructions.BYTE_AS_FLOAT
    bits = gl.inline_asm_elementwise(
        asm, "=r,r,r", [words, which], dtype=gl.int32, is_pure=True, pack=1
    )
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _numbered(AXIS: gl.constexpr):
    """0 and 1 along this one of `ring_places.AXES`, which is half or t0."""
    warps: gl.constexpr = gl.num_warps()
    found = gl.arange(0, 2, layout=_two_layout(AXIS, warps))
    return gl.convert_layout(gl.reshape(found, _two_shape(AXIS).value), _layout(warps))


@gluon.constexpr_function
def _asm(chunk, dtype, settings):
    kind = "f16" if dtype == gl.float16 else "bf16"
    if settings.in_bytes:
        return ring_instructions.of_bytes(chunk, kind)
    return ring_instructions.of_codes(chunk, settings.bits, settings.upper, kind)


@gluon.constexpr_function
def _choosing_asm(bits, shift):
    chosen = ring_instructions.chosen_pair if bits == 2 else ring_instructions.chosen_bits
    return chosen(shift)


@gluon.constexpr_function
def _entries_asm(settings):
    return ring_instructions.entries(settings.table)


@gluon.constexpr_function
def _rows(bits):
    return ring_places.words_of(bits) // 32


@gluon.constexpr_function
def _split_shape(bits):
    return [TILES, *ring_places.split_shape(bits)]


@gluon.constexpr_function
def _axes(bits, group):
    return [0, *(1 + axis for axis in ring_places.axes(bits, group))]


@gluon.constexpr_function
def _joined_shape(bits, group):
    shape = [TILES, *ring_places.joined_shape(bits, group)]
    return shape if bits == 8 else shape[:-1]


@gluon.constexpr_function
def _layout(warps):
    """Thread `4 g + t` has `[half, f, k8, pair]`, in the order of a left factor."""
    return gl.BlockedLayout(
        [1, 2, 1, 2, 2, 1, 1, 2],
        [1, 1, 8, 1, 1, 2, 2, 1],
        [warps, 1, 1, 1, 1, 1, 1, 1],
        [7, 1, 4, 3, 6, 5, 2, 0],
    )


@gluon.constexpr_function
def _words_layout(bits, group, warps):
    registers = ring_places.bases(ring_places.register_names(bits, group), bits, group)
    lanes = ring_places.bases(ring_places.LANES.value, bits, group)
    return gl.DistributedLinearLayout(
        [[0, *basis] for basis in registers],
        [[0, *basis] for basis in lanes],
        _warp_bases(warps, 3),
        [],
        [warps, ring_places.words_of(bits) // 32, 32],
    )


@gluon.constexpr_function
def _scales_layout(groups, words, warps):
    registers = [[0, 0, 1]] * (words == 2) + [[0, 1, 0]] * (groups == 2)
    lanes = [[0, 0, 0]] * 2 + [[0, 0, words << i] for i in range(3)]
    shape = [warps, groups, 8 * words]
    return gl.DistributedLinearLayout(registers, lanes, _warp_bases(warps, 3), [], shape)


@gluon.constexpr_function
def _wide_layout(words, warps):
    registers = [[0, 1]] * (words == 2)
    lanes = [[0, 0]] * 2 + [[0, words << i] for i in range(3)]
    return gl.DistributedLinearLayout(
        registers, lanes, _warp_bases(warps, 2), [], [warps, 8 * words]
    )


@gluon.constexpr_function
def _two_layout(axis, warps):
    name = ring_places.AXES.value[axis]
    registers = [[1]] if name in ring_places.REGISTERS.value else []
    lanes = [[int(name == lane)] for lane in ring_places.LANES.value]
    return gl.DistributedLinearLayout(registers, lanes, [[0]] * (warps.bit_length() - 1), [], [2])


@gluon.constexpr_function
def _two_shape(axis):
    return [2 if i == 1 + axis else 1 for i in range(8)]


@gluon.constexpr_function
def _warp_bases(warps, rank):
    return [[1 << i, *[0] * (rank - 1)] for i in range(warps.bit_length() - 1)]
