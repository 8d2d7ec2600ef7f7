"""Norms in C++ (cpu/csrc/rows/norm_gelu.cpp), in one pass over memory. Torch ops need five to ten passes. dx_sum and the
recomputed y take one more pass each, over data that is in the caches of the processor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..column_sum import cpu as column_sum
from ..cpu.abi import pack_norm
from ..cpu.library import NativeCall, native, run_native
from ..cpu.rows import address, rows, shared
from ..scratch import Scratch, Shapes, TensorLike
from . import Outputs

if TYPE_CHECKING:
    from . import Gradients, Statistics


def workspace(x: TensorLike, *, backward: bool) -> Shapes:
    return {}


def fwd(
    x: Tensor, f: Tensor | None, w: Tensor, b: Tensor | None, eps: float, *, out: Outputs, scratch: Scratch
) -> NativeCall:
    return _normalise(x, f, w, b, eps, out)


def bwd(
    dy: Tensor, x: Tensor, w: Tensor, b: Tensor | None, statistics: Statistics, *, out: Gradients, scratch: Scratch
) -> None:
    (mean, rstd), (dx, dw, db, dx_sum, y, accumulate) = statistics, out
    vectors = map(address, (w, None, mean, rstd, dw, db))
    call = pack_norm(*shared(x, w.dtype, accumulate=accumulate), rows(x), rows(None), rows(dy), rows(dx), *vectors)
    native().tilegrad_native_norm_bwd(call)
    if dx is not None and dx_sum is not None:
        column_sum.fwd(dx, sums=dx_sum, accumulate=accumulate, scratch={})
    if y is not None:
        _normalise(x, None, w, b, 0.0, Outputs(None, y, mean, rstd))


def _normalise(x: Tensor, f: Tensor | None, w: Tensor, b: Tensor | None, eps: float, out: Outputs) -> NativeCall:
    """Writes y, mean and rstd. If eps is 0, mean and rstd are read instead."""
    vectors = map(address, (w, b, out.mean, out.rstd))
    matrices = rows(x), rows(out.y), rows(None), rows(None)
    call = pack_norm(*shared(x, w.dtype), *matrices, *vectors, eps=eps, f=rows(f), x1=rows(out.x1))
    return run_native(native().tilegrad_native_norm_fwd, call)
