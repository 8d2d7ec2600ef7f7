"""Products of float32 and bfloat16 on a CPU, in C++ and with a fixed order of additions (cpu/csrc/gemm/fixed_order.cpp).

The bits of a row of y depend only on that row of x, on w and on b, because each element of y has a separate register of partial
sums. For up to STREAMED rows, x and w are read in place, and w is read from memory once. More rows are multiplied in panels in
scratch. If x is bfloat16, a float32 w or b is rounded to bfloat16 in registers, as if it had been rounded before the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import check_columns
from ..cpu.abi import pack_fixed_order
from ..cpu.library import NativeCall, isa, native, run_native
from ..cpu.rows import DTYPES, address, rows
from ..scratch import Scratch, Shapes, TensorLike

STREAMED = 12  # most rows that are multiplied without panels
LEAST = 1 << 15  # one more thread is used for each LEAST multiplications


def workspace(x: TensorLike, w: TensorLike, invariant: bool = False, backward: bool = False, *, bias: bool) -> Shapes:
    """Grows with the number of threads."""
    if x.shape[0] <= STREAMED:
        return {}
    floats = native().tilegrad_native_panel_bytes() // 4
    return {"panels": ((torch.get_num_threads(), floats), torch.float32)}


def fwd(x: Tensor, w: Tensor, b: Tensor | None, *, y: Tensor, scale: float, scratch: Scratch) -> NativeCall:
    check_columns("y", y)
    check_columns("b", b)
    (n, k), m = x.shape, w.shape[0]
    threads = min(torch.get_num_threads(), 1 + n * m * k // LEAST)
    dtypes = (DTYPES[x.dtype], DTYPES[w.dtype], DTYPES[w.dtype if b is None else b.dtype])
    panels = address(scratch.get("panels"))
    call = pack_fixed_order(n, m, k, threads, isa(), *dtypes, rows(x), rows(w), rows(y), address(b), panels, scale)
    return run_native(native().tilegrad_native_fixed_order, call)
