"""What a line looks like: 16 words of 8 bytes, the last of them the flag."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language.lines import line_elements
from weft.language.portable.words import from_words, to_words

WORDS = tl.constexpr(16)
FLAG = tl.constexpr(15)


@triton.jit
def line_pointers(first, LINES: tl.constexpr):
    """Pointers to all words of lines; that they are aligned is the caller's promise."""
    words = tl.arange(0, LINES)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
    # Said right here: a hint on what another function returns is lost by the inliner.
    return tl.max_contiguous(tl.multiple_of(first + words, (128, 128)), (1, WORDS))


@triton.jit
def is_counted(count, LINES: tl.constexpr):
    """A mask of words: whole lines."""
    row = tl.arange(0, LINES)[:, None]
    return tl.broadcast_to(row < count, (LINES, WORDS))


@triton.jit
def is_flag():
    return tl.arange(0, WORDS)[None, :] == FLAG


@triton.jit
def to_lines(src, flag, count):
    """Values, or what pointers to them lead to, as [lines, 16] words with the flag."""
    if src.dtype.is_ptr():
        at, is_data = line_elements(src.shape[0], src.dtype.element_ty)
        if count is not None:
            is_data = is_data & (tl.arange(0, src.shape[0])[:, None] < count)
        src = tl.load(src, mask=is_data, other=0)
    words = to_words(src, 64).to(tl.int64, bitcast=True)
    return tl.where(is_flag(), flag.to(tl.int64), words)


@triton.jit
def from_lines(words, dtype: tl.constexpr):
    """The data of lines, 0 in place of their flags."""
    return from_words(tl.where(is_flag(), 0, words).to(tl.uint64, bitcast=True), dtype)
