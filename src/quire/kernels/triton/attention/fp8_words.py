"""KV in fp8 from its pages straight into the registers that tensor cores take.

A thread loads 16 bytes at a time and turns them into float16 where they are: nothing passes through
shared memory. A product does not mind in which order it sums, so its order follows the loads.

    scores[row, token]    = q[row, dim] · k[dim, token]     thread 4 g + c has token g, and of its
                                                            dims 16 c … and 64 + 16 c …
    sums[dim, row]        = v[dim, token] · w[token, row]   thread 4 g + c has dims 16 g …, of the
                                                            tokens 2 c, 2 c + 1, 2 c + 8, 2 c + 9

Scores come out where weights go in: thread 4 g + c has them of row g and of the tokens whose V it
holds. Words are four bytes, and tiles are made of pieces: 16 tokens in a row of one block.

In Gluon, a language in Triton that says which thread holds what. It cannot be interpreted.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PIECE = 16  # tokens
HEAD_DIM = 128
ROWS = 8  # of q: what tensor cores take on the right
_PIECE: gl.constexpr = gl.constexpr(PIECE)
_ROWS: gl.constexpr = gl.constexpr(ROWS)
_DIMS: gl.constexpr = gl.constexpr(HEAD_DIM)
_WORDS: gl.constexpr = gl.constexpr(HEAD_DIM // 4)

# A word to four numbers.
_FOUR: gl.constexpr = gl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 first, second;
    mov.b32 {low, high}, $4;
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 second, high;
    mov.b32 {$0, $1}, first;
    mov.b32 {$2, $3}, second;
}""")
# Words of two tokens to four numbers of each, the two of a dimension side by side.
_FOUR_OF_TWO: gl.constexpr = gl.constexpr("""{
    .reg .b16 low, high;
    .reg .b32 both, number;
    prmt.b32 both, $8, $9, 0x5140;
    mov.b32 {low, high}, both;
    cvt.rn.f16x2.e4m3x2 number, low;
    mov.b32 {$0, $4}, number;
    cvt.rn.f16x2.e4m3x2 number, high;
    mov.b32 {$1, $5}, number;
    prmt.b32 both, $8, $9, 0x7362;
    mov.b32 {low, high}, both;
    cvt.rn.f16x2.e4m3x2 number, low;
    mov.b32 {$2, $6}, number;
    cvt.rn.f16x2.e4m3x2 number, high;
    mov.b32 {$3, $7}, number;
}""")
_HALF: gl.constexpr = gl.float16


@gluon.constexpr_function
def key_starts(pieces: int) -> Any:
    """Where a thread's first words of K are, `[pieces, 8, 16]`: three more like them follow, half a
    head and half a piece further on."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], *[[1, 0, 0], [2, 0, 0]][: pieces // 2]],
        [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [],
        [],
        [pieces, 8, 16],
    )


@gluon.constexpr_function
def value_starts(pieces: int) -> Any:
    """Where a thread's first words of V are, `[pieces, 4, 32]`, of every other token: three more
    like them follow, a token and half a piece further on."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], *[[1, 0, 0], [2, 0, 0]][: pieces // 2]],
        [[0, 1, 0], [0, 2, 0], [0, 0, 4], [0, 0, 8], [0, 0, 16]],
        [],
        [],
        [pieces, 4, 32],
    )


@gluon.constexpr_function
def value_words(pieces: int) -> Any:
    """Where all words of V are, `[tokens, words]`."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [8, 0], *[[16, 0], [32, 0]][: pieces // 2]],
        [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]],
        [],
        [],
        [pieces * PIECE, HEAD_DIM // 4],
    )


@gluon.constexpr_function
def piece_layout(pieces: int) -> Any:
    """Where numbers of pieces are: every thread has them all."""
    return gl.SliceLayout(1, gl.SliceLayout(2, key_starts(pieces)))


@gluon.constexpr_function
def score_layout(pieces: int) -> Any:
    """Where scores and weights are, `[ROWS, tokens]`."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 8], *[[0, 16], [0, 32]][: pieces // 2]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [],
        [],
        [ROWS, pieces * PIECE],
    )


@gluon.constexpr_function
def pair_layout(pieces: int) -> Any:
    """Where a thread's first scales are, `[1, pieces, 8]`: of two tokens; as many follow, half a
    piece further on."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], *[[0, 1, 0], [0, 2, 0]][: pieces // 2]],
        [[0, 0, 2], [0, 0, 4], [0, 0, 0], [0, 0, 0], [0, 0, 0]],
        [],
        [],
        [1, pieces, 8],
    )


@gluon.constexpr_function
def partial_layout() -> Any:
    """Where each thread's own sum of a row is, `[ROWS, 4]`."""
    return gl.DistributedLinearLayout(
        [], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [], [], [ROWS, 4]
    )


@gluon.constexpr_function
def query_layout() -> Any:
    """Where q is loaded, `[2 * ROWS, HEAD_DIM]`: as K."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 64], [8, 0]],
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [],
        [],
        [2 * ROWS, HEAD_DIM],
    )


@gluon.constexpr_function
def result_layout() -> Any:
    """Where results are, `[ROWS, HEAD_DIM]`: as V."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [1, 0]],
        [[2, 0], [4, 0], [0, 16], [0, 32], [0, 64]],
        [],
        [],
        [ROWS, HEAD_DIM],
    )


@gluon.constexpr_function
def product_layout() -> Any:
    return gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])


@gluon.jit
def query_operand(q):
    """q `[2 * ROWS, HEAD_DIM]` as the left factor of scores."""
    # Halves, threads, words, pairs of a word, and numbers of a pair.
    parts = gl.reshape(q, [2 * _ROWS, 2, 4, 4, 2, 2])
    ordered = gl.reshape(gl.permute(parts, (0, 1, 3, 4, 2, 5)), [2 * _ROWS, _DIMS])
    return gl.convert_layout(
        ordered, gl.DotOperandLayout(0, product_layout(), 2), assert_trivial=True
    )


@gluon.jit
def load_keys(starts, PIECES: gl.constexpr):
    """Words of K of the pieces that start there, `[tokens, words]`. Constants are added last: they
    are part of the instruction, and one address does for four loads."""
    layout: gl.constexpr = key_starts(PIECES)
    each: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    tokens = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(0, layout)))
    words = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    at = (tokens * _WORDS)[:, None] + words[None, :]
    starts = gl.convert_layout(starts, each, assert_trivial=True)[:, None, None] + at[None, :, :]
    a, b = gl.load(starts), gl.load(starts + 16)
    c, d = gl.load(starts + 8 * _WORDS), gl.load(starts + (8 * _WORDS + 16))
    parts = gl.join(gl.join(a, b), gl.join(c, d))
    return gl.reshape(gl.permute(parts, (0, 4, 1, 3, 2)), [PIECES * _PIECE, _WORDS])


@gluon.jit
def load_values(starts, PIECES: gl.constexpr):
    """Words of V, likewise."""
    layout: gl.constexpr = value_starts(PIECES)
    each: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    tokens = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(0, layout)))
    words = gl.arange(0, _WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    at = (tokens * (2 * _WORDS))[:, None] + words[None, :]
    starts = gl.convert_layout(starts, each, assert_trivial=True)[:, None, None] + at[None, :, :]
    a, b = gl.load(starts), gl.load(starts + _WORDS)
    c, d = gl.load(starts + 8 * _WORDS), gl.load(starts + 9 * _WORDS)
    parts = gl.join(gl.join(a, b), gl.join(c, d))
    words = gl.reshape(gl.permute(parts, (0, 4, 1, 3, 2)), [PIECES * _PIECE, _WORDS])
    return gl.convert_layout(words, value_words(PIECES), assert_trivial=True)


@gluon.jit
def load_scales(starts, PIECES: gl.constexpr):
    """Scales `[tokens]` of K or V of the pieces that start there, where scores are."""
    TOKENS: gl.constexpr = PIECES * _PIECE
    layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, pair_layout(PIECES)))
    each: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, pair_layout(PIECES)))
    tokens = gl.arange(0, 8, layout=layout)
    starts = gl.convert_layout(starts, each, assert_trivial=True)[:, None] + tokens[None, :]
    parts = gl.permute(gl.join(gl.load(starts), gl.load(starts + 8)), (0, 2, 1))
    scored: gl.constexpr = gl.SliceLayout(0, score_layout(PIECES))
    return gl.convert_layout(gl.reshape(parts, [TOKENS]), scored, assert_trivial=True)


@gluon.jit
def key_operand(words, PIECES: gl.constexpr):
    """Words of K as the right factor of scores, `[HEAD_DIM, tokens]`."""
    a, b, c, d = gl.inline_asm_elementwise(
        _FOUR,
        "=h,=h,=h,=h,r",
        [words],
        dtype=(_HALF, _HALF, _HALF, _HALF),
        is_pure=True,
        pack=1,
    )
    numbers = gl.join(gl.join(a, b), gl.join(c, d))
    # Tokens; halves, threads, words; the number of a pair, and the pair.
    parts = gl.reshape(numbers, [PIECES * _PIECE, 2, 4, 4, 2, 2])
    ordered = gl.reshape(gl.permute(parts, (1, 3, 5, 2, 4, 0)), [_DIMS, PIECES * _PIECE])
    return gl.convert_layout(
        ordered, gl.DotOperandLayout(1, product_layout(), 2), assert_trivial=True
    )


@gluon.jit
def value_operand(words, PIECES: gl.constexpr):
    """Words of V as the left factor of sums, `[HEAD_DIM, tokens]`."""
    TOKENS: gl.constexpr = PIECES * _PIECE
    pairs = gl.permute(gl.reshape(words, [TOKENS // 2, 2, _WORDS]), (0, 2, 1))
    even, odd = gl.split(pairs)
    a, b, c, d, a2, b2, c2, d2 = gl.inline_asm_elementwise(
        _FOUR_OF_TWO,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [even, odd],
        dtype=(_HALF, _HALF, _HALF, _HALF, _HALF, _HALF, _HALF, _HALF),
        is_pure=True,
        pack=1,
    )
    first, second = gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(a2, b2), gl.join(c2, d2))
    # Pairs of tokens; threads, words; the number of a pair, and the pair; the token.
    parts = gl.reshape(gl.join(first, second), [TOKENS // 2, 8, 4, 2, 2, 2])
    ordered = gl.reshape(gl.permute(parts, (2, 4, 3, 1, 0, 5)), [_DIMS, TOKENS])
    return gl.convert_layout(
        ordered, gl.DotOperandLayout(0, product_layout(), 2), assert_trivial=True
    )


@gluon.jit
def without(words, live, PIECES: gl.constexpr):
    """Words of V, 0 where a token is not live."""
    rows: gl.constexpr = gl.SliceLayout(1, value_words(PIECES))
    return gl.where(gl.convert_layout(live, rows, assert_trivial=True)[:, None], words, 0)


@gluon.jit
def first_rows(scores, PIECES: gl.constexpr):
    """Of scores `[16, tokens]` those that are of a row."""
    TOKENS: gl.constexpr = PIECES * _PIECE
    rows, _ = gl.split(gl.permute(gl.reshape(scores, [2, _ROWS, TOKENS]), (1, 2, 0)))
    return gl.convert_layout(rows, score_layout(PIECES), assert_trivial=True)


@gluon.jit
def weight_operand(weights):
    """Weights `[ROWS, tokens]` as the right factor of sums, `[tokens, ROWS]`."""
    return gl.convert_layout(
        gl.permute(weights.to(_HALF), (1, 0)),
        gl.DotOperandLayout(1, product_layout(), 2),
        assert_trivial=True,
    )


@gluon.jit
def in_order(sums):
    """Sums `[HEAD_DIM, ROWS]` as results `[ROWS, HEAD_DIM]`."""
    parts = gl.reshape(sums, [16, 8, _ROWS])
    ordered = gl.reshape(gl.permute(parts, (2, 1, 0)), [_ROWS, _DIMS])
    return gl.convert_layout(ordered, result_layout(), assert_trivial=True)
