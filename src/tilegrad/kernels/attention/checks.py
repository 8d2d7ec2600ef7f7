"""Checks of the arguments of attention. The first requirement that is not met raises."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..checks import is_number
from .mask import MASK_TENSORS, Mask
from .problem import sizes_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MAX_HEAD_DIM = 512
TENSOR = "a tensor (torch.from_numpy converts a NumPy array)"


def require(
    ok: object,
    name: str,
    got: Any,
    accepted: str,
    error: type[Exception] = ValueError,
    *,
    show: Callable[[Any], str] = repr,
) -> None:
    """Raises unless ok. `show` formats the value received."""
    if not ok:
        raise error(f"{name}: got {show(got)}; accepted: {accepted}")


def _kind(x: object) -> str:
    return type(x).__name__


def _shape(x: Any) -> str:
    return f"shape {tuple(x.shape)}"


def _shapes(x_and_other: tuple[Any, str, Any]) -> str:
    x, name, other = x_and_other
    return f"{_shape(x)}, and {name} is {tuple(other.shape)}"


def _dtypes(x_and_q: tuple[Any, Any]) -> str:
    x, q = x_and_q
    return f"{x.dtype}, and q is {q.dtype}"


def _devices(x_and_q: tuple[Any, Any]) -> str:
    x, q = x_and_q
    return f"{x.device}, and q is on {q.device}"


def _strides(x: Tensor) -> str:
    return f"strides {x.stride()}"


def _dtype_and_shape(x: Any) -> str:
    return f"{x.dtype}, {_shape(x)}"


_INTEGERS = (int, torch.SymInt)  # torch.export has sizes that are symbols


def _is_int(x: object) -> bool:
    return isinstance(x, _INTEGERS) and not isinstance(x, bool)


def _is_tensor(x: object) -> bool:
    """Whether x is a tensor, or a handle that represents a tensor in a memory trace."""
    if isinstance(x, Tensor):
        return True
    return hasattr(x, "shape") and isinstance(getattr(x, "dtype", None), torch.dtype) and hasattr(x, "device")


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(shape[::-1], to[::-1], strict=False))


_WINDOW = "None, or a pair (left, right), each an int ≥ 0 or None (no limit)"
_SCALE = "None (1/√D) or a finite number"
_SOFTCAP = "a finite number ≥ 0; 0 means no softcap"
_DROPOUT = "a number p, 0 ≤ p < 1"
_SEED = "None, an int of 64 bits, or a 0-d int64 tensor"


def check_options(q: Any, k: Any, v: Any, mask: Mask) -> None:
    """Checks types of arguments, and values of those that are numbers."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(_is_tensor(x), name, x, TENSOR, TypeError, show=_kind)
    for name in (name for name in MASK_TENSORS if name != "seed"):
        x = getattr(mask, name)
        require(x is None or _is_tensor(x), name, x, f"None or {TENSOR}", TypeError, show=_kind)
    learned = getattr(mask.alibi_slopes, "requires_grad", False)
    require(not learned, "alibi_slopes", "requires_grad=True", "slopes without a gradient (call .detach())", show=str)
    require(isinstance(mask.causal, bool), "causal", mask.causal, "True or False", TypeError)
    window = mask.window
    require(window is None or isinstance(window, tuple | list), "window", window, _WINDOW, TypeError)
    require(window is None or len(window) == 2, "window", window, _WINDOW)
    require(all(x is None or _is_int(x) and x >= 0 for x in window or ()), "window", window, _WINDOW)
    scale, softcap, dropout_p, seed = mask.scale, mask.softcap, mask.dropout_p, mask.seed
    require(scale is None or is_number(scale), "scale", scale, _SCALE, TypeError)
    require(scale is None or math.isfinite(scale), "scale", scale, _SCALE)
    require(is_number(softcap), "softcap", softcap, _SOFTCAP, TypeError)
    require(0.0 <= softcap < math.inf, "softcap", softcap, _SOFTCAP)
    require(is_number(dropout_p), "dropout_p", dropout_p, _DROPOUT, TypeError)
    require(0.0 <= dropout_p < 1.0, "dropout_p", dropout_p, _DROPOUT)
    require(seed is None or _is_int(seed) or _is_tensor(seed), "seed", seed, _SEED, TypeError)
    require(not isinstance(seed, int) or -(2**63) <= seed < 2**64, "seed", seed, _SEED)
    for name, longest in (("max_seqlen_q", mask.max_seqlen_q), ("max_seqlen_k", mask.max_seqlen_k)):
        require(_is_int(longest) and longest >= 0, name, longest, "an int ≥ 0, the length of the longest sequence")


def check_tensors(q: Any, k: Any, v: Any, mask: Mask) -> None:
    """Checks shapes, dtypes, devices and strides without reading values of tensors. Runs after `check_options`."""
    _check_qkv(q, k, v, mask)
    _check_packing(mask)
    _check_mask(q, k, v, mask)
    _check_intervals(k, mask)


def _check_qkv(q: Any, k: Any, v: Any, mask: Mask) -> None:
    qkv = (("q", q), ("k", k), ("v", v))
    dims = 3 if mask.varlen else 4
    for name, x in qkv:
        require(
            len(x.shape) == dims, name, x, "(B, H, T, D), 4 dimensions; for packed sequences (total, H, D)", show=_shape
        )
    require(q.dtype in DTYPES, "q", q.dtype, "float32, float16, bfloat16 or float64", TypeError)
    for name, x in qkv[1:]:
        require(x.dtype == q.dtype, name, (x, q), "q's dtype", TypeError, show=_dtypes)
    for name, x in (*qkv[1:], *((name, getattr(mask, name)) for name in MASK_TENSORS)):
        require(not _is_tensor(x) or x.device == q.device, name, (x, q), "q's device", show=_devices)
    for name, x in qkv:
        accepted = f"a head dimension of 1 to {MAX_HEAD_DIM}"
        require(1 <= x.shape[-1] <= MAX_HEAD_DIM, name, x, accepted, show=_shape)
    require(k.shape[-1] == q.shape[-1], "k", (k, "q", q), "q's head dimension", show=_shapes)
    require(mask.varlen or k.shape[0] == q.shape[0], "k", (k, "q", q), "q's batch size", show=_shapes)
    require(v.shape[:-1] == k.shape[:-1], "v", (v, "k", k), "k's shape in all but the last dimension", show=_shapes)
    hq, hkv = q.shape[1], k.shape[1]
    require(
        min(hq, hkv) >= 1 and hq % hkv == 0,
        "q",
        f"{hq} query heads, {hkv} kv heads",
        "a number of query heads that is a multiple of the number of kv heads",
        show=str,
    )
    for name, x in qkv:
        contiguous = not isinstance(x, Tensor) or x.shape[-1] == 1 or x.stride(-1) == 1
        require(contiguous, name, x, "any strides whose last one is 1 (call .contiguous())", show=_strides)


def _check_packing(mask: Mask) -> None:
    cu_q, cu_k = mask.cu_seqlens_q, mask.cu_seqlens_k
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        ok = cu is None or cu.dtype == torch.int32 and len(cu.shape) == 1 <= cu.shape[0]
        ok = ok and (not isinstance(cu, Tensor) or cu.is_contiguous())
        require(ok, name, cu, "contiguous int32 cumulative lengths, (B + 1,)", show=_dtype_and_shape)
    require((cu_q is None) == (cu_k is None), "cu_seqlens_k", cu_k, "a tensor if cu_seqlens_q is one, otherwise None")
    if cu_q is not None and cu_k is not None:
        got = (cu_k, "cu_seqlens_q", cu_q)
        require(cu_q.shape == cu_k.shape, "cu_seqlens_k", got, "as many entries as cu_seqlens_q", show=_shapes)


def _check_mask(q: Any, k: Any, v: Any, mask: Mask) -> None:
    sizes = sizes_of(q, k, v, mask)
    batch, hq = sizes.batch, sizes.hq
    bias, slopes, sinks, seed = mask.bias, mask.alibi_slopes, mask.sinks, mask.seed
    if bias is not None:
        require(not mask.varlen, "bias", bias, "None for packed sequences", show=_shape)
        kinds = (torch.bool, torch.float32, q.dtype)
        require(bias.dtype in kinds, "bias", bias.dtype, "bool (a mask), float32 or q's dtype", TypeError)
        scores = (batch, hq, sizes.tq, sizes.tk)
        got = f"{_shape(bias)}, and (B, Hq, Tq, Tk) is {scores}"
        fits = broadcasts(tuple(bias.shape), scores)
        require(fits, "bias", got, "a shape that broadcasts to (B, Hq, Tq, Tk)", show=str)
    for name, x in (("alibi_slopes", slopes), ("sinks", sinks)):
        if x is not None:
            require(x.dtype in (torch.float32, q.dtype), name, x.dtype, "float32 or q's dtype", TypeError)
    if slopes is not None:
        got = f"{_shape(slopes)}, and B = {batch}, Hq = {hq}"
        fits = tuple(slopes.shape) in ((hq,), (batch, hq))
        require(fits, "alibi_slopes", got, "shape (Hq,) or (B, Hq)", show=str)
    if sinks is not None:
        got = f"{_shape(sinks)}, and Hq = {hq}"
        require(tuple(sinks.shape) == (hq,), "sinks", got, "shape (Hq,)", show=str)
    require(not mask.dropout_p or seed is not None, "seed", seed, "an int or a tensor, because dropout_p > 0")
    if seed is not None and not isinstance(seed, int):
        ok = seed.dtype == torch.int64 and tuple(seed.shape) == ()
        require(ok, "seed", seed, _SEED, TypeError, show=_dtype_and_shape)


_INTERVALS = "int32, (B or 1, Hkv or 1, Tk, 2 or 4): start and end of one or two runs of rows for each column"
_TOGETHER = "any strides of B and Hkv, and the rest contiguous (call .contiguous())"


def _check_intervals(k: Any, mask: Mask) -> None:
    x = mask.intervals
    if x is None:
        return
    remedy = "None for packed sequences: write them as intervals of a dense call (tilegrad.masks.documents)"
    require(not mask.varlen, "intervals", x, remedy, show=_shape)
    require(x.dtype == torch.int32, "intervals", x.dtype, f"{_INTERVALS} (call .to(torch.int32))", TypeError)
    b, hkv, tk = k.shape[:3]
    shape = tuple(x.shape)
    fits = len(shape) == 4 and shape[0] in (1, b) and shape[1] in (1, hkv) and shape[2] == tk and shape[3] in (2, 4)
    require(fits, "intervals", f"shape {shape} for B = {b}, Hkv = {hkv}, Tk = {tk}", _INTERVALS, show=str)
    contiguous_rows = not isinstance(x, Tensor) or x.stride(3) == 1 and (tk <= 1 or x.stride(2) == shape[3])
    require(contiguous_rows, "intervals", x, _TOGETHER, show=_strides)


def check_values(q: Tensor, k: Tensor, mask: Mask) -> None:
    """Checks values of cu_seqlens and intervals; on a GPU only with TILEGRAD_CHECK=1, because reading them synchronizes and
    breaks capture."""
    if not mask.has_tensors or q.device.type != "cpu" and os.environ.get("TILEGRAD_CHECK") != "1":
        return
    if mask.intervals is not None:
        _check_rows(mask.intervals, q.shape[2])
    if mask.cu_seqlens_q is not None and mask.cu_seqlens_k is not None:
        _check_lengths(q, k, mask, mask.cu_seqlens_q, mask.cu_seqlens_k)


def _check_rows(intervals: Tensor, tq: int) -> None:
    """0 ≤ start ≤ end ≤ Tq."""
    starts, ends = intervals[..., 0::2], intervals[..., 1::2]
    wrong = (starts < 0) | (starts > ends) | (ends > tq)
    if wrong.any():
        b, h, j, n = wrong.nonzero()[0].tolist()
        start, end = intervals[b, h, j, 2 * n : 2 * n + 2].tolist()
        raise ValueError(
            f"intervals: got [{start}, {end}) in [{b}, {h}, {j}, {2 * n} : {2 * n + 2}]; accepted: 0 ≤ start ≤ end ≤ {tq}, "
            "the rows of q (an empty interval has start = end)"
        )


def _check_lengths(q: Tensor, k: Tensor, mask: Mask, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    for side, cu, total, longest in (
        ("q", cu_seqlens_q, q.shape[0], mask.max_seqlen_q),
        ("k", cu_seqlens_k, k.shape[0], mask.max_seqlen_k),
    ):
        ends = cu.tolist()
        lengths = [b - a for a, b in pairwise(ends)]
        if ends[0] != 0 or ends[-1] != total:
            raise ValueError(
                f"cu_seqlens_{side}: got {ends[0]} … {ends[-1]}; accepted: 0 … {total} ({side} has {total} rows)"
            )
        if min(lengths, default=0) < 0:
            b = lengths.index(min(lengths))
            raise ValueError(
                f"cu_seqlens_{side}: got {ends[b]} at index {b}, then {ends[b + 1]}; accepted: values that never decrease"
            )
        if max(lengths, default=0) > longest:
            b = lengths.index(max(lengths))
            raise ValueError(
                f"max_seqlen_{side}: got {longest}; accepted: at least {lengths[b]}, the length of sequence {b}"
            )
