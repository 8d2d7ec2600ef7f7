"""What a call of attention accepts: one table. The first row that does not hold is the error.

Each row: the argument it speaks of, when it holds, what is accepted, and what was given. A row may rely on those above.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from itertools import pairwise
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .mask import Mask
from .problem import ALIGNED_BYTES

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MAX_HEAD_DIM = 256
NUMBERS = frozenset((bool, int, float, NoneType))


class Inputs(NamedTuple):
    """A call's arguments, whatever they are: the table finds out."""

    q: Any
    k: Any
    v: Any
    mask: Any

    def of(self, name: str) -> Any:
        return getattr(self if name in self._fields else self.mask, name)

    @property
    def hq(self) -> int:
        return int(self.q.shape[1])

    @property
    def batch(self) -> int:
        cu = self.mask.cu_seqlens_q
        return int(self.q.shape[0] if cu is None else cu.shape[0] - 1)

    @property
    def scores(self) -> tuple[int, ...]:
        return self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2]


class Check(NamedTuple):
    argument: str
    holds: Callable[[Inputs], bool]
    accepted: str
    given: Callable[[Inputs], object]
    error: type[Exception] = ValueError


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _is_tensor(x: object) -> bool:
    """A tensor, or a handle that stands for one in a memory trace."""
    return isinstance(x, Tensor) or all(hasattr(x, name) for name in ("shape", "dtype", "device"))


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(shape[::-1], to[::-1], strict=False))


def _value(name: str) -> Callable[[Inputs], object]:
    return lambda c: repr(c.of(name))


def _shape(name: str, beside: str = "") -> Callable[[Inputs], object]:
    def given(c: Inputs) -> str:
        shape = f"shape {tuple(c.of(name).shape)}"
        return f"{shape}, and {beside} is {tuple(c.of(beside).shape)}" if beside else shape

    return given


def _tensor(name: str) -> Check:
    optional = name not in Inputs._fields
    return Check(
        name, lambda c: optional and c.of(name) is None or _is_tensor(c.of(name)),
        "None or a tensor" if optional else "a tensor", lambda c: type(c.of(name)).__name__, TypeError,
    )  # fmt: skip


def _longest(name: str) -> Check:
    return Check(
        name, lambda c: _is_int(c.of(name)) and c.of(name) >= 0, "an int ≥ 0: the longest sequence", _value(name)
    )


def _dims(name: str) -> Check:
    return Check(
        name, lambda c: len(c.of(name).shape) == (3 if c.mask.varlen else 4),
        "(B, H, T, D), 4 dimensions; for packed sequences (total, H, D)", _shape(name),
    )  # fmt: skip


def _dtype_of_q(name: str) -> Check:
    return Check(
        name, lambda c: c.of(name).dtype == c.q.dtype, "q's dtype",
        lambda c: f"{c.of(name).dtype}, and q is {c.q.dtype}", TypeError,
    )  # fmt: skip


def _float32_or_dtype_of_q(name: str) -> Check:
    return Check(
        name, lambda c: c.of(name) is None or c.of(name).dtype in (torch.float32, c.q.dtype), "float32 or q's dtype",
        lambda c: c.of(name).dtype, TypeError,
    )  # fmt: skip


def _device_of_q(name: str) -> Check:
    return Check(
        name, lambda c: not _is_tensor(c.of(name)) or c.of(name).device == c.q.device, "q's device",
        lambda c: f"{c.of(name).device}, and q is on {c.q.device}",
    )  # fmt: skip


def _head_dim(name: str) -> Check:
    return Check(
        name,
        lambda c: 1 <= c.of(name).shape[-1] <= MAX_HEAD_DIM,
        f"a head dimension of 1 to {MAX_HEAD_DIM}",
        _shape(name),
    )


def _last_stride(name: str) -> Check:
    return Check(
        name, lambda c: not isinstance(c.of(name), Tensor) or c.of(name).shape[-1] == 1 or c.of(name).stride(-1) == 1,
        "any strides with the last one 1 (call .contiguous())", lambda c: f"strides {c.of(name).stride()}",
    )  # fmt: skip


def _lengths(name: str) -> Check:
    return Check(
        name,
        lambda c: c.of(name) is None or c.of(name).dtype == torch.int32 and len(c.of(name).shape) == 1 <= c.of(name).shape[0]
        and (not isinstance(c.of(name), Tensor) or c.of(name).is_contiguous()),
        "contiguous int32 cumulative lengths, (B + 1,)", lambda c: f"{c.of(name).dtype}, {_shape(name)(c)}",
    )  # fmt: skip


_QKV = ("q", "k", "v")
_WINDOW = "None, or a pair (left, right) of ints ≥ 0 where None = open on that side"
_SCALE = "None (1/√D) or a finite number"
_SOFTCAP = "a finite number ≥ 0; 0 = none"
_DROPOUT = "a number p, 0 ≤ p < 1"
_SEED = "None, an int of 64 bits, or a 0-d int64 tensor"

OPTIONS: tuple[Check, ...] = (
    *map(_tensor, (*_QKV, "bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k")),
    Check("alibi_slopes", lambda c: not getattr(c.mask.alibi_slopes, "requires_grad", False),
          "slopes without a gradient (call .detach())", lambda c: "requires_grad=True"),
    Check("causal", lambda c: isinstance(c.mask.causal, bool), "True or False", _value("causal"), TypeError),
    Check("window", lambda c: c.mask.window is None or isinstance(c.mask.window, tuple | list), _WINDOW, _value("window"),
          TypeError),
    Check("window", lambda c: c.mask.window is None or len(c.mask.window) == 2, _WINDOW, _value("window")),
    Check("window", lambda c: all(x is None or _is_int(x) and x >= 0 for x in c.mask.window or ()), _WINDOW, _value("window")),
    Check("scale", lambda c: c.mask.scale is None or _is_number(c.mask.scale), _SCALE, _value("scale"), TypeError),
    Check("scale", lambda c: c.mask.scale is None or math.isfinite(c.mask.scale), _SCALE, _value("scale")),
    Check("softcap", lambda c: _is_number(c.mask.softcap), _SOFTCAP, _value("softcap"), TypeError),
    Check("softcap", lambda c: 0.0 <= c.mask.softcap < math.inf, _SOFTCAP, _value("softcap")),
    Check("dropout_p", lambda c: _is_number(c.mask.dropout_p), _DROPOUT, _value("dropout_p"), TypeError),
    Check("dropout_p", lambda c: 0.0 <= c.mask.dropout_p < 1.0, _DROPOUT, _value("dropout_p")),
    Check("seed", lambda c: c.mask.seed is None or _is_int(c.mask.seed) or _is_tensor(c.mask.seed), _SEED, _value("seed"),
          TypeError),
    Check("seed", lambda c: not _is_int(c.mask.seed) or -(2**63) <= c.mask.seed < 2**64, _SEED, _value("seed")),
    *map(_longest, ("max_seqlen_q", "max_seqlen_k")),
)  # fmt: skip

TENSORS: tuple[Check, ...] = (
    *map(_dims, _QKV),
    Check("q", lambda c: c.q.dtype in DTYPES, "float32, float16, bfloat16 or float64", lambda c: c.q.dtype, TypeError),
    *map(_dtype_of_q, ("k", "v")),
    *map(_device_of_q, ("k", "v", "bias", "alibi_slopes", "sinks", "seed", "cu_seqlens_q", "cu_seqlens_k")),
    *map(_head_dim, _QKV),
    Check("k", lambda c: c.k.shape[-1] == c.q.shape[-1], "q's head dimension", _shape("k", "q")),
    Check("k", lambda c: c.mask.varlen or c.k.shape[0] == c.q.shape[0], "q's batch size", _shape("k", "q")),
    Check("v", lambda c: c.v.shape[:-1] == c.k.shape[:-1], "k's shape but for the head dimension", _shape("v", "k")),
    Check("q", lambda c: min(c.hq, c.k.shape[1]) >= 1 and c.hq % c.k.shape[1] == 0,
          "a number of query heads that is a multiple of the number of kv heads",
          lambda c: f"{c.hq} query heads, {c.k.shape[1]} kv heads"),
    *map(_last_stride, _QKV),
    Check("bias", lambda c: c.mask.bias is None or not c.mask.varlen, "None for packed sequences", _shape("bias")),
    Check("bias", lambda c: c.mask.bias is None or c.mask.bias.dtype in (torch.bool, torch.float32, c.q.dtype),
          "bool (a mask), float32 or q's dtype", lambda c: c.mask.bias.dtype, TypeError),
    Check("bias", lambda c: c.mask.bias is None or _broadcasts(tuple(c.mask.bias.shape), c.scores),
          "a shape that broadcasts to (B, Hq, Tq, Tk)", lambda c: f"{_shape('bias')(c)}, and (B, Hq, Tq, Tk) is {c.scores}"),
    *map(_float32_or_dtype_of_q, ("alibi_slopes", "sinks")),
    Check("alibi_slopes",
          lambda c: c.mask.alibi_slopes is None or tuple(c.mask.alibi_slopes.shape) in ((c.hq,), (c.batch, c.hq)),
          "shape (Hq,) or (B, Hq)", lambda c: f"{_shape('alibi_slopes')(c)}, and B = {c.batch}, Hq = {c.hq}"),
    Check("sinks", lambda c: c.mask.sinks is None or tuple(c.mask.sinks.shape) == (c.hq,), "shape (Hq,)",
          lambda c: f"{_shape('sinks')(c)}, and Hq = {c.hq}"),
    Check("seed", lambda c: not c.mask.dropout_p or c.mask.seed is not None, "a seed where dropout_p > 0", _value("seed")),
    Check("seed", lambda c: not _is_tensor(c.mask.seed) or c.mask.seed.dtype == torch.int64 and tuple(c.mask.seed.shape) == (),
          _SEED, lambda c: f"{c.mask.seed.dtype}, {_shape('seed')(c)}", TypeError),
    *map(_lengths, ("cu_seqlens_q", "cu_seqlens_k")),
    Check("cu_seqlens_k", lambda c: (c.mask.cu_seqlens_q is None) == (c.mask.cu_seqlens_k is None),
          "given exactly where cu_seqlens_q is", _value("cu_seqlens_k")),
    Check("cu_seqlens_k", lambda c: not c.mask.varlen or c.mask.cu_seqlens_q.shape == c.mask.cu_seqlens_k.shape,
          "as many entries as cu_seqlens_q", _shape("cu_seqlens_k", "cu_seqlens_q")),
)  # fmt: skip


def _run(checks: tuple[Check, ...], inputs: Inputs) -> None:
    for check in checks:
        if not check.holds(inputs):
            raise check.error(f"{check.argument}: got {check.given(inputs)}; accepted: {check.accepted}")


def check_options(q: Any, k: Any, v: Any, mask: Mask) -> None:
    """Kinds of arguments, and the numbers among them."""
    _run(OPTIONS, Inputs(q, k, v, mask))


def check_tensors(q: Any, k: Any, v: Any, mask: Mask) -> None:
    """Shapes, dtypes, devices and strides: what is known without reading a value."""
    _run(TENSORS, Inputs(q, k, v, mask))


def check_lengths(q: Tensor, k: Tensor, mask: Mask) -> None:
    """The values of cu_seqlens. On a device only with TILEGRAD_CHECK=1: reading them waits for it and breaks capture."""
    if mask.cu_seqlens_q is None or mask.cu_seqlens_k is None:
        return
    if q.device.type != "cpu" and os.environ.get("TILEGRAD_CHECK") != "1":
        return
    for side, cu, total, longest in (
        ("q", mask.cu_seqlens_q, q.shape[0], mask.max_seqlen_q),
        ("k", mask.cu_seqlens_k, k.shape[0], mask.max_seqlen_k),
    ):
        ends = cu.tolist()
        lengths = [b - a for a, b in pairwise(ends)]
        if ends[0] != 0 or ends[-1] != total:
            raise ValueError(
                f"cu_seqlens_{side}: got {ends[0]} … {ends[-1]}; accepted: starts at 0, ends at {total}, {side}'s length"
            )
        if min(lengths, default=0) < 0:
            b = lengths.index(min(lengths))
            raise ValueError(
                f"cu_seqlens_{side}: got {ends[b]} and then {ends[b + 1]}, at {b}; accepted: never falling"
            )
        if max(lengths, default=0) > longest:
            b = lengths.index(max(lengths))
            raise ValueError(
                f"max_seqlen_{side}: got {longest}; accepted: at least {lengths[b]}, the length of sequence {b}"
            )


def form_of(call: tuple[object, ...], tensors: tuple[Any, ...], mask: Any) -> tuple[object, ...] | None:
    """All that the checks and the choice of a kernel depend on; None for what has no such form (handles, lists, a seed). Values
    of tensors are no part of it, and an option counts with its type, for 1 is not True."""
    form = [*call]
    for x in (*tensors, mask.bias, mask.alibi_slopes, mask.sinks, mask.cu_seqlens_q, mask.cu_seqlens_k):
        if x is None:
            form.append(None)
        elif type(x) is Tensor or type(x) is Parameter:
            form += (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNED_BYTES, x.requires_grad)
        else:
            return None
    window = (None, None) if mask.window is None else mask.window
    if mask.seed is not None or type(window) is not tuple:
        return None
    options = (mask.causal, mask.scale, mask.softcap, mask.dropout_p, mask.max_seqlen_q, mask.max_seqlen_k, *window)
    types = tuple(map(type, options))
    return (*form, options, types) if NUMBERS.issuperset(types) else None
