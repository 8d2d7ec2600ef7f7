"""Activations of the feed-forward layer, elementwise.       h, a, gate, up: one shape, any strides

    gelu   a = h σ(2u), u = √(2/π) (h + 0.044715 h³)     (GPT-2's, the tanh form)
    tanh   a = tanh h            dh = da · 4 σ(2h) σ(−2h)  = da (1 − tanh² h), from h alone
    relu   a = max(h, 0)         dh = da where h > 0
    swiglu a = silu(gate) ∘ up   dup = da ∘ silu(gate)   dgate = da ∘ up ∘ silu'(gate)   silu(g) = g σ(g)

The backward reads h, so a need not be kept. dh may be da itself, and dgate may be da. `ACTIVATION` is the table of kernels:
each module offers `fwd` and `bwd`, and `swiglu_fwd` and `swiglu_bwd` where it takes swiglu. None needs scratch.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .. import gpu
from ..checks import check_tensor
from ..cpu import rows
from ..op import op
from ..table import Kernel, Table, takes_all

KINDS = ("gelu", "tanh", "relu")


class Problem(NamedTuple):
    """An activation as the table sees it; the tensors are all that a call reads and writes, of one shape and dtype."""

    kind: str
    tensors: tuple[Tensor, ...]


def _native_refuses(problem: Problem) -> str | None:
    if problem.kind != "gelu":
        return f"has gelu, not {problem.kind}"
    reason = rows.refusal(problem.tensors[0])
    if reason is not None:
        return reason
    for x in problem.tensors:
        if not x.is_contiguous():
            return "takes contiguous tensors"
    return None


def _triton_refuses(problem: Problem) -> str | None:
    tensors = problem.tensors
    refusal = gpu.refusal(tensors[0])
    if refusal is None and not all(x.is_contiguous() for x in tensors) and not all(map(_in_rows, tensors)):
        return "takes contiguous tensors, or rows whose columns lie side by side"
    return refusal


def _in_rows(x: Tensor) -> bool:
    return x.ndim == 2 and (x.stride(1) == 1 or x.shape[1] == 1)


ACTIVATION = Table(
    "activation",
    (
        Kernel("native", "activation.cpu", _native_refuses),
        Kernel("triton", "activation.triton_ops", _triton_refuses),
        Kernel("torch", "activation.torch_ops", takes_all),
    ),
)


def _check(kind: str, h: Tensor, **others: Tensor) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}; accepted: one of {', '.join(map(repr, KINDS))}")
    for name, other in others.items():
        check_tensor(name, other, tuple(h.shape), h.dtype, h.device)


@op()
def activation_fwd(h: Tensor, kind: str, *, a: Tensor, kernel: str | None = None) -> None:
    """a = kind(h); a may be h."""
    _check(kind, h, a=a)
    ACTIVATION.select(Problem(kind, (h, a)), kernel).load().fwd(h, kind, a=a)


@op()
def activation_bwd(da: Tensor, h: Tensor, kind: str, *, dh: Tensor, kernel: str | None = None) -> None:
    """dh = da ∘ kind'(h); dh may be da."""
    _check(kind, h, da=da, dh=dh)
    ACTIVATION.select(Problem(kind, (h, da, dh)), kernel).load().bwd(da, h, kind, dh=dh)


@op()
def swiglu_fwd(gate: Tensor, up: Tensor, *, a: Tensor, kernel: str | None = None) -> None:
    """a = silu(gate) ∘ up"""
    for name, other in (("up", up), ("a", a)):
        check_tensor(name, other, tuple(gate.shape), gate.dtype, gate.device)
    ACTIVATION.select(Problem("swiglu", (gate, up, a)), kernel).load().swiglu_fwd(gate, up, a=a)


@op()
def swiglu_bwd(da: Tensor, gate: Tensor, up: Tensor, *, dgate: Tensor, dup: Tensor, kernel: str | None = None) -> None:
    """dup = da ∘ silu(gate)   dgate = da ∘ up ∘ silu'(gate); dgate may be da."""
    for name, other in (("da", da), ("up", up), ("dgate", dgate), ("dup", dup)):
        check_tensor(name, other, tuple(gate.shape), gate.dtype, gate.device)
    chosen = ACTIVATION.select(Problem("swiglu", (da, gate, up, dgate, dup)), kernel)
    chosen.load().swiglu_bwd(da, gate, up, dgate=dgate, dup=dup)
