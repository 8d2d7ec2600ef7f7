"""Activations of the feed-forward layer, elementwise.       h, a, gate, up: one shape

    gelu   a = h σ(2u), u = √(2/π) (h + 0.044715 h³)     (as in GPT-2: the tanh approximation)
    tanh   a = tanh h            dh = da · 4 σ(2h) σ(−2h)  = da (1 − tanh² h), from h alone
    relu   a = max(h, 0)         dh = da where h > 0
    relu2  a = max(h, 0)²        dh = 2 da max(h, 0)
    swiglu a = silu(gate) ∘ up   dup = da ∘ silu(gate)   dgate = da ∘ up ∘ silu'(gate)   silu(g) = g σ(g)

For swiglu, up and gate are the halves of the columns of one matrix up_gate (N, 2·F); a and da are (N, F).
The backward reads h, so a need not be saved: if an output a is passed, the backward recomputes it to the same bits. In place:
dh may be da, a may be h; dup_gate may be up_gate, a may be da. For (N, C) the backward can also write column sums: Σ_n dh, or
Σ_n dup_gate, is the bias gradient of the projection before the activation (accumulate=False overwrites it).

invariant=True: the bits of an element of a depend only on the same element of h, gate and up. torch computes the last elements
of a thread's share with other functions than the rest, so the kernel `torch` refuses invariant gelu, tanh and swiglu.

`ACTIVATION` is the table of kernels. Each module offers `workspace` (for a backward), `fwd`, `bwd` and, if it supports
swiglu, `swiglu_fwd` and `swiglu_bwd`, which take gate and up as two matrices, and sums of dgate and of dup.
"""

from __future__ import annotations

from typing import NamedTuple, Unpack

from torch import Tensor

from .. import gpu
from ..checks import check_given
from ..cpu import rows
from ..op import op
from ..scratch import Shapes, TensorLike, accumulation_dtype
from ..table import Kernel, Table, Where

KINDS = ("gelu", "tanh", "relu", "relu2")
NATIVE_KINDS = ("gelu", "relu2")  # native forward and backward; tanh and swiglu: only the forward, if invariant
FORWARD = {"backward": False, "sums": False}  # options of a `workspace`


class Problem(NamedTuple):
    """The properties of an activation that decide which kernels accept it: the input, and the other tensors that the call reads
    and writes, all of one shape and dtype. A `Form` counts as contiguous. invariant: the bits of an element of a must not
    depend on its place."""

    x: TensorLike
    kind: str
    others: tuple[Tensor, ...] = ()
    invariant: bool = False


class Sums(NamedTuple):
    """The column sums that a backward computes, one for each gradient or none, and whether it adds to them."""

    tensors: tuple[Tensor, ...]
    accumulate: bool


def _native_refuses(problem: Problem) -> str | None:
    if problem.kind not in NATIVE_KINDS and (problem.kind == "relu" or not problem.invariant):
        return f"has gelu, relu2 and, for invariant problems, tanh and swiglu, not {problem.kind}"
    refusal = rows.refusal(problem.x)
    if refusal is None and problem.kind != "swiglu" and not _contiguous(problem):
        return "takes contiguous tensors"
    return refusal


def _triton_refuses(problem: Problem) -> str | None:
    refusal = gpu.refusal(problem.x)
    if refusal is None and not _contiguous(problem) and not all(map(_in_rows, (problem.x, *problem.others))):
        return "takes contiguous tensors, or rows with contiguous columns"
    return refusal


def _torch_refuses(problem: Problem) -> str | None:
    if problem.invariant and problem.kind not in ("relu", "relu2"):
        return "computes the last elements of a thread's share with other functions, and the problem is invariant"
    return None


def _contiguous(problem: Problem) -> bool:
    for x in (problem.x, *problem.others):  # noqa: SIM110  # a generator would slow down small calls
        if isinstance(x, Tensor) and not x.is_contiguous():
            return False
    return True


def _in_rows(x: TensorLike) -> bool:
    return isinstance(x, Tensor) and x.ndim == 2 and (x.stride(1) == 1 or x.shape[1] == 1)


ACTIVATION = Table(
    "activation",
    (
        Kernel("native", "activation.cpu", _native_refuses),
        Kernel("triton", "activation.triton_ops", _triton_refuses),
        Kernel("torch", "activation.torch_ops", _torch_refuses),
    ),
)


def activation_workspace(
    h: TensorLike, kind: str, *, sums: bool = True, invariant: bool = False, kernel: str | None = None
) -> Shapes:
    """Name → (shape, dtype) of the scratch of a backward. sums: it writes column sums. kind may also be "swiglu"; h
    then has the shape of a."""
    return ACTIVATION.workspace(Problem(h, kind, (), invariant), kernel=kernel, backward=True, sums=sums)


def _check(kind: str, h: Tensor, **others: Tensor | None) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}; accepted: one of {', '.join(map(repr, KINDS))}")
    check_given(h.device, *((name, other, tuple(h.shape), h.dtype) for name, other in others.items()))


def _check_sums(h: Tensor, **sums: Tensor | None) -> bool:
    """Whether column sums are requested."""
    ((name, x),) = sums.items()
    if x is None:
        return False
    if h.ndim != 2:
        raise ValueError(f"{name}: got shape {tuple(h.shape)} for column sums; accepted: (N, C)")
    check_given(h.device, (name, x, (h.shape[1],), accumulation_dtype(h.dtype)))
    return True


def _halves(up_gate: Tensor) -> tuple[Tensor, Tensor]:
    """(up, gate), views of the columns."""
    f = up_gate.shape[1] // 2
    return up_gate[:, :f], up_gate[:, f:]


def _check_swiglu(up_gate: Tensor, **others: tuple[Tensor | None, int]) -> None:
    """others: name → (tensor, its columns in halves of up_gate)"""
    if up_gate.ndim != 2 or up_gate.shape[1] % 2 or not up_gate.is_contiguous():
        got = f"shape {tuple(up_gate.shape)} with strides {up_gate.stride()}"
        raise ValueError(f"up_gate: got {got}; accepted: a contiguous matrix (N, 2·F)")
    (n, columns), dtype = up_gate.shape, up_gate.dtype
    check_given(up_gate.device, *((name, x, (n, k * columns // 2), dtype) for name, (x, k) in others.items()))
    for name, (x, _) in others.items():
        if x is not None and not x.is_contiguous():
            raise ValueError(f"{name}: got strides {x.stride()}; accepted: a contiguous tensor")


@op(one_kernel=True)
def activation_fwd(h: Tensor, kind: str, *, a: Tensor, invariant: bool = False, kernel: str | None = None) -> None:
    """a = kind(h); a may be h."""
    _check(kind, h, a=a)
    ACTIVATION.run("fwd", Problem(h, kind, (a,), invariant), h, kind, options=FORWARD, a=a, kernel=kernel)


@op(accumulates=("dh_sum",))
def activation_bwd(
    da: Tensor, h: Tensor, kind: str, *,
    dh: Tensor, a: Tensor | None = None, dh_sum: Tensor | None = None, accumulate: bool = True, invariant: bool = False,
    **where: Unpack[Where],
) -> None:  # fmt: skip
    """dh = da ∘ kind'(h)   a = kind(h)   dh_sum += Σ_n dh; dh may be da, and a may be h."""
    _check(kind, h, da=da, dh=dh, a=a)
    options = {"backward": True, "sums": _check_sums(h, dh_sum=dh_sum)}
    problem = Problem(h, kind, (da, dh) if a is None else (da, dh, a), invariant)
    sums = Sums(() if dh_sum is None else (dh_sum,), accumulate)
    ACTIVATION.run("bwd", problem, da, h, kind, options=options, dh=dh, a=a, sums=sums, **where)


@op(one_kernel=True)
def swiglu_fwd(up_gate: Tensor, *, a: Tensor, invariant: bool = False, kernel: str | None = None) -> None:
    """a = silu(gate) ∘ up       up_gate (N, 2·F) = [up, gate]   a (N, F); both contiguous"""
    _check_swiglu(up_gate, a=(a, 1))
    up, gate = _halves(up_gate)
    problem = Problem(gate, "swiglu", (up, a), invariant)
    ACTIVATION.run("swiglu_fwd", problem, gate, up, options=FORWARD, a=a, kernel=kernel)


@op(accumulates=("dup_gate_sum",))
def swiglu_bwd(
    da: Tensor, up_gate: Tensor, *,
    dup_gate: Tensor, a: Tensor | None = None, dup_gate_sum: Tensor | None = None, accumulate: bool = True,
    invariant: bool = False, **where: Unpack[Where],
) -> None:  # fmt: skip
    """dup = da ∘ silu(gate)   dgate = da ∘ up ∘ silu'(gate)   a = silu(gate) ∘ up   dup_gate_sum += Σ_n dup_gate;
    dup_gate may be up_gate, and a may be da."""
    _check_swiglu(up_gate, da=(da, 1), dup_gate=(dup_gate, 2), a=(a, 1))
    options = {"backward": True, "sums": _check_sums(up_gate, dup_gate_sum=dup_gate_sum)}
    (up, gate), (dup, dgate) = _halves(up_gate), _halves(dup_gate)
    f = gate.shape[1]
    sums = Sums(() if dup_gate_sum is None else (dup_gate_sum[f:], dup_gate_sum[:f]), accumulate)
    problem = Problem(gate, "swiglu", (da, up, dgate, dup) if a is None else (da, up, dgate, dup, a), invariant)
    ACTIVATION.run("swiglu_bwd", problem, da, gate, up, options=options, dgate=dgate, dup=dup, a=a, sums=sums, **where)
