"""Stochastic rounding of float32 to bfloat16, by random bits that are a pure function of (seed, step, stream, element).

    r(x) = the bfloat16 below x in magnitude, or the one above: above with probability (|x| − below) / (above − below)

A bfloat16 is the upper half of a float32. So r adds 16 random bits to the bits of x, and clears the lower half. The mean of
r(x) is x. A bfloat16, a NaN and an infinity do not change. A finite x above the largest bfloat16 becomes the largest bfloat16,
not infinity.

    word(i) = word i mod 4 of Philox4×32-10(counter = (i div 4 mod 2³², i div 2³⁴, step, stream), key = seed)

i is the number of the element among all parameters in a run of one process. So the bits do not depend on ranks, shards or
buckets.

    stream     MOMENTS                        PARAMETERS
    bits       low half: m, high half: v      low half: the parameter
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .philox import Keys, philox
from .scratch import Scratch, Shapes

MOMENTS, PARAMETERS = 0x4D4F4D53, 0x50415253  # the last word of the counter; no other draw with the run's seed has it
HALF = 16
_LARGEST, _INFINITY, _NAN = 0x7F7F0000, 0x7F800000, 0x7FC00000  # bits of float32; _LARGEST is the largest bfloat16
_SIZE, _UPPER = 0x7FFFFFFF, -0x10000


class Place(NamedTuple):
    """From `start` to the next place, the elements of a range have the numbers element, element + 1, …"""

    start: int
    element: int


Places = tuple[Place, ...]


def rounding_workspace(elements: int) -> Shapes:
    """Name → (shape, dtype) of the scratch. `elements`, a multiple of 4, is how many are rounded at once."""
    return {
        "philox": ((6, elements // 4), torch.int64),
        "bits": ((elements,), torch.int32),
        "size": ((elements,), torch.int32),
        "special": ((elements,), torch.bool),
    }


def draw_words(first: int, n: int, step: Tensor, stream: int, keys: Keys, *, scratch: Scratch) -> list[Tensor]:
    """The words of n elements from number `first` on, a multiple of 4. Tensor k has the words of elements 4j + k, in int64."""
    quads = -(-n // 4)
    c0, c1, c2, c3, low, high = (x[:quads] for x in scratch["philox"])
    torch.arange(first // 4, first // 4 + quads, out=low)
    torch.bitwise_and(low, 0xFFFFFFFF, out=c0)
    torch.bitwise_right_shift(low, 32, out=c1)
    c2.copy_(step)
    c3.fill_(stream)
    philox((c0, c1, c2, c3), keys, (low, high))
    return [c0, c1, c2, c3]


def round_stochastic(x: Tensor, words: Sequence[Tensor], shift: int, *, out: Tensor, scratch: Scratch) -> None:
    """out (n,) bfloat16 = r(x), with the 16 bits of `words` from bit `shift` on. x (n,) float32 is overwritten."""
    n, quads = x.shape[0], words[0].shape[0]
    bits, size, special = scratch["bits"][: 4 * quads], scratch["size"][:n], scratch["special"][:n]
    high = scratch["philox"][5][:quads]
    for k, word in enumerate(words):
        torch.bitwise_right_shift(word, shift, out=high)
        bits.view(quads, 4)[:, k].copy_(high.bitwise_and_(0xFFFF))
    x_bits, bits = x.view(torch.int32), bits[:n]
    torch.bitwise_and(x_bits, _SIZE, out=size)
    bits.masked_fill_(torch.gt(size, _LARGEST, out=special), 0)
    bits.add_(x_bits).bitwise_and_(_UPPER)
    bits.masked_fill_(torch.gt(size, _INFINITY, out=special), _NAN)
    x_bits.copy_(bits)
    out.copy_(x)
