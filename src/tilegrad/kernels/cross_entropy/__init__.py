"""Cross-entropy that stores the logits of one chunk of rows at a time.

    x (N, C)   w (V, C)   targets (N,) int64, −1 = ignored

    l = x wᵀ   p = softmax(l)   nll = logsumexp(l) − l[target]
    loss = Σ over targets of nll · inv_total
    dl = (p − onehot(target)) · inv_total     dx = dl w     dw += dlᵀ x        (0 in rows without a target)
                                                                               (accumulate=False: dw = dlᵀ x)

With a bias (V,) and `Terms` c = softcap, ε = label_smoothing and z = z_loss:

    l = x wᵀ + bias      l ← c · tanh(l / c)      lse = logsumexp(l)
    nll = (1 − ε) (lse − l[target]) + ε (lse − mean l) + z · lse²
    dl = ((1 + 2 z lse) p − (1 − ε) onehot(target) − ε / V) · (1 − (l / c)²) · inv_total       dbias += Σ_n dl

inv_total is 1 / (number of targets of the whole step), a 0-d tensor, so that micro-batches add up to one large batch. It may
also be (N,), one factor for each row. `losses` (N,) is nll · inv_total of each row, and 0 without a target. Rows are
processed in chunks: the logits of a chunk are overwritten by their gradient, and dx may be x. With loss, `cross_entropy_bwd` is
forward and backward on one set of logits; without, dx and dw have the same bits. `CROSS_ENTROPY` is the table of kernels: each
module offers `workspace` and `run`. The op `linear` computes the products; invariant=True is passed to `linear_fwd` for the
logits.

For a loss with other products (kernels/fp8_head.py) a module also offers `softmax`, `softmax_workspace` for this many logits or
fewer, and `total`, the sum of losses. `softmax` writes losses of the capped logits l. row_max and factor, if they are not None,
give p · inv_total = exp(l − row_max) · factor. A row without a target has row_max = ∞ and factor = 0.
"""

from __future__ import annotations

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from .. import gpu
from ..checks import check_given, check_param
from ..op import op
from ..scratch import Shapes, TensorLike, accumulation_dtype
from ..table import BACKWARD, FORWARD, Where
from .terms import PLAIN, Terms


class Problem(NamedTuple):
    """The properties of a loss that decide which kernels accept it: shapes, dtypes, and the device of x. invariant: as in
    `linear_fwd`."""

    x: TensorLike
    w: TensorLike
    invariant: bool = False
    bias: TensorLike | None = None
    terms: Terms = PLAIN


def _triton_refuses(problem: Problem) -> str | None:
    if problem.x.dtype == torch.float16:
        return "takes bfloat16 and float32, not float16: p · inv_total underflows in float16"
    return gpu.refusal(problem.x)


class Inputs(NamedTuple):
    """Inputs of a loss. invariant: as in `linear_fwd`."""

    x: Tensor
    w: Tensor
    targets: Tensor
    inv_total: Tensor
    bias: Tensor | None = None
    invariant: bool = False
    terms: Terms = PLAIN


class Outputs(NamedTuple):
    """Outputs of a loss; None: not computed. accumulate: whether the op adds to dw and dbias, instead of overwriting them."""

    loss: Tensor | None
    dx: Tensor | None = None
    dw: Tensor | None = None
    accumulate: bool = True
    losses: Tensor | None = None
    dbias: Tensor | None = None

    @property
    def has_gradients(self) -> bool:
        return not (self.dx is None and self.dw is None and self.dbias is None)


CROSS_ENTROPY = gpu.triton_else_torch("cross_entropy", _triton_refuses)


def cross_entropy_workspace(
    x: TensorLike, w: TensorLike, *,
    backward: bool, invariant: bool = False, bias: TensorLike | None = None, terms: Terms = PLAIN,
    kernel: str | None = None,
) -> Shapes:  # fmt: skip
    """Name → (shape, dtype) of the scratch of `cross_entropy_fwd` or, with backward=True, of `cross_entropy_bwd`."""
    return CROSS_ENTROPY.workspace(Problem(x, w, invariant, bias, terms), kernel=kernel, backward=backward)


@op()
def cross_entropy_fwd(
    x: Tensor, w: Tensor, targets: Tensor, inv_total: Tensor, bias: Tensor | None = None, *,
    loss: Tensor | None = None, losses: Tensor | None = None, invariant: bool = False, terms: Terms = PLAIN,
    **where: Unpack[Where],
) -> None:  # fmt: skip
    """Overwrites loss (0-d) and losses (N,), if they are given."""
    out = Outputs(loss, losses=losses)
    _run(Inputs(x, w, targets, inv_total, bias, invariant, terms), out, FORWARD, where)


@op(accumulates=("dw", "dbias"))
def cross_entropy_bwd(
    x: Tensor, w: Tensor, targets: Tensor, inv_total: Tensor, bias: Tensor | None = None, *,
    loss: Tensor | None = None, dx: Tensor | None = None, dw: Tensor | None = None, dbias: Tensor | None = None,
    accumulate: bool = True, invariant: bool = False, terms: Terms = PLAIN, **where: Unpack[Where],
) -> None:  # fmt: skip
    """loss, if it is given, and dx are overwritten; dw and dbias are accumulated (accumulate=False: overwritten)."""
    out = Outputs(loss, dx, dw, accumulate, dbias=dbias)
    _run(Inputs(x, w, targets, inv_total, bias, invariant, terms), out, BACKWARD, where)


def _run(inputs: Inputs, out: Outputs, options: dict[str, bool], where: Where) -> None:
    x, w, targets, inv_total, bias, invariant, terms = inputs
    check_loss(x, w, targets, inv_total, out, "w")
    if bias is not None:
        check_param("bias", bias, (w.shape[0],), x)
    for gradient in (out.dw, out.dbias):
        if gradient is not None and not out.accumulate and not x.shape[0]:
            gradient.zero_()
    CROSS_ENTROPY.run("run", Problem(x, w, invariant, bias, terms), inputs, options=options, out=out, **where)


def check_loss(x: Tensor, w: Tensor, targets: Tensor, inv_total: Tensor, out: Outputs, name: str) -> None:
    """Checks the tensors of a loss with a weight (V, C) of this name. On a CPU it also checks the values of targets; on a
    GPU the host would have to wait for them."""
    (n, c), v, acc = x.shape, w.shape[0], accumulation_dtype(x.dtype)
    check_param(name, w, (v, c), x)
    check_given(
        x.device,
        ("targets", targets, (n,), torch.int64),
        ("inv_total", inv_total, (n,) if inv_total.ndim else (), acc),
        ("loss", out.loss, (), acc),
        ("losses", out.losses, (n,), acc),
        ("dx", out.dx, (n, c), x.dtype),
        (f"d{name}", out.dw, (v, c), acc),
        ("dbias", out.dbias, (v,), acc),
    )
    if x.device.type == "cpu" and n:
        low, high = (int(end) for end in targets.aminmax())
        if low < -1 or high >= v:
            raise ValueError(f"targets: got {low if low < -1 else high}; accepted: 0 … {v - 1}, or −1 to ignore a row")
