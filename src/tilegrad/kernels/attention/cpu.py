"""Attention on the CPU in C++. The library does not need torch, and has code for each instruction set (cpu/library.py).

The loops over tiles are in forward.h and backward.h of cpu/csrc/attention, or in amx_forward.h and amx_backward.h for bfloat16
on a processor with AMX. The equations are in mask.py and reference.py. A tile costs two GEMMs in the forward and five in the
backward. Tiles that the band or a bias masks out are skipped, and so are masked-out strips of tiles on the band's edges. Sums
are float32 (float64 for float64 inputs). With G = Hq / Hkv the scratch is O(threads · (G·T·(2·D + Dv) + tile · D)). The scratch
has a T×T matrix only for a T×T bias that needs a gradient, is broadcast over heads or sequences, and has another dtype than the
sums. Results have the same bits on any number of threads (cpu/csrc/threads/work_queue.h). On x86, results below the smallest
normal number are 0.

A call uses torch.get_num_threads() of torch's own threads (cpu/csrc/threads/thread_pool.h) and releases the GIL.
"""

from __future__ import annotations

import ctypes
from array import array
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..cpu.abi import DTYPES, NO_DTYPE, Call, pack_call
from ..cpu.library import ISAS, isa, native
from ..cpu.rows import address
from ..philox import signed, threshold
from ..scratch import Shapes, Views, accumulation_dtype
from .mask import MASK_TENSORS, Mask, four_dims
from .problem import Backward, Forward

_FORWARD, _BACKWARD = 0, 1
_ABSENT = (0, 0, 0, 0, 0)  # address and strides of an absent tensor


def exp_error(dtype: torch.dtype) -> float:
    """The relative error of exp if it exceeds the default of bounds.py, else 0. With AMX, exp is a short polynomial (amx.h):
    the error is far below the rounding of p to bfloat16, but above the rounding of lse to float32."""
    return 3e-6 if dtype == torch.bfloat16 and ISAS[isa()] == "amx" else 0.0


def size_fields(q: Any, v: Any, mask: Mask) -> dict[str, Any]:
    """The fields of `Call` that are numbers."""
    if mask.cu_seqlens_q is None:
        b, hq, tq, d = q.shape
        _, hkv, tk, dv = v.shape
    else:
        b, (_, hq, d), (_, hkv, dv) = mask.cu_seqlens_q.shape[0] - 1, q.shape, v.shape
        tq, tk = mask.max_seqlen_q, mask.max_seqlen_k
    left, right = mask.band
    return {
        "dtype": DTYPES[q.dtype],
        "b": b,
        "hq": hq,
        "hkv": hkv,
        "tq": tq,
        "tk": tk,
        "d": d,
        "dv": dv,
        "left": -1 if left is None or left >= tq + tk else left,
        "right": -1 if right is None or right >= tq + tk else right,
        "threads": torch.get_num_threads(),
        "isa": isa(),
        "sinks_dtype": 0 if mask.sinks is None else DTYPES[mask.sinks.dtype],
        "slopes_dtype": 0 if mask.alibi_slopes is None else DTYPES[mask.alibi_slopes.dtype],
        "bias_dtype": NO_DTYPE if mask.bias is None else DTYPES[mask.bias.dtype],
        "scale": mask.scale_for(d),
        "softcap": mask.softcap,
        "dropout_p": mask.dropout_p,
    }


def workspace(q: Any, k: Any, v: Any, mask: Mask, *, backward: bool, deterministic: bool) -> Shapes:
    """The scratch, which grows with every size and with the number of threads."""
    dtype, bias = accumulation_dtype(q.dtype), mask.float_bias
    sizes = pack_call(**size_fields(q, v, mask), intervals=_interval_form(mask.intervals))
    needed_bytes = native().tilegrad_native_scratch(sizes, backward)
    shapes: Shapes = {"native": (((needed_bytes + 64) // dtype.itemsize,), dtype)}  # 64: room to align to a cache line
    if backward and bias is not None and bias.dtype != dtype and not _has_all_pairs(bias, q, v):
        shapes["dbias"] = tuple(bias.shape), dtype
    return shapes


def _has_all_pairs(bias: Any, q: Any, v: Any) -> bool:
    """Whether a bias of a dense call is not broadcast along any axis."""
    return bool(prod(bias.shape) == prod((*q.shape[:3], v.shape[2])))


def _rows(x: Tensor | None, *, varlen: bool) -> tuple[int, ...]:
    """Address and strides of (B, H, T, D), or of packed (total, H, D)."""
    if x is None:
        return _ABSENT
    if varlen:
        t, h, d = x.stride()
        return x.data_ptr(), 0, h, t, d
    return (x.data_ptr(), *x.stride())


def _statistic(x: Tensor | None, *, varlen: bool) -> tuple[int, ...]:
    """Address and strides of (B, H, T), or of packed (H, total)."""
    if x is None:
        return _ABSENT
    if varlen:
        return (x.data_ptr(), 0, *x.stride(), 0)
    return (x.data_ptr(), *x.stride(), 0)


def by_head(x: Tensor | None) -> tuple[int, ...]:
    """Address and strides of (H,) or (B, H)."""
    if x is None:
        return _ABSENT
    return (x.data_ptr(), *((0,) if x.ndim == 1 else ()), *x.stride(), 0, 0)


def _pairs(x: Tensor | None) -> tuple[int, ...]:
    """Address and strides of (B, Hq, Tq, Tk); an axis of size 1 is broadcast by stride 0."""
    if x is None:
        return _ABSENT
    x = four_dims(x)
    return (x.data_ptr(), *(0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)))


def _interval_form(x: Any) -> tuple[int, ...]:
    """The fields of `_intervals` that the scratch depends on, from the shape alone."""
    return _ABSENT if x is None else (1, int(x.shape[0] > 1), int(x.shape[1] > 1), x.shape[3], 1)


def _intervals(x: Tensor | None) -> tuple[int, ...]:
    """Address and strides of (B, Hkv, Tk, 2 or 4); an axis of size 1 is broadcast by stride 0."""
    if x is None:
        return _ABSENT
    b, h = (0 if n == 1 else stride for n, stride in zip(x.shape[:2], x.stride()[:2], strict=True))
    return x.data_ptr(), b, h, x.shape[3], 1


def _fields(call: Forward | Backward) -> dict[str, Any]:
    """The fields of `Call` that forward and backward have, except scratch."""
    q, mask = call.q, call.mask
    varlen = mask.varlen
    dropout: dict[str, Any] = {}
    if mask.dropout_p and mask.seed is not None:
        dropout = {"dropout_threshold": threshold(mask.dropout_p), "seed": signed(int(mask.seed))}
    return {
        **size_fields(q, call.v, mask),
        **dropout,
        "cu_seqlens_q": address(mask.cu_seqlens_q),
        "cu_seqlens_k": address(mask.cu_seqlens_k),
        "q": _rows(q, varlen=varlen),
        "k": _rows(call.k, varlen=varlen),
        "v": _rows(call.v, varlen=varlen),
        "o": _rows(call.o, varlen=varlen),
        "lse": _statistic(call.lse, varlen=varlen),
        "sinks": by_head(mask.sinks),
        "slopes": by_head(mask.alibi_slopes),
        "bias": _pairs(mask.bias),
        "intervals": _intervals(mask.intervals),
    }


# The index of each field of `Call`, in words of 8 bytes.
_WORD = {field[0]: getattr(Call, field[0]).offset // 8 for field in Call._fields_}


class NativeRun:
    """Runs calls of one signature. The fields are packed once; only addresses, the instruction set and the seed are written at
    each call. fast_path.cpp runs such calls too, from `program`."""

    def __init__(self, direction: int, fields: dict[str, Any], call: Forward | Backward, views: Views) -> None:
        mask, dbias = call.mask, call.dbias if isinstance(call, Backward) else None
        tensors = {name: getattr(call, name, None) for name in ("q", "k", "v", "o", "lse", "do", "dlse")}
        tensors |= {name: getattr(mask, name) for name in MASK_TENSORS}
        tensors |= {name: getattr(call, name, None) for name in ("dq", "dk", "dv", "dbias", "dsinks")}
        fields_of = {"do": "do_", "dv": "dv_", "alibi_slopes": "slopes"}
        self._indices = [_WORD[fields_of.get(name, name)] for name, x in tensors.items() if isinstance(x, Tensor)]
        self._direction, self._words = direction, array("Q", pack_call(**fields))
        self._run = native().tilegrad_native_run
        function = ctypes.cast(self._run, ctypes.c_void_p).value
        self.program = (function, direction, list(self._words), self._indices, _WORD["scratch"])
        self._views, self._dropout = views, bool(mask.dropout_p)
        self._scratch_bytes = views(*call.memory)["native"].nbytes
        self._zero_dbias = dbias is not None and (
            not _has_all_pairs(dbias, call.q, call.v) or mask.band != (None, None)
        )

    def __call__(self, call: Forward | Backward) -> None:
        words, dbias, sums = self._words[:], None, None
        for i, x in zip(self._indices, call.tensors, strict=False):  # the value of the seed replaces its address below
            words[i] = x.data_ptr()
        if self._dropout and call.mask.seed is not None:
            words[_WORD["seed"]] = int(call.mask.seed) % 2**64
        if isinstance(call, Backward) and call.dbias is not None:
            dbias = call.dbias
            sums = self._views(*call.memory).get("dbias", dbias)
            words[_WORD["dbias"]] = sums.data_ptr()
            if self._zero_dbias:
                sums.zero_()
        words[_WORD["scratch"]], words[_WORD["scratch_bytes"]] = from_cache_line(call.memory[0], self._scratch_bytes)
        words[_WORD["isa"]] = isa()
        self._run(words.tobytes(), self._direction)
        if dbias is not None and sums is not None and sums is not dbias:
            dbias.copy_(sums)


def from_cache_line(memory: Tensor, nbytes: int) -> tuple[int, int]:
    """Address and bytes of the part of scratch that starts at a cache line."""
    data = memory.data_ptr()
    start = -data % 64
    return data + start, nbytes - start


def prepare_fwd(call: Forward, views: Views) -> NativeRun:
    return NativeRun(_FORWARD, _fields(call), call, views)


def prepare_bwd(call: Backward, views: Views) -> NativeRun:
    varlen = call.mask.varlen
    fields = _fields(call) | {
        "do_": _rows(call.do, varlen=varlen),
        "dlse": _statistic(call.dlse, varlen=varlen),
        "dsinks": by_head(call.dsinks),
        "dq": _rows(call.dq, varlen=varlen),
        "dk": _rows(call.dk, varlen=varlen),
        "dv_": _rows(call.dv, varlen=varlen),
        "dbias_dtype": NO_DTYPE,
        "dkv_dtype": DTYPES[next((x.dtype for x in (call.dk, call.dv) if x is not None), call.do.dtype)],
    }
    if call.dbias is not None:
        sums = views(*call.memory).get("dbias", call.dbias)
        fields |= {"dbias": _pairs(sums), "dbias_dtype": DTYPES[sums.dtype]}
    return NativeRun(_BACKWARD, fields, call, views)
