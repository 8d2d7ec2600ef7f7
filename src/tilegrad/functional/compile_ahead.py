"""Compilation of a backward in threads, while its forward compiles.

Triton's passes, LLVM and ptxas release the GIL. `wait` runs before the first use of a backward, and before a fork. A thread
reports no error: if it could not compile a kernel, the backward compiles this kernel again and raises the error.
Triton calls `ast.parse`, which before Python 3.11.8 and 3.12.2 may fail if two threads run it (python/cpython#106905).
Before these versions threads compile nothing.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from ..kernels.attention.api import select
from ..kernels.attention.mask import Mask
from ..kernels.attention.problem import Backward
from ..kernels.scratch import new_scratch

PARSES_IN_THREADS = sys.version_info >= (3, 12, 2) or (3, 11, 8) <= sys.version_info < (3, 12)
_started: set[tuple[object, ...]] = set()
_pool: ThreadPoolExecutor | None = None


def start(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, o: Tensor, lse: Tensor, kernel: str | None, *, deterministic: bool
) -> None:
    """Starts to compile the backward of a call that `hopper` or `triton` runs, once for each set of features. o is passed as
    do, and each input as its own gradient, because the code depends only on dtypes and alignment."""
    global _pool
    if not PARSES_IN_THREADS:
        return
    with_grad = [x if x is not None and x.requires_grad else None for x in (q, k, v, mask.float_bias, mask.sinks)]
    optional = (mask.window, mask.bias, mask.alibi_slopes, mask.sinks, mask.intervals, mask.cu_seqlens_q, *with_grad)
    numbers = (mask.causal, mask.softcap != 0.0, mask.dropout_p != 0.0, deterministic, kernel)
    features = (
        q.device,
        q.dtype,
        q.shape[-1],
        v.shape[-1],
        q.shape[1] == k.shape[1],
        *numbers,
        *(x is None for x in optional),
    )
    if features in _started:
        return
    _started.add(features)
    dq, dk, dv, dbias, dsinks = with_grad
    given = {"o": o, "lse": lse, "do": o, "dq": dq, "dk": dk, "dv": dv, "dbias": dbias, "dsinks": dsinks}
    selection = select(q, k, v, mask, given, kernel, backward=True, deterministic=deterministic)
    if selection.kernel not in ("hopper", "triton"):
        return
    from triton.runtime.driver import driver  # Triton is installed if one of its kernels is selected

    driver.active.get_current_target()  # creates the driver before threads use it
    scratch = new_scratch(selection.scratch, "meta")
    call = Backward(q, k, v, o, lse, o, None, mask, dq, dk, dv, dbias, dsinks, tuple(scratch.values()), deterministic)
    _pool = _pool or ThreadPoolExecutor(thread_name_prefix="tilegrad-compile")
    for job in selection.module.compile_bwd(call, scratch):
        _pool.submit(job)


def wait() -> None:
    """Waits until nothing compiles in a thread, and ends the threads."""
    global _pool
    pool, _pool = _pool, None
    if pool is not None:
        pool.shutdown()


os.register_at_fork(before=wait)
