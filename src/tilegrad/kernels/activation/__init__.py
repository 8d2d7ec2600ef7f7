"""Activations of the feed-forward layer, elementwise.       h, a, gate, up: one shape, any strides

    gelu   a = h σ(2u), u = √(2/π) (h + 0.044715 h³)     (as in GPT-2: the tanh approximation)
    tanh   a = tanh h            dh = da · 4 σ(2h) σ(−2h)  = da (1 − tanh² h), from h alone
    relu   a = max(h, 0)         dh = da where h > 0
    swiglu a = silu(gate) ∘ up   dup = da ∘ silu(gate)   dgate = da ∘ up ∘ silu'(gate)   silu(g) = g σ(g)

The backward reads h, so a need not be saved: if an output a is passed, the backward recomputes it to the same bits. In place:
dh may be da, a may be h; dgate may be da, a may be gate. For (N, C) it can also write column sums: Σ_n dh, or Σ_n dgate and
Σ_n dup, is the bias gradient of the projection before the activation (accumulate=False overwrites it).

invariant=True: the bits of a number of a depend on the same numbers of h, gate and up alone. torch computes the last numbers
of a thread's share by other functions than the others, so gelu, tanh and swiglu are then the native kernel's.

`ACTIVATION` is the table of kernels. Each module offers `workspace` (for column sums), `fwd`, `bwd` and, if it supports
swiglu, `swiglu_fwd` and `swiglu_bwd`.
"""

from __future__ import annotations

from typing import NamedTuple, Unpack

from torch import Tensor

from .. import gpu
from ..checks import check_given, check_tensor
from ..cpu import rows
from ..op import op
from ..scratch import Shapes, TensorLike, accumulation_dtype
from ..table import Kernel, Table, Where

KINDS = ("gelu", "tanh", "relu")
NO_SUMS = {"sums": False}  # option of a `workspace`


class Problem(NamedTuple):
    """An activation as the table sees it: the input, and the other tensors that the call reads and writes, all of one shape and
    dtype. A `Form` counts as contiguous. invariant: the bits of a number of a must not depend on where it is."""

    x: TensorLike
    kind: str
    others: tuple[Tensor, ...] = ()
    invariant: bool = False


def _native_refuses(problem: Problem) -> str | None:
    if problem.kind == "relu" or (problem.kind != "gelu" and not problem.invariant):
        return f"has gelu and, for invariant problems, tanh and swiglu, not {problem.kind}"
    refusal = rows.refusal(problem.x)
    return "takes contiguous tensors" if refusal is None and not _contiguous(problem) else refusal


def _triton_refuses(problem: Problem) -> str | None:
    refusal = gpu.refusal(problem.x)
    if refusal is None and not _contiguous(problem) and not all(map(_in_rows, (problem.x, *problem.others))):
        return "takes contiguous tensors, or rows with contiguous columns"
    return refusal


def _torch_refuses(problem: Problem) -> str | None:
    if problem.invariant and problem.kind != "relu":
        return "computes the last numbers of a thread's share by other functions, and the problem is invariant"
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


def activation_workspace(h: TensorLike, kind: str, *, invariant: bool = False, kernel: str | None = None) -> Shapes:
    """Name → (shape, dtype) of the scratch of a backward with column sums; "swiglu" is also a kind here."""
    return ACTIVATION.workspace(Problem(h, kind, (), invariant), kernel=kernel)


def _check(kind: str, h: Tensor, **others: Tensor | None) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}; accepted: one of {', '.join(map(repr, KINDS))}")
    check_given(h.device, *((name, other, tuple(h.shape), h.dtype) for name, other in others.items()))


def _check_sums(h: Tensor, **sums: Tensor | None) -> bool:
    """Whether column sums are requested."""
    if all(x is None for x in sums.values()):
        return False
    if h.ndim != 2:
        raise ValueError(f"{', '.join(sums)}: got shape {tuple(h.shape)} for column sums; accepted: (N, C)")
    check_given(h.device, *((name, x, (h.shape[1],), accumulation_dtype(h.dtype)) for name, x in sums.items()))
    return True


@op(one_kernel=True)
def activation_fwd(h: Tensor, kind: str, *, a: Tensor, invariant: bool = False, kernel: str | None = None) -> None:
    """a = kind(h); a may be h."""
    _check(kind, h, a=a)
    ACTIVATION.run("fwd", Problem(h, kind, (a,), invariant), h, kind, options=NO_SUMS, a=a, kernel=kernel)


@op(accumulates=("dh_sum",))
def activation_bwd(
    da: Tensor, h: Tensor, kind: str, *,
    dh: Tensor, a: Tensor | None = None, dh_sum: Tensor | None = None, accumulate: bool = True, invariant: bool = False,
    **where: Unpack[Where],
) -> None:  # fmt: skip
    """dh = da ∘ kind'(h)   a = kind(h)   dh_sum += Σ_n dh; dh may be da, and a may be h."""
    _check(kind, h, da=da, dh=dh, a=a)
    options = {"sums": _check_sums(h, dh_sum=dh_sum)}
    problem = Problem(h, kind, (da, dh) if a is None else (da, dh, a), invariant)
    ACTIVATION.run(
        "bwd", problem, da, h, kind, options=options, dh=dh, a=a, dh_sum=dh_sum, accumulate=accumulate, **where
    )


@op(one_kernel=True)
def swiglu_fwd(gate: Tensor, up: Tensor, *, a: Tensor, invariant: bool = False, kernel: str | None = None) -> None:
    """a = silu(gate) ∘ up"""
    for name, other in (("up", up), ("a", a)):
        check_tensor(name, other, tuple(gate.shape), gate.dtype, gate.device)
    problem = Problem(gate, "swiglu", (up, a), invariant)
    ACTIVATION.run("swiglu_fwd", problem, gate, up, options=NO_SUMS, a=a, kernel=kernel)


@op(accumulates=("dgate_sum", "dup_sum"))
def swiglu_bwd(
    da: Tensor, gate: Tensor, up: Tensor, *,
    dgate: Tensor, dup: Tensor, a: Tensor | None = None,
    dgate_sum: Tensor | None = None, dup_sum: Tensor | None = None, accumulate: bool = True, invariant: bool = False,
    **where: Unpack[Where],
) -> None:  # fmt: skip
    """dup = da ∘ silu(gate)   dgate = da ∘ up ∘ silu'(gate)   a = silu(gate) ∘ up   dgate_sum += Σ_n dgate
    dup_sum += Σ_n dup; dgate may be da, and a may be gate."""
    for name, other in (("da", da), ("up", up), ("dgate", dgate), ("dup", dup)):
        check_tensor(name, other, tuple(gate.shape), gate.dtype, gate.device)
    check_given(gate.device, ("a", a, tuple(gate.shape), gate.dtype))
    if (dgate_sum is None) != (dup_sum is None):
        raise ValueError("dgate_sum, dup_sum: got one of the two; accepted: both or none")
    options = {"sums": _check_sums(gate, dgate_sum=dgate_sum, dup_sum=dup_sum)}
    others = (da, up, dgate, dup) if a is None else (da, up, dgate, dup, a)
    ACTIVATION.run(
        "swiglu_bwd", Problem(gate, "swiglu", others, invariant), da, gate, up, options=options,
        dgate=dgate, dup=dup, a=a, dgate_sum=dgate_sum, dup_sum=dup_sum, accumulate=accumulate, **where,
    )  # fmt: skip
