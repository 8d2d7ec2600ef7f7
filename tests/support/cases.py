"""Random calls of attention and functions that run them, for the tests of every kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from support.pairwise import Spec
from tilegrad import Mask, attention, attention_bwd, attention_fwd, attention_varlen, attention_workspace
from tilegrad.kernels.attention import reference
from tilegrad.kernels.attention.bounds import bounds as attention_bounds
from tilegrad.kernels.attention.problem import lse_dtype, output_shapes
from tilegrad.kernels.closeness import Bound, assert_close

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """Sizes and features of a call. `lengths` makes it packed sequences; `layout` is how q, k, v are laid out in memory."""

    b: int = 2
    hkv: int = 2
    group: int = 1
    tq: int = 33
    tk: int = 33
    d: int = 16
    dv: int = 16
    dtype: torch.dtype = torch.float32
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float = 0.0
    bias: str = ""  # which axes of "bhqk" it has, the rest is broadcast; upper case adds a bool mask instead
    bias_dtype: torch.dtype = torch.float32
    alibi: str = ""  # "h" or "bh"
    sinks: bool = False
    intervals: str = ""  # which axes of "bh" it has, then how many numbers a column has: "2", "h4", "bh2" …
    dropout_p: float = 0.0
    dlse: bool = False
    scores: float = 1.0  # the size of scores: q and k are multiplied by its root
    layout: str = "bhtd"  # "bthd": transposed views; "fused": views of one qkv buffer
    lengths: tuple[tuple[int, int], ...] = ()
    device: str = "cpu"

    @property
    def hq(self) -> int:
        return self.hkv * self.group


@dataclass(frozen=True)
class Call:
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor | None
    mask: Mask


def build(case: Case, seed: int = 0) -> Call:
    """The tensors of a case. Large scores are drawn again until the closeness rule applies to every p."""
    for tried in range(seed, seed + 64):
        call = _build(case, tried)
        if case.scores < 1e4 or case.lengths or case.softcap or _rule_applies(call, case.scores):
            return call
    raise AssertionError(f"no seed from {seed} on gives a call that the closeness rule applies to: {case}")


def _rule_applies(call: Call, scores: float) -> bool:
    """Whether no p is near float32's smallest normal number, below which exp gives 0 on some processors.

    From scores of 10⁶ on one key must have all of each row. The rule is of first order: it cannot bound how two keys share a
    row if their scores differ by less than their rounding."""
    p = reference.softmax(call.q.double(), call.k.double(), call.mask, range(len(call.q))).p
    if scores < 1e6:
        return bool(((p < 1e-48) | (p > 1e-36)).all())
    return bool(((p < 1e-290) | (p > 1 - 1e-9)).all())


def _build(case: Case, seed: int) -> Call:
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).to(case.device)

    if case.lengths:
        tq, tk = (sum(pair[side] for pair in case.lengths) for side in (0, 1))
        shapes = [(tq, case.hq, case.d), (tk, case.hkv, case.d), (tk, case.hkv, case.dv), (tq, case.hq, case.dv)]
        q, k, v, do = (randn(*shape) for shape in shapes)
    else:
        q, k, v, do = (
            _laid_out(randn(case.b, h, t, d), case.layout)
            for h, t, d in (
                (case.hq, case.tq, case.d),
                (case.hkv, case.tk, case.d),
                (case.hkv, case.tk, case.dv),
                (case.hq, case.tq, case.dv),
            )
        )
    q.mul_(math.sqrt(case.scores))
    k.mul_(math.sqrt(case.scores))
    extra: dict[str, object] = {}
    if case.bias:
        full = dict(zip("bhqk", (case.b, case.hq, case.tq, case.tk), strict=True))
        bias = randn(*(full[x] if x in case.bias.lower() else 1 for x in "bhqk"), dtype=case.bias_dtype)
        extra["bias"] = bias > -0.5 if case.bias.isupper() else bias
    batches = len(case.lengths) or case.b
    if case.alibi:
        extra["alibi_slopes"] = (
            randn(*((batches,) if "b" in case.alibi else ()), case.hq, dtype=torch.float32).abs() / 8
        )
    if case.sinks:
        extra["sinks"] = randn(case.hq, dtype=torch.float32)
    if case.intervals:
        extra["intervals"] = _intervals(case, g).to(case.device)
    if case.dropout_p:
        extra["seed"] = torch.tensor(0x1234_5678_9ABC_DEF0 + seed, device=case.device)
    if case.lengths:
        for name, side in (("q", 0), ("k", 1)):
            ends = torch.tensor([0, *(pair[side] for pair in case.lengths)]).cumsum(0).int().to(case.device)
            extra[f"cu_seqlens_{name}"] = ends
            extra[f"max_seqlen_{name}"] = max(pair[side] for pair in case.lengths)
    mask = Mask(case.causal, case.window, case.scale, case.softcap, dropout_p=case.dropout_p, **extra)  # type: ignore[arg-type]
    _, lse_shape = output_shapes(q, v, mask)
    dlse = randn(*lse_shape, dtype=lse_dtype(case.dtype)) if case.dlse else None
    return Call(q, k, v, do, dlse, mask)


def _intervals(case: Case, g: torch.Generator) -> Tensor:
    """Runs of up to 40 neighbouring columns have the same intervals, so that whole tiles are masked out. Some intervals are
    empty, some have every row, and every fourth column has its own. A row of the first head attends to nothing."""
    b, h, pairs = (
        case.b if "b" in case.intervals else 1,
        case.hkv if "h" in case.intervals else 1,
        int(case.intervals[-1]) // 2,
    )

    def draw(n: int) -> Tensor:
        x = torch.randint(-case.tq // 2, case.tq * 3 // 2 + 1, (b, h, n, pairs, 2), generator=g)
        return x.clamp(0, case.tq).sort(-1).values.flatten(3)

    run = torch.randint(0, 40, (), generator=g).item() + 1
    same, own = draw(case.tk // int(run) + 1).repeat_interleave(int(run), 2)[:, :, : case.tk], draw(case.tk)
    every_fourth = torch.randint(0, 4, (b, h, case.tk, 1), generator=g) == 0
    intervals = torch.where(every_fourth, own, same).int()
    row = case.tq // 2
    if row < case.tq:
        intervals[0, 0, :, 0].clamp_(max=row)
        intervals[0, 0, :, 1].clamp_(min=row + 1)
    return intervals


def _laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "bthd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "fused":
        b, h, t, d = x.shape
        buffer = x.new_full((b, t, 3, h, d), float("nan"))
        buffer[:, :, 1] = x.transpose(1, 2)
        return buffer[:, :, 1].transpose(1, 2)
    return x


def run(call: Call, kernel: str | None, *, deterministic: bool = False) -> Tensors:
    """Runs the forward and backward ops. Every buffer starts as NaN, so a number that is not written shows."""
    q, k, v, mask = call.q, call.k, call.v, call.mask

    def new(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        x = torch.empty(shape, dtype=dtype, device=q.device)
        return x.fill_(float("nan")) if dtype.is_floating_point else x.fill_(1)

    def scratch(*, backward: bool) -> Tensors:
        shapes = attention_workspace(q, k, v, mask, backward=backward, kernel=kernel, deterministic=deterministic)
        return {name: new(*form) for name, form in shapes.items()}

    o_shape, lse_shape = output_shapes(q, v, mask)
    o, lse = new(o_shape, q.dtype), new(lse_shape, lse_dtype(q.dtype))
    attention_fwd(q, k, v, mask, o=o, lse=lse, scratch=scratch(backward=False), kernel=kernel)
    grads = {name: new(tuple(x.shape), x.dtype) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    if mask.float_bias is not None:
        grads["dbias"] = new(tuple(mask.float_bias.shape), mask.float_bias.dtype)
    if mask.sinks is not None:
        grads["dsinks"] = torch.zeros_like(mask.sinks)
    attention_bwd(
        q, k, v, o, lse, call.do, call.dlse, mask, **grads,
        scratch=scratch(backward=True), kernel=kernel, deterministic=deterministic,
    )  # fmt: skip
    return {"o": o, "lse": lse, **grads}


def by_face(call: Call, **more: Any) -> Tensors:
    """Outputs and gradients of a call through autograd."""
    q, k, v = (x.detach().requires_grad_() for x in (call.q, call.k, call.v))
    mask, leaves = call.mask, {"dq": q, "dk": k, "dv": v}
    names = ("causal", "window", "scale", "softcap", "alibi_slopes", "dropout_p", "seed", "intervals")
    options = {name: getattr(mask, name) for name in names} | more
    if mask.sinks is not None:
        options["sinks"] = leaves["dsinks"] = mask.sinks.detach().requires_grad_()
    if mask.float_bias is not None:
        options["bias"] = leaves["dbias"] = mask.float_bias.detach().requires_grad_()
    elif mask.bias is not None:
        options["bias"] = mask.bias
    face = attention
    if mask.varlen:
        face = attention_varlen  # type: ignore[assignment]
        del options["intervals"]
        options |= {
            name: getattr(mask, name) for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        }
    o, lse = face(q, k, v, return_lse=True, **options)
    outputs, gradients = ((o, lse), (call.do, call.dlse)) if call.dlse is not None else ((o,), (call.do,))
    grads = torch.autograd.grad(outputs, tuple(leaves.values()), gradients, allow_unused=True)
    return {"o": o.detach(), "lse": lse.detach(), **dict(zip(leaves, grads, strict=True))}


def oracle(call: Call) -> Tensors:
    """The results of whole matrices in float64, on the call's device."""
    q, k, v, do = (x.double() for x in (call.q, call.k, call.v, call.do))
    o, lse = reference.forward(q, k, v, call.mask)
    g = reference.backward(q, k, v, do, None if call.dlse is None else call.dlse.double(), call.mask)
    return {"o": o, "lse": lse} | {name: x for name, x in g._asdict().items() if x is not None}


def bounds(call: Call, exact: Tensors, exp_error: float = 0.0) -> dict[str, Bound]:
    return attention_bounds(call.q, call.k, call.v, call.do, call.dlse, call.mask, exact, exp_error)


def check_call(call: Call, got: Tensors, exp_error: float = 0.0) -> None:
    """Holds `got`, all results of a call or some of them, to the closeness rule."""
    exact = oracle(call)
    assert_close(got, {name: exact[name] for name in got}, bounds(call, exact, exp_error))


AXES: dict[str, tuple[object, ...]] = {  # all options of a call, and sizes near multiples of a tile
    "dtype": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "dims": ((16, 16), (1, 1), (3, 24), (40, 5), (64, 64), (97, 97)),
    "heads": ((1, 1), (2, 1), (1, 3), (2, 2)),  # kv heads, and the query heads of each
    "b": (1, 3),
    "t": ((33, 33), (1, 1), (1, 113), (65, 31), (17, 64), (113, 113), (0, 5), (5, 0), (2, 16)),
    "band": (
        (False, None), (True, None), (False, (0, 0)), (False, (3, None)), (False, (None, 16)), (False, (40, 1)),
        (True, (16, 3)), (True, (None, None)),
    ),
    "scale": (None, 0.3, -0.2),
    "softcap": (0.0, 2.0, 30.0),
    "bias": ("", "bhqk", "hqk", "qk", "bk", "h", "BHQK", "BK", "QK"),
    "bias_dtype": ("float32", "own"),
    "alibi": ("", "h", "bh"),
    "sinks": (False, True),
    "intervals": ("", "2", "bh2", "h4", "b4"),
    "dropout_p": (0.0, 0.25),
    "dlse": (False, True),
    "layout": ("bhtd", "bthd", "fused"),
    "lengths": ((), ((40, 40),), ((5, 9), (0, 3), (33, 17), (7, 0))),
}  # fmt: skip


# packed sequences have none of these options
UNPACKED = {"bias": "", "bias_dtype": "float32", "t": (33, 33), "layout": "bhtd", "intervals": "", "b": 1}


def allowed(spec: Spec) -> bool:
    """False where one value makes another meaningless."""
    if spec.get("lengths") and any(spec.get(axis, value) != value for axis, value in UNPACKED.items()):
        return False
    return not (spec.get("bias_dtype") == "own" and not spec.get("bias", "qk").islower())


def case_of(spec: Spec) -> Case:
    """The case of a specification, which may have additional axes."""
    (hkv, group), (d, dv), (tq, tk), (causal, window) = spec["heads"], spec["dims"], spec["t"], spec["band"]
    same = {name: spec[name] for name in AXES if name not in ("heads", "dims", "t", "band", "bias_dtype")}
    bias_dtype = torch.float32 if spec["bias_dtype"] == "float32" else spec["dtype"]
    sizes: Any = {"hkv": hkv, "group": group, "d": d, "dv": dv, "tq": tq, "tk": tk}
    return Case(**sizes, causal=causal, window=window, bias_dtype=bias_dtype, **same)


LARGE_SCORES = (1e4, 1e6, 1e8, 1e10)
WITH_LARGE_SCORES = {  # the terms of a score; the scale is not a power of two
    "causal": Case(b=1, hkv=1, tq=70, tk=70, d=40, dv=40, causal=True, dlse=True),
    "not": Case(b=1, hkv=1, group=2, tq=33, tk=70, d=24, dv=24, scale=-0.3),
    "bias": Case(b=1, hkv=1, tq=33, tk=70, d=40, dv=40, bias="hqk", causal=True),
    "softcap": Case(b=1, hkv=1, tq=33, tk=70, d=40, dv=40, softcap=3e4),
    "alibi": Case(b=1, hkv=1, tq=33, tk=70, d=40, dv=40, alibi="h", causal=True, sinks=True),
    "dropout": Case(b=1, hkv=1, tq=33, tk=70, d=40, dv=40, dropout_p=0.25),
    "packed": Case(hkv=2, d=40, dv=40, causal=True, lengths=((33, 33), (5, 40))),
}


_T = st.sampled_from((0, 1, 2, 5, 16, 17, 31, 33, 63, 64, 65, 113))
_D = st.sampled_from((1, 3, 8, 16, 40, 64, 97))
_SIDE = st.sampled_from((None, 0, 1, 3, 16, 40))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Every feature with every other feature. Sizes are ragged, and small enough for whole float64 matrices."""
    dtype = draw(st.sampled_from((torch.float64, torch.float32, torch.bfloat16, torch.float16)))
    d = draw(_D)
    case = Case(
        b=draw(st.integers(1, 3)), hkv=draw(st.integers(1, 3)), group=draw(st.sampled_from((1, 1, 2, 3))),
        tq=draw(_T), tk=draw(_T), d=d, dv=draw(st.sampled_from((d, d, 5, 24))), dtype=dtype,
        causal=draw(st.booleans()), window=draw(st.sampled_from((None, None, (0, 0)))),
        scale=draw(st.sampled_from((None, None, 0.3, -0.2))), softcap=draw(st.sampled_from((0.0, 0.0, 2.0, 30.0))),
        alibi=draw(st.sampled_from(("", "", "h", "bh"))), sinks=draw(st.booleans()),
        dropout_p=draw(st.sampled_from((0.0, 0.0, 0.25))), dlse=draw(st.booleans()),
        layout=draw(st.sampled_from(("bhtd", "bthd", "fused"))),
    )  # fmt: skip
    if case.window is not None:
        case = replace(case, window=(draw(_SIDE), draw(_SIDE)))
    if draw(st.integers(0, 3)) == 0:
        lengths = st.tuples(st.integers(0, 40), st.integers(0, 40))
        return replace(case, lengths=tuple(draw(st.lists(lengths, min_size=1, max_size=4))))
    bias = draw(st.sampled_from(("", "", "bhqk", "hqk", "qk", "bk", "h", "BHQK", "BK", "QK")))
    intervals = draw(st.sampled_from(("", "2", "h2", "b4", "bh4")))
    return replace(case, bias=bias, bias_dtype=draw(st.sampled_from((torch.float32, dtype))), intervals=intervals)
