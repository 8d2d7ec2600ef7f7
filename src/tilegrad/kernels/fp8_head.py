"""Cross-entropy (kernels/cross_entropy) with the three products of the head in float8 (kernels/fp8_linear).

    l = x8 · w8        nll, dl by cross_entropy's softmax, in bfloat16         dx = dl8 · w8t         dw += dl8t · x8t

x (N, C) and w (V, C) are rounded by the caller. |dl| is at most inv_total, so the scale of dl is inv_total / 57,344, in every
step. With a softcap the softmax is of the capped logits. Rows are processed in chunks, whose logits, dl8 and dl8t are scratch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Unpack

import torch
from torch import Tensor

from .checks import check_given, check_tensor
from .cross_entropy import CROSS_ENTROPY, Problem
from .cross_entropy.chunks import chunks, most_rows
from .fp8_linear import EVEN, FP8, GRADIENT, even, fp8_product_fwd, fp8_product_workspace, fp8_softmax_bwd
from .fp8_linear.state import FORMAT, LARGEST, STATE
from .op import op
from .scratch import Form, Shapes, TensorLike, below, of, views
from .table import Where

# The logits of a chunk take OF_X times as many bytes as x, but at least LEAST and at most CHUNK: as in cross_entropy.
CHUNK, LEAST, OF_X = 1 << 29, 1 << 26, 12
SMALLEST = 1e-30  # least scale of dl, for a batch without a target


def _rows(n: int, c: int, v: int) -> int:
    """The rows of a chunk: a multiple of EVEN, or all rows."""
    size = min(CHUNK, max(LEAST, OF_X * n * c * 2))
    return max(min(n, EVEN), most_rows(n, v, 2, size, even=EVEN))


def _chunks(n: int, c: int, v: int) -> Iterator[slice]:
    return chunks(n, _rows(n, c, v), EVEN)


def fp8_cross_entropy_workspace(
    x: TensorLike, w: TensorLike, *, backward: bool, accumulate: bool = True, kernel: str | None = None
) -> Shapes:
    """Name → (shape, dtype) of the scratch; x (N, C) and w (V, C) are not rounded yet. accumulate is as in the step."""
    (n, c), v = x.shape, w.shape[0]
    rows = _rows(n, c, v)
    row = CROSS_ENTROPY.select(Problem(x, w), kernel)
    shapes: Shapes = {"logits": ((rows, v), torch.bfloat16), "losses": ((n,), torch.float32)}
    shapes |= below(row.name, row.load().softmax_workspace(Form((rows, v), torch.bfloat16, x.device)))
    if backward:
        shapes |= {"dl8": ((rows, v), GRADIENT), "dl8t": ((v, even(rows)), GRADIENT), "state": (STATE, torch.float32)}
        shapes |= {"row_max": ((rows,), torch.float32), "factor": ((rows,), torch.float32)}
        if accumulate or rows < n:
            dw = Form((v, c), torch.float32, x.device)
            shapes |= below("dw", fp8_product_workspace(Form((c, even(rows)), FP8, x.device), dw))
    return shapes


@op(accumulates=("dw",))
def fp8_cross_entropy_step(
    x8: Tensor, x8t: Tensor | None, x_state: Tensor, w8: Tensor, w8t: Tensor | None, w_state: Tensor, targets: Tensor,
    inv_total: Tensor, *,
    loss: Tensor | None = None, dx: Tensor | None = None, dw: Tensor | None = None, accumulate: bool = True,
    softcap: float = 0.0, **where: Unpack[Where],
) -> None:  # fmt: skip
    """loss, dx, and dw += … (dw = … without `accumulate`); None is not computed.     x8t (C, N') for dw   w8t (C, V) for dx"""
    (n, c), v, device = x8.shape, w8.shape[0], x8.device
    check_tensor("w8", w8, (v, c), FP8, device)
    check_given(device, ("x8t", x8t, (c, even(n)), FP8), ("w8t", w8t, (c, even(v)), FP8))
    check_given(device, ("targets", targets, (n,), torch.int64), ("inv_total", inv_total, (), torch.float32))
    check_given(device, ("loss", loss, (), torch.float32), ("dw", dw, (v, c), torch.float32))
    check_given(device, ("dx", dx, (n, c), torch.bfloat16))
    if v % EVEN or (dx is not None and w8t is None) or (dw is not None and x8t is None):
        raise ValueError(f"w8: got {v} rows; accepted: a multiple of {EVEN}, with w8t for dx and x8t for dw")
    row = CROSS_ENTROPY.select(Problem(Form((n, c), torch.bfloat16, device), w8), where.get("kernel"))
    backward, module = dx is not None or dw is not None, row.load()
    form = Form((n, c), torch.bfloat16, device)
    options = {"backward": backward, "accumulate": accumulate}
    needed = fp8_cross_entropy_workspace(form, w8, **options, kernel=row.name)
    scratch = views(where.get("scratch"), needed, device, "fp8_cross_entropy")
    softmax, state = of(row.name, scratch), scratch.get("state")
    if state is not None:
        state.zero_()[FORMAT].fill_(LARGEST["dy"])
        torch.mul(inv_total, 1.0 / LARGEST["dy"], out=state[0]).clamp_(min=SMALLEST)
    if dw is not None and not accumulate and not n:
        dw.zero_()
    for i in _chunks(n, c, v):
        m, losses = i.stop - i.start, scratch["losses"][i]
        logits = scratch["logits"][:m]
        fp8_product_fwd(x8[i], x_state, w8, w_state, out=logits, accumulate=False)
        row_max, factor = (scratch[name][:m] if backward else None for name in ("row_max", "factor"))
        given = (logits, targets[i], inv_total, softcap)
        module.softmax(*given, losses=losses, row_max=row_max, factor=factor, scratch=softmax)
        if state is None or row_max is None or factor is None:
            continue
        dl8 = scratch["dl8"][:m]
        dl8t = scratch["dl8t"].view(-1)[: v * even(m)].view(v, even(m))
        fp8_softmax_bwd(*given[:2], row_max, factor, inv_total, softcap, state, dl8=dl8, dl8t=dl8t)
        if dw is not None and x8t is not None:
            own, added = x8t[:, i.start : i.start + even(m)], accumulate or i.start > 0
            fp8_product_fwd(
                dl8t,
                state,
                own,
                x_state,
                out=dw,
                accumulate=added,
                precise=True,
                scratch=of("dw", scratch) if added else {},
            )
        if dx is not None and w8t is not None:
            fp8_product_fwd(dl8, state, w8t, w_state, out=dx[i], accumulate=False, precise=True)
    if loss is not None:
        module.total(scratch["losses"], loss=loss)
