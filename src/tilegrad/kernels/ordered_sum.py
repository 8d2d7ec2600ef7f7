"""The sum of partial results, in their order, in Triton.

    total + parts[0] + parts[1] + … + parts[count − 1]

Each addition waits for the one before it, but a load takes far longer than an addition. So the loads of `ahead(count)` parts
start together. Parts after the last are 0, which changes no bit, because a sum that begins with +0 is never −0.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from .gpu import padded

MOST_AHEAD = 16
BLOCK, WARPS = 256, 2  # elements of the sum that a program computes, and its warps


def ahead(count: int) -> int:
    return min(MOST_AHEAD, padded(count))


@triton.jit
def add_parts(total, first_part, stride, count, inside, AHEAD: tl.constexpr):
    """first_part: pointers to the elements of the first part. stride: elements from a part to the next."""
    for first in range(0, count, AHEAD):
        for offset in tl.static_range(AHEAD):
            i = first + offset
            total += tl.load(first_part + tl.cast(i, tl.int64) * stride, inside & (i < count), 0.0)
    return total
