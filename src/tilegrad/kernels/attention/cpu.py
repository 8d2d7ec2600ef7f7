"""Attention on the CPU in C++: registers and tiles by hand for each instruction set, one library, no torch inside.

The loops over tiles are in forward.h and backward.h of cpu/csrc/attention (amx_forward.h and amx_backward.h for bfloat16
where a processor has AMX), the equations in mask.py and reference.py. Cost: two products per tile forward, five backward,
each pair of positions once; tiles that the band or a bias masks out are skipped, strips of an edge's tiles too. Sums are
float32 (float64 for float64) whatever the inputs. Scratch is O(threads · (G·T·(2·D + Dv) + tile · D)), G = Hq / Hkv, and never
T×T unless a bias of that size has a gradient in another dtype. Results are the same bits on any number of threads:
cpu/csrc/threads/work_queue.h says why.

Threads are torch's own, torch.get_num_threads() of them (cpu/csrc/threads/thread_pool.h), and the GIL is free meanwhile.
cpu/library.py chooses the instruction set, cpu/abi.py lays out the call.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..cpu.abi import DTYPES, NO_DTYPE, Call, pack_call
from ..cpu.library import ISAS, isa, native
from ..philox import threshold
from ..scratch import Scratch, Shapes, accumulation_dtype
from .mask import Mask, four_dims

_FORWARD, _BACKWARD = 0, 1
_ABSENT = (0, 0, 0, 0, 0)  # the view of no tensor


def exp_error(dtype: torch.dtype) -> float:
    """The relative error of exp where it is more than bounds.py takes for granted: AMX's is a short polynomial (amx.h), far
    below a rounding of p to bfloat16; but lse is float32."""
    return 3e-6 if dtype == torch.bfloat16 and ISAS[isa()] == "amx" else 0.0


def _sizes(q: Any, v: Any, mask: Mask) -> dict[str, Any]:
    if mask.cu_seqlens_q is None:
        b, hq, tq, d = q.shape
        _, hkv, tk, dv = v.shape
    else:
        b, (_, hq, d), (_, hkv, dv) = mask.cu_seqlens_q.shape[0] - 1, q.shape, v.shape
        tq, tk = mask.max_seqlen_q, mask.max_seqlen_k
    left, right = mask.band
    return {
        "dtype": DTYPES[q.dtype], "b": b, "hq": hq, "hkv": hkv, "tq": tq, "tk": tk, "d": d, "dv": dv,
        "left": -1 if left is None or left >= tq + tk else left,
        "right": -1 if right is None or right >= tq + tk else right,
        "threads": torch.get_num_threads(), "isa": isa(),
        "sinks_dtype": 0 if mask.sinks is None else DTYPES[mask.sinks.dtype],
        "slopes_dtype": 0 if mask.alibi_slopes is None else DTYPES[mask.alibi_slopes.dtype],
        "bias_dtype": NO_DTYPE if mask.bias is None else DTYPES[mask.bias.dtype],
        "scale": mask.scale_for(d), "softcap": mask.softcap, "dropout_p": mask.dropout_p,
    }  # fmt: skip


def workspace(q: Any, k: Any, v: Any, mask: Mask, *, backward: bool, deterministic: bool) -> Shapes:
    """Grows with every size and with the number of threads."""
    dtype, bias = accumulation_dtype(q.dtype), mask.float_bias
    needed_bytes = native().tilegrad_native_scratch(pack_call(**_sizes(q, v, mask)), backward)
    shapes: Shapes = {"native": (((needed_bytes + 64) // dtype.itemsize,), dtype)}  # 64: to begin at a cache line
    if backward and bias is not None and bias.dtype != dtype and not _kept_in_all(bias, q, v):
        shapes["dbias"] = tuple(bias.shape), dtype
    return shapes


def _kept_in_all(bias: Any, q: Any, v: Any) -> bool:
    """True if a bias of a dense call has a number for each pair."""
    return bool(prod(bias.shape) == prod((*q.shape[:3], v.shape[2])))


def _rows(x: Tensor | None, *, varlen: bool) -> tuple[int, ...]:
    """(B, H, T, D), or packed (total, H, D)."""
    if x is None:
        return _ABSENT
    if varlen:
        t, h, d = x.stride()
        return x.data_ptr(), 0, h, t, d
    return (x.data_ptr(), *x.stride())


def _statistic(x: Tensor | None, *, varlen: bool) -> tuple[int, ...]:
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


def _pairs(x: Tensor | None) -> tuple[int, ...]:
    """(B, Hq, Tq, Tk), each possibly 1: broadcast."""
    if x is None:
        return _ABSENT
    x = four_dims(x)
    return (x.data_ptr(), *(0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)))


def _signed(seed: int | Tensor) -> int:
    """The 64 bits of a seed."""
    return (int(seed) + 2**63) % 2**64 - 2**63


def _data(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _fields(q: Tensor, k: Tensor, v: Tensor, o: Tensor | None, lse: Tensor | None, mask: Mask) -> dict[str, Any]:
    """The fields of `Call` that both directions have, but for scratch."""
    varlen = mask.varlen
    dropout: dict[str, Any] = {}
    if mask.dropout_p and mask.seed is not None:
        dropout = {"dropout_threshold": threshold(mask.dropout_p), "seed": _signed(mask.seed)}
    return {
        **_sizes(q, v, mask), **dropout, "cu_seqlens_q": _data(mask.cu_seqlens_q), "cu_seqlens_k": _data(mask.cu_seqlens_k),
        "q": _rows(q, varlen=varlen), "k": _rows(k, varlen=varlen), "v": _rows(v, varlen=varlen), "o": _rows(o, varlen=varlen),
        "lse": _statistic(lse, varlen=varlen), "sinks": _by_head(mask.sinks), "slopes": _by_head(mask.alibi_slopes),
        "bias": _pairs(mask.bias),
    }  # fmt: skip


def _gradient_fields(
    do: Tensor, dlse: Tensor | None, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dsinks: Tensor | None,
    *, varlen: bool,
) -> dict[str, Any]:  # fmt: skip
    """Those of the backward alone, but for dbias."""
    return {
        "do_": _rows(do, varlen=varlen), "dlse": _statistic(dlse, varlen=varlen), "dsinks": _by_head(dsinks),
        "dq": _rows(dq, varlen=varlen), "dk": _rows(dk, varlen=varlen), "dv_": _rows(dv, varlen=varlen),
        "dbias_dtype": NO_DTYPE, "dkv_dtype": DTYPES[next((x.dtype for x in (dk, dv) if x is not None), do.dtype)],
    }  # fmt: skip


def _scratch_fields(scratch: Scratch) -> dict[str, Any]:
    """From the first cache line on."""
    work = scratch["native"]
    data = work.data_ptr()
    start = -data % 64
    return {"scratch": data + start, "scratch_bytes": work.nbytes - start}


def fwd(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, o: Tensor | None, lse: Tensor | None, scratch: Scratch) -> None:
    native().tilegrad_native_run(pack_call(**_fields(q, k, v, o, lse, mask), **_scratch_fields(scratch)), _FORWARD)


def bwd(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, *,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dbias: Tensor | None, dsinks: Tensor | None,
    scratch: Scratch, deterministic: bool,
) -> None:  # fmt: skip
    sums = dbias
    if dbias is not None:
        sums = scratch.get("dbias", dbias)
        if not _kept_in_all(dbias, q, v) or mask.band != (None, None):
            sums.zero_()
    fields = _fields(q, k, v, o, lse, mask) | _scratch_fields(scratch)
    fields |= _gradient_fields(do, dlse, dq, dk, dv, dsinks, varlen=mask.varlen)
    if sums is not None:
        fields |= {"dbias": _pairs(sums), "dbias_dtype": DTYPES[sums.dtype]}
    native().tilegrad_native_run(pack_call(**fields), _BACKWARD)
    if dbias is not None and sums is not None and sums is not dbias:
        dbias.copy_(sums)


_AT = {
    field[0]: getattr(Call, field[0]).offset // 8 for field in Call._fields_
}  # in words of 8 bytes, as all fields are


_HELD = ("bias", "slopes", "sinks", "seed", "cu_seqlens_q", "cu_seqlens_k")  # in the order of Mask.tensors


def _prepared(
    direction: int, fields: dict[str, Any], mask: Mask, reads: dict[str, Any], writes: dict[str, Any]
) -> Callable[..., None]:
    """Runs calls of one signature: what they have in common is packed once, their addresses and the seed at each call."""
    common, native_run, dropout = array("Q", pack_call(**fields)), native().tilegrad_native_run, bool(mask.dropout_p)
    held = (mask.bias, mask.alibi_slopes, mask.sinks, mask.seed, mask.cu_seqlens_q, mask.cu_seqlens_k)
    given = reads | dict(zip(_HELD, held, strict=True)) | writes
    places = [_AT[name] for name, x in given.items() if x is not None]
    isa_at, seed_at, scratch_at, scratch_bytes_at = (_AT[name] for name in ("isa", "seed", "scratch", "scratch_bytes"))

    def run(tensors: list[Tensor], mask: Mask) -> None:
        words, work = common[:], tensors[-1]
        for i, x in zip(places, tensors, strict=False):  # of the seed too, whose value goes over it
            words[i] = x.data_ptr()
        if dropout and mask.seed is not None:
            words[seed_at] = _signed(mask.seed) % 2**64
        data = work.data_ptr()
        start = -data % 64
        words[isa_at], words[scratch_at], words[scratch_bytes_at] = isa(), data + start, work.nbytes - start
        native_run(words.tobytes(), direction)

    address = ctypes.cast(native_run, ctypes.c_void_p).value
    run.native = (address, direction, list(common), places, scratch_at)  # type: ignore[attr-defined]  # for eager.cpp
    return run


def prepare_fwd(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, o: Tensor, lse: Tensor, work: Tensor
) -> Callable[..., None]:  # fmt: skip
    """`fwd` for calls of one signature, see api.py."""
    del work
    return _prepared(_FORWARD, _fields(q, k, v, o, lse, mask), mask, {"q": q, "k": k, "v": v, "o": o, "lse": lse}, {})


def prepare_bwd(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, mask: Mask, *,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dbias: Tensor | None, dsinks: Tensor | None,
    work: Tensor, deterministic: bool,
) -> Callable[..., None] | None:  # fmt: skip
    """The same of `bwd`, which itself runs those with a gradient of bias."""
    del work, deterministic
    if dbias is not None:
        return None
    gradients = _gradient_fields(do, dlse, dq, dk, dv, dsinks, varlen=mask.varlen)
    reads = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do_": do, "dlse": dlse}
    writes = {"dq": dq, "dk": dk, "dv_": dv, "dsinks": dsinks}
    return _prepared(_BACKWARD, _fields(q, k, v, o, lse, mask) | gradients, mask, reads, writes)
