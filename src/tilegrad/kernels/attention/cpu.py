"""Attention on the CPU in C++: registers and tiles by hand for each instruction set, one library, no torch inside.

The walks are in forward.h and backward.h of cpu/csrc/attention (amx_forward.h and amx_backward.h for bfloat16 where a
processor has AMX), the equations in mask.py and reference.py. Cost: two products per tile forward, five backward, each
pair of positions once; tiles that the band hides are skipped, strips of an edge's tiles too. Sums are float32 (float64 for
float64) whatever the inputs. Scratch is O(threads · (G·T·(2·D + Dv) + tile · D)), G = Hq / Hkv, and never T×T. Results are
the same bits on any number of threads: cpu/csrc/threads/turns.h says why.

Threads are torch's own, as many as torch.get_num_threads() says (cpu/csrc/threads/team.h), and the GIL is free meanwhile.
cpu/library.py chooses the instruction set.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from ..cpu.library import isa, native
from ..scratch import Scratch, Shapes, accumulation_dtype
from .mask import Mask

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_CALL = struct.Struct("18q65q2d")  # `Call` of cpu/csrc/attention/call.h: sizes, pointers, 13 views, scale and softcap
_ABSENT = (0, 0, 0, 0, 0)


def _sizes(q: Any, k: Any, v: Any, mask: Mask) -> tuple[int, ...]:
    if mask.cu_seqlens_q is None:
        b, hq, tq, d = q.shape
        hkv, tk = k.shape[1], k.shape[2]
    else:
        b, (_, hq, d), hkv = mask.cu_seqlens_q.shape[0] - 1, q.shape, k.shape[1]
        tq, tk = mask.max_seqlen_q, mask.max_seqlen_k
    left, right = (-1 if side is None or side >= tq + tk else side for side in mask.band)
    sinks, slopes = (0 if x is None else _DTYPES[x.dtype] for x in (mask.sinks, mask.alibi_slopes))
    dtype = _DTYPES[q.dtype]
    return dtype, b, hq, hkv, tq, tk, d, v.shape[-1], left, right, torch.get_num_threads(), isa(), sinks, slopes


def workspace(q: Any, k: Any, v: Any, mask: Mask, *, backward: bool, deterministic: bool) -> Shapes:
    """Grows with every size and with the number of threads."""
    call = _CALL.pack(*_sizes(q, k, v, mask), *(0,) * 69, 1.0, mask.softcap)
    dtype = accumulation_dtype(q.dtype)
    needed_bytes = native().tilegrad_native_scratch(call, backward) + 64  # to begin at a cache line
    return {"native": ((needed_bytes // dtype.itemsize,), dtype)}


def _rows(x: Tensor | None, varlen: bool) -> tuple[int, ...]:
    """(B, H, T, D), or packed (total, H, D)."""
    if x is None:
        return _ABSENT
    if varlen:
        t, h, d = x.stride()
        return x.data_ptr(), 0, h, t, d
    return (x.data_ptr(), *x.stride())


def _statistic(x: Tensor | None, varlen: bool) -> tuple[int, ...]:
    """(B, H, T), or packed (H, total)."""
    if x is None:
        return _ABSENT
    if varlen:
        return (x.data_ptr(), 0, *x.stride(), 0)
    return (x.data_ptr(), *x.stride(), 0)


def _by_head(x: Tensor | None) -> tuple[int, ...]:
    """(H,) or (B, H)."""
    if x is None:
        return _ABSENT
    return (x.data_ptr(), *((0,) if x.ndim == 1 else ()), *x.stride(), 0, 0)


def _run(
    backward: bool, q: Tensor, k: Tensor, v: Tensor, o: Tensor | None, lse: Tensor | None, mask: Mask, scratch: Scratch, *,
    do: Tensor | None = None, dlse: Tensor | None = None, dq: Tensor | None = None, dk: Tensor | None = None,
    dv: Tensor | None = None, dsinks: Tensor | None = None,
) -> None:  # fmt: skip
    packed, work = mask.varlen, scratch["native"]
    start = -work.data_ptr() % 64
    ends = (0 if x is None else x.data_ptr() for x in (mask.cu_seqlens_q, mask.cu_seqlens_k))
    call = _CALL.pack(
        *_sizes(q, k, v, mask), *ends, work.data_ptr() + start, work.nbytes - start,
        *_rows(q, packed), *_rows(k, packed), *_rows(v, packed), *_rows(o, packed), *_statistic(lse, packed),
        *_rows(do, packed), *_statistic(dlse, packed), *_rows(dq, packed), *_rows(dk, packed), *_rows(dv, packed),
        *_by_head(dsinks), *_by_head(mask.sinks), *_by_head(mask.alibi_slopes), mask.scale_for(q.shape[-1]), mask.softcap,
    )  # fmt: skip
    native().tilegrad_native_run(call, backward)


def fwd(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, o: Tensor | None, lse: Tensor | None, scratch: Scratch) -> None:
    _run(False, q, k, v, o, lse, mask, scratch)


def bwd(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, *,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dbias: Tensor | None, dsinks: Tensor | None,
    scratch: Scratch, deterministic: bool,
) -> None:  # fmt: skip
    _run(True, q, k, v, o, lse, mask, scratch, do=do, dlse=dlse, dq=dq, dk=dk, dv=dv, dsinks=dsinks)
