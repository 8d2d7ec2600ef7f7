"""Dropout in Triton: a program draws the mask of some columns of a row; each number is read and written once.

The kernel reads the seed from memory, so that a captured step draws a new mask each time. A seed passed as an int is first
copied to scratch.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import ceil_div, launch, padded
from ..philox import NO_SEQUENCE, signed, threshold
from ..scratch import Scratch, Shapes, TensorLike

TILE, WARPS = 1024, 4  # TILE: most columns per program


@triton.jit
def _dropout_kernel(
    x, seed,
    y,
    x_n, x_c, y_n, y_c, C, dropped_below, layer_counter, scale,
    NO_SEQUENCE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    c = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = n.to(tl.int64)

    kept = tl.load(x + row * x_n + c * x_c, mask=c < C, other=0.0).to(tl.float32) * scale
    zero = tl.zeros([TILE], tl.uint32)
    word, _, _, _ = tl.philox(
        tl.load(seed),
        c.to(tl.uint32),
        zero + n.to(tl.uint32),
        zero + tl.cast(layer_counter, tl.uint32),
        zero + NO_SEQUENCE,
    )
    kept = tl.where(word >= tl.cast(dropped_below, tl.uint32), kept, 0.0)

    tl.store(y + row * y_n + c * y_c, kept.to(y.dtype.element_ty), mask=c < C)


def workspace(x: TensorLike) -> Shapes:
    return {"seed": ((), torch.int64)}


def fwd(x: Tensor, seed: int | Tensor, dropout_p: float, layer_counter: int, *, y: Tensor, scratch: Scratch) -> None:
    n, c = x.shape
    if isinstance(seed, int):
        seed = scratch["seed"].fill_(signed(seed))
    elif seed.device != x.device:
        seed = scratch["seed"].copy_(seed)
    tile = min(padded(c), TILE)
    numbers = (*x.stride(), *y.stride(), c, threshold(dropout_p), layer_counter, 1.0 / (1.0 - dropout_p))
    constants = {"NO_SEQUENCE": NO_SEQUENCE, "TILE": tile, "num_warps": WARPS}
    launch(_dropout_kernel, (n, ceil_div(c, tile)), x, seed, y, *numbers, **constants)
