"""The three products of a linear layer with both factors in float8.

    x, dx (N, Cin)   w (Cout, Cin)   b (Cout,)   y, dy (N, Cout), bfloat16   dw (Cout, Cin), float32   N' = N rounded up to 16

    q(a) = round(clamp(a / s, ±L))           s = max|a| / L of the previous step: delayed scaling
    y  = (q(x) q(w)ᵀ) · s_x s_w + b          dx = (q(dy) q(w)) · s_dy s_w          dw += (q(dy)ᵀ q(x)) · s_dy s_x

x and w are rounded to e4m3 (L = 448, 4 significant bits). dy is rounded to e5m2 (L = 57,344, 3 significant bits), because the
magnitudes within one gradient differ by more than 2¹⁸, the range of e4m3. In e4m3, a magnitude below 2⁻⁶ s is rounded to a
multiple of 2⁻⁹ s; in e5m2, a magnitude below 2⁻¹⁴ s to a multiple of 2⁻¹⁶ s.

cuBLAS multiplies rows by rows, so a factor is kept in one order or in both: a8 (N, C), and a8t (C, N'), whose columns after N
are 0. `fp8_quantize_fwd` reads a once and writes both orders. Three ops do so for a factor that they compute in float32 and do
not store: `fp8_activation_fwd` for a = act(h), `fp8_activation_bwd` for dh = da ∘ act'(h), and `fp8_softmax_bwd` for the
gradient of logits.

    y = x8 · w8         dx = dy8 · w8t         dw = dy8t · x8t         A · B = A Bᵀ, by `fp8_product_fwd`

The `state` of a tensor (state.py) has s and the largest magnitudes since s was set, which rounding updates. `fp8_scale_step`,
called once at the beginning of a step, computes the next s from these. So s does not change within a step, and rounding a
tensor again gives the same bits. If the largest magnitude is 0 or not finite, s stays the same. Each tensor whose magnitude
grew more than 100-fold in one step is counted. Ranks first take the maximum of their largest magnitudes (largest.py), so that
all ranks have the same s.

`FP8_LINEAR` is the table of kernels: each module offers `workspace`, `product`, `quantize`, `activation`, `activation_bwd`,
`softmax_bwd` and `scale_step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Unpack

import torch
from torch import Tensor

from .. import gpu
from ..activation import KINDS
from ..checks import check_columns, check_given, check_param, check_tensor
from ..op import op
from ..scratch import Form, Shapes, TensorLike
from ..table import Kernel, Table, Where, takes_all
from .state import FIRST, FORMAT, LARGEST, STATE

FP8, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
EVEN = 16  # the sizes of a product are multiples of this
Factor = Literal["x", "w", "dy"]


class Problem(NamedTuple):
    """The properties of a product that decide which kernels accept it: its second factor w, the output to add to, and the
    device of x. w=None means a rounding without a product. summed: how many column sums of x's width the call forms."""

    x: TensorLike
    w: TensorLike | None
    added: TensorLike | None = None
    summed: int = 0


class Product(NamedTuple):
    """The output of a product, whether the product is added to it, and whether it is `precise` (`fp8_product_fwd`)."""

    out: Tensor
    accumulate: bool
    precise: bool


def _scaled_mm_refuses(problem: Problem) -> str | None:
    x, w, *_ = problem
    if x.device.type != "cuda":
        return f"needs a CUDA device, not {x.device.type}"
    version = gpu.capability(x.device)
    if version < (8, 9):
        return f"needs compute capability 8.9 or newer for float8 products; {x.device} has {version[0]}.{version[1]}"
    if w is not None and any(size % EVEN for size in w.shape):
        return f"takes w with both sizes multiples of {EVEN}, not {tuple(w.shape)}"
    return gpu.refusal(Form((1, 1), torch.bfloat16, x.device))


CHECK = "runs only if requested by name: it computes the same product in float32, to check the other kernel"
FP8_LINEAR = Table(
    "fp8_linear",
    (
        Kernel("scaled_mm", "fp8_linear.scaled_mm", _scaled_mm_refuses),
        Kernel("torch", "fp8_linear.torch_ops", takes_all, by_name_only=CHECK),
    ),
)


def even(n: int) -> int:
    """N', the columns of a transposed factor of n rows."""
    return -(-n // EVEN) * EVEN


def format_of(factor: Factor) -> torch.dtype:
    return GRADIENT if factor == "dy" else FP8


def fp8_product_workspace(b8: TensorLike, added: TensorLike | None = None, *, kernel: str | None = None) -> Shapes:
    """Name → (shape, dtype) of the scratch of a product. added: the output, if the product is added to it."""
    return FP8_LINEAR.workspace(Problem(b8, b8, added), kernel=kernel)


@op(accumulates=("state",))
def fp8_quantize_fwd(
    x: Tensor, *, x8: Tensor | None = None, x8t: Tensor | None = None, state: Tensor, kernel: str | None = None
) -> None:
    """x8 = q(x)   x8t = q(x)ᵀ; updates the magnitudes in state."""
    check_columns("x", x)
    _check_width("x", x.shape[1])
    _check_rounded(x.device, (x.shape[0], x.shape[1]), x8, x8t, state)
    FP8_LINEAR.run("quantize", Problem(x, None), x, x8=x8, x8t=x8t, state=state, kernel=kernel)


@op(accumulates=("state",))
def fp8_activation_fwd(
    h: Tensor,
    kind: str,
    *,
    a8: Tensor | None = None,
    a8t: Tensor | None = None,
    state: Tensor,
    kernel: str | None = None,
) -> None:
    """a8 = q(act(h))   a8t = q(act(h))ᵀ; updates the magnitudes of act(h) in state. h is contiguous. swiglu: h = [up, gate]."""
    n, c = _check_activation(h, kind)
    _check_rounded(h.device, (n, c), a8, a8t, state)
    FP8_LINEAR.run("activation", Problem(h, None), h, kind, a8=a8, a8t=a8t, state=state, kernel=kernel)


def fp8_activation_workspace(da: TensorLike, kind: str, *, sums: bool, kernel: str | None = None) -> Shapes:
    """Name → (shape, dtype) of the scratch of `fp8_activation_bwd`, with column sums or without."""
    return FP8_LINEAR.workspace(Problem(da, None, None, _sums(kind) if sums else 0), kernel=kernel)


@op(accumulates=("dh_sum",), adds=("state",))
def fp8_activation_bwd(
    da: Tensor, h: Tensor, kind: str, *,
    dh8: Tensor | None = None, dh8t: Tensor | None = None, a: Tensor | None = None, dh_sum: Tensor | None = None,
    accumulate: bool = True, state: Tensor, **where: Unpack[Where],
) -> None:  # fmt: skip
    """dh = da ∘ act'(h)   dh8 = q(dh)   dh8t = q(dh)ᵀ   a = act(h)   dh_sum += Σ_n dh; updates the
    magnitudes of dh in state. swiglu: h = [up, gate] and dh = [dup, dgate]. a may be h; swiglu: da."""
    n, c = _check_activation(h, kind)
    check_tensor("da", da, (n, c), h.dtype, h.device)
    check_given(h.device, ("a", a, (n, c), h.dtype), ("dh_sum", dh_sum, (h.shape[1],), torch.float32))
    _check_rounded(h.device, (n, h.shape[1]), dh8, dh8t, state)
    if not da.is_contiguous() or not (a is None or a.is_contiguous()):
        raise ValueError("da, a: got other strides than those of a contiguous tensor; accepted: contiguous tensors")
    sums = () if dh_sum is None else dh_sum.chunk(_sums(kind))
    FP8_LINEAR.run(
        "activation_bwd", Problem(da, None, None, len(sums)), da, h, kind,
        dh8=dh8, dh8t=dh8t, a=a, sums=sums, accumulate=accumulate, state=state, **where,
    )  # fmt: skip


def _sums(kind: str) -> int:
    return 2 if kind == "swiglu" else 1


def _check_activation(h: Tensor, kind: str) -> tuple[int, int]:
    """Checks h, and returns the shape of act(h)."""
    if kind not in (*KINDS, "swiglu"):
        raise ValueError(f"kind: got {kind!r}; accepted: one of {', '.join(map(repr, (*KINDS, 'swiglu')))}")
    if not h.is_contiguous():
        raise ValueError(f"h: got strides {h.stride()}; accepted: a contiguous tensor")
    _check_width("act(h)", h.shape[1] // _sums(kind))
    return h.shape[0], h.shape[1] // _sums(kind)


@op()
def fp8_softmax_bwd(
    logits: Tensor, targets: Tensor, row_max: Tensor, factor: Tensor, inv_total: Tensor, softcap: float, state: Tensor, *,
    dl8: Tensor, dl8t: Tensor, kernel: str | None = None,
) -> None:  # fmt: skip
    """dl = exp(l − row_max) · factor, minus inv_total in the target's column
    dl8 = q(dl)   dl8t = q(dl)ᵀ. l is the logit, capped if softcap ≠ 0: then dl is multiplied by 1 − (l / softcap)². row_max and
    factor (N,) are those of `softmax` in kernels/cross_entropy. The caller has set the scale, and no magnitudes are kept."""
    n, v = logits.shape
    check_given(logits.device, ("targets", targets, (n,), torch.int64), ("inv_total", inv_total, (), torch.float32))
    check_given(logits.device, ("row_max", row_max, (n,), torch.float32), ("factor", factor, (n,), torch.float32))
    check_columns("logits", logits)
    _check_width("logits", v)
    _check_rounded(logits.device, (n, v), dl8, dl8t, state)
    reads = logits, targets, row_max, factor, inv_total, softcap
    FP8_LINEAR.run("softmax_bwd", Problem(logits, None), *reads, dl8=dl8, dl8t=dl8t, state=state, kernel=kernel)


@op(accumulates=("out",))
def fp8_product_fwd(
    a8: Tensor, a_state: Tensor, b8: Tensor, b_state: Tensor, b: Tensor | None = None, *,
    out: Tensor, accumulate: bool = True, precise: bool = False, **where: Unpack[Where],
) -> None:  # fmt: skip
    """out += a8 b8ᵀ · s_a s_b; accumulate=False: out = a8 b8ᵀ · s_a s_b + b.     a8 (M, K)   b8 (P, K)   b (P,)   out (M, P)
    precise: sums of more than 128 products are in float32 (scaled_mm.py)."""
    (m, k), p = a8.shape, b8.shape[0]
    for name, x in (("a8", a8), ("b8", b8)):
        if x.dtype not in (FP8, GRADIENT):
            raise ValueError(f"{name}: got {x.dtype}; accepted: {FP8} or {GRADIENT}")
        check_columns(name, x)
    check_tensor("b8", b8, (p, k), b8.dtype, out.device)
    check_tensor("out", out, (m, p), out.dtype, a8.device)
    for name, state in (("a_state", a_state), ("b_state", b_state)):
        check_tensor(name, state, STATE, torch.float32, out.device)
    if b is not None:
        check_param("b", b, (p,), out)
        if accumulate:
            raise ValueError("b: got a bias with accumulate=True; accepted: None")
    problem = Problem(out, b8, out if accumulate else None)
    into = Product(out, accumulate, precise)
    FP8_LINEAR.run("product", problem, a8, a_state, b8, b_state, b, into=into, **where)


@op(accumulates=("states",))
def fp8_scale_step(*, states: Sequence[Tensor], jumps: Tensor, kernel: str | None = None) -> None:
    """For each state, s = largest magnitude / L, and the magnitudes are reset to 0. jumps = the number of states whose largest
    magnitude grew more than 100-fold in one step."""
    for state in states:
        check_tensor("states", state, STATE, torch.float32, jumps.device)
    check_tensor("jumps", jumps, (), torch.float32, jumps.device)
    FP8_LINEAR.run("scale_step", Problem(jumps, None), states=states, jumps=jumps, kernel=kernel)


def fill_state(state: Tensor, factor: Factor) -> None:
    """Sets the state before the first step, with an assumed magnitude."""
    state.zero_()
    state[0], state[FORMAT] = FIRST[factor] / LARGEST[factor], LARGEST[factor]


def _check_width(name: str, columns: int) -> None:
    """Triton 3.6 stores some bytes of narrower stores wrongly."""
    if columns % EVEN:
        raise ValueError(f"{name}: got {columns} columns; accepted: a multiple of {EVEN}, with any number of rows")


def _check_rounded(
    device: torch.device, shape: tuple[int, int], x8: Tensor | None, x8t: Tensor | None, state: Tensor
) -> None:
    n, c = shape
    check_tensor("state", state, STATE, torch.float32, device)
    if x8 is None and x8t is None:
        raise ValueError("x8, x8t: got neither; accepted: at least one")
    for name, x, wanted in (("x8", x8, (n, c)), ("x8t", x8t, (c, even(n)))):
        if x is None:
            continue
        check_tensor(name, x, wanted, x.dtype, device)
        in_rows = x.is_contiguous() if name == "x8" else x.stride(1) == 1
        if x.dtype not in (FP8, GRADIENT) or not in_rows:
            raise ValueError(
                f"{name}: got {x.dtype}, strides {x.stride()}; accepted: {FP8} or {GRADIENT}, contiguous rows"
            )
