"""Cross-entropy (kernels/cross_entropy) with the three products of the head in float8 (kernels/fp8_linear).

    l = x8 · w8 in bfloat16         nll by cross_entropy's softmax         dx = dl8 · w8t         dw += dl8t · x8t

The caller rounds x (N, C) and w (V, C), and the softmax rounds dl, each in both orders. |dl| is at most inv_total, so the scale
of dl is inv_total / 57,344 in every step. With a softcap the softmax is of the capped logits. Rows are processed in chunks,
whose logits and dl8 are scratch. A group of chunks fills dl8t, and one product adds dl8t · x8t to dw, because each
addition reads and writes all of dw.
"""

from __future__ import annotations

from typing import NamedTuple, Unpack

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

# Logits, dl8 and dl8t together take OF_X times as many bytes as x, but at least LEAST and at most MOST. The fraction OF_CHUNK
# of these bytes is for the logits and dl8 of a chunk.
MOST, LEAST, OF_X, OF_CHUNK = 1 << 30, 1 << 27, 24, 0.25
SMALLEST = 1e-30  # least scale of dl, for a batch without a target


class Rows(NamedTuple):
    """The rows of a chunk, and of a group of chunks. Both are multiples of EVEN, or all rows."""

    chunk: int
    group: int

    @classmethod
    def of(cls, n: int, c: int, v: int) -> Rows:
        size = min(MOST, max(LEAST, OF_X * n * c * 2))
        group = max(min(n, EVEN), most_rows(n, v, 1, int((1.0 - OF_CHUNK) * size), even=EVEN))
        return cls(max(min(group, EVEN), most_rows(group, v, 3, int(OF_CHUNK * size), even=EVEN)), group)


def fp8_cross_entropy_workspace(
    x: TensorLike, w: TensorLike, *, backward: bool, accumulate: bool = True, kernel: str | None = None
) -> Shapes:
    """Name → (shape, dtype) of the scratch; x (N, C) and w (V, C) are not rounded yet. accumulate is as in the step."""
    (n, c), v = x.shape, w.shape[0]
    rows, group = Rows.of(n, c, v)
    row = CROSS_ENTROPY.select(Problem(x, w), kernel)
    shapes: Shapes = {"logits": ((rows, v), torch.bfloat16), "losses": ((n,), torch.float32)}
    shapes |= below(row.name, row.load().softmax_workspace(Form((rows, v), torch.bfloat16, x.device)))
    if backward:
        shapes |= {"dl8": ((rows, v), GRADIENT), "dl8t": ((v, even(group)), GRADIENT), "state": (STATE, torch.float32)}
        shapes |= {"row_max": ((rows,), torch.float32), "factor": ((rows,), torch.float32)}
        if accumulate or group < n:
            dw = Form((v, c), torch.float32, x.device)
            shapes |= below("dw", fp8_product_workspace(Form((c, even(group)), FP8, x.device), dw))
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
    rows = Rows.of(n, c, v)
    for group in chunks(n, rows.group, EVEN):
        size = group.stop - group.start
        dl8t = scratch["dl8t"].view(-1)[: v * even(size)].view(v, even(size)) if backward else None
        for i in chunks(size, rows.chunk, EVEN):
            m, here = i.stop - i.start, slice(group.start + i.start, group.start + i.stop)
            logits = scratch["logits"][:m]
            fp8_product_fwd(x8[here], x_state, w8, w_state, out=logits, accumulate=False)
            row_max, factor = (scratch[name][:m] if backward else None for name in ("row_max", "factor"))
            losses = scratch["losses"][here]
            given = (logits, targets[here], inv_total, softcap)
            module.softmax(*given, losses=losses, row_max=row_max, factor=factor, scratch=softmax)
            if state is None or row_max is None or factor is None or dl8t is None:
                continue
            dl8, into = scratch["dl8"][:m], dl8t[:, i.start : i.start + even(m)]
            fp8_softmax_bwd(*given[:2], row_max, factor, inv_total, softcap, state, dl8=dl8, dl8t=into)
            if dx is not None and w8t is not None:
                fp8_product_fwd(dl8, state, w8t, w_state, out=dx[here], accumulate=False, precise=True)
        if dw is not None and x8t is not None and dl8t is not None and state is not None:
            x8t_group, added = x8t[:, group.start : group.start + even(size)], accumulate or group.start > 0
            into_dw = of("dw", scratch) if added else {}
            fp8_product_fwd(dl8t, state, x8t_group, x_state, out=dw, accumulate=added, precise=True, scratch=into_dw)
    if loss is not None:
        module.total(scratch["losses"], loss=loss)
