"""Kernels that start before the previous kernel of their stream has ended (programmatic dependent launch, on Hopper and later).

A step of a decoder is a chain of more than a hundred kernels of 2 to 5 µs each. About a microsecond passes between the end of
one kernel and the first load of the next. A kernel that is launched with `dependent(…)` calls

    start_next(DEPENDENT)            allows the next kernel to start as soon as there is room
    …                                may load weights, which no kernel of the chain writes
    wait_for_previous(DEPENDENT)     waits until the previous kernel has ended, and its results are visible
    …                                reads the results of earlier kernels, and writes its own

Each kernel waits before it ends. So if a kernel of the chain has ended, all kernels before it have ended too.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from .gpu import capability
from .scratch import TensorLike

MOST_ROWS = 64  # with more rows, the start of a kernel is a small part of its time


@triton.jit
def start_next(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


def dependent(x: TensorLike, rows: int) -> dict[str, bool]:
    """The constants and options of a launch that say whether the kernel may start before the previous one has ended."""
    if x.device.type != "cuda" or rows > MOST_ROWS or capability(x.device) < (9, 0):
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}
