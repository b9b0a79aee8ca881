"""For which numbers Triton's front end runs again."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import weft
from weft.emulator.rewriting import Rewrite


@triton.jit
def _fill(out, n, value):
    at = tl.arange(0, 32)
    tl.store(out + at, value, mask=at < n)


class Texts(Rewrite):
    """Which kernels come."""

    def __init__(self):
        self.texts = set()

    def kernel(self, text):
        self.texts.add(text)
        return super().kernel(text)


def texts_for(sizes: list[int]) -> int:
    rewrite = Texts()

    def main():
        for n in sizes:
            out = torch.zeros(33, dtype=torch.int32)
            _fill[(1,)](out[n % 2 :], n, 5)  # every other one begins where no 16 bytes do
            assert out.sum() == 5 * n

    with weft.emulated(ranks=1, rewrite=rewrite) as session:
        session.run(main)
    return len(rewrite.texts)


def test_what_16_divides_is_a_number_like_others():
    """That pointers and numbers are aligned is for machine code alone."""
    assert texts_for([16, 17, 24, 32]) == 1


def test_a_one_is_a_constant():
    """As on GPUs: a kernel may ask for it while it is traced."""
    assert texts_for([16, 1]) == 2
