"""Squared distance to the target's embedding.       x (N, C)   wte (V, C)   targets (N,) int64, −1 = ignored

    e = x − wte[target]      loss = Σ over targets of Σ_c e² / C · inv_total
    dx = 2 e / C · inv_total (0 in rows without a target)        dwte[target] −= dx (accumulate=False: zeroed first)

Rows are processed in blocks, in the accumulation dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_param, check_tensor
from .cross_entropy import Outputs, check_loss
from .cross_entropy.torch_ops import mask_targets
from .embedding.torch_ops import add_rows
from .op import op
from .scratch import Scratch, Shapes, TensorLike, accumulation_dtype, blocks, rows_per_block, views

BLOCK = {"cpu": 1 << 20, "cuda": 1 << 24}  # elements of a block of rows


def embedding_mse_workspace(x: TensorLike, wte: TensorLike) -> Shapes:
    """Name → (shape, dtype) of the scratch of forward and backward."""
    acc, (_, c), rows = accumulation_dtype(x.dtype), x.shape, rows_per_block(x, BLOCK)
    shapes: Shapes = {
        "e": ((rows, c), acc),
        "target_rows": ((rows, c), wte.dtype),
        "statistics": ((2, rows), acc),
        "part": ((), acc),
        "index": ((rows,), torch.int64),
        "ignored": ((rows,), torch.bool),
    }
    return shapes | ({"target_rows32": ((rows, c), acc)} if wte.dtype != acc else {})


@op()
def embedding_mse_fwd(
    x: Tensor, wte: Tensor, targets: Tensor, inv_total: Tensor, *, loss: Tensor, scratch: Scratch | None = None
) -> None:
    """Overwrites loss (0-d)."""
    _run(x, wte, targets, inv_total, Outputs(loss), scratch)


@op(accumulates=("dwte",))
def embedding_mse_bwd(
    x: Tensor, wte: Tensor, targets: Tensor, inv_total: Tensor, *,
    loss: Tensor | None = None, dx: Tensor | None = None, dwte: Tensor | None = None, accumulate: bool = True,
    scratch: Scratch | None = None,
) -> None:  # fmt: skip
    """loss, if it is given, and dx are overwritten, and dx may be x; dwte is accumulated (accumulate=False: overwritten)."""
    _run(x, wte, targets, inv_total, Outputs(loss, dx, dwte, accumulate), scratch)


def embedding_mse_scores_workspace(x: TensorLike, wte: TensorLike) -> Shapes:
    acc, rows = accumulation_dtype(x.dtype), rows_per_block(wte, BLOCK)
    shapes: Shapes = {"e": ((rows, wte.shape[1]), acc), "row": ((wte.shape[1],), acc)}
    return shapes


@op()
def embedding_mse_scores_fwd(x: Tensor, wte: Tensor, *, scores: Tensor, scratch: Scratch | None = None) -> None:
    """scores[n, v] = −Σ_c (x[n] − wte[v])² / C, the largest for the nearest embedding.       scores (N, V)"""
    (n, c), v, acc = x.shape, wte.shape[0], accumulation_dtype(x.dtype)
    check_param("wte", wte, (v, c), x)
    check_tensor("scores", scores, (n, v), acc, x.device)
    buffers = views(scratch, embedding_mse_scores_workspace(x, wte), x.device, "embedding_mse_scores")
    for i in range(n):
        row = buffers["row"].copy_(x[i])
        for j in blocks(v, rows_per_block(wte, BLOCK)):
            e = buffers["e"][: j.stop - j.start].copy_(wte[j]).sub_(row)
            torch.linalg.vector_norm(e, dim=-1, out=scores[i, j]).square_().div_(-c)


def _run(x: Tensor, wte: Tensor, targets: Tensor, inv_total: Tensor, out: Outputs, scratch: Scratch | None) -> None:
    check_loss(x, wte, targets, inv_total, out, "wte")
    loss, dx, dwte, accumulate, *_ = out
    (n, c), acc = x.shape, accumulation_dtype(x.dtype)
    buffers = views(scratch, embedding_mse_workspace(x, wte), x.device, "embedding_mse")
    if loss is not None:
        loss.zero_()
    if dwte is not None and not accumulate:
        dwte.zero_()
    for i in blocks(n, rows_per_block(x, BLOCK)):
        m = i.stop - i.start
        rows = {name: buffers[name][:m] for name in ("e", "target_rows", "ignored", "index")}
        scale, distance = buffers["statistics"][:, :m].unbind()
        mask_targets(targets, inv_total, i, ignored=rows["ignored"], index=rows["index"], scale=scale)
        scale.div_(c)
        target_rows = torch.index_select(wte, 0, rows["index"], out=rows["target_rows"])
        if "target_rows32" in buffers:
            target_rows = buffers["target_rows32"][:m].copy_(target_rows)
        e = rows["e"].copy_(x[i]).sub_(target_rows) if x.dtype != acc else torch.sub(x[i], target_rows, out=rows["e"])
        if loss is not None:
            torch.linalg.vector_norm(e, dim=-1, out=distance).square_().mul_(scale)
            loss.add_(torch.sum(distance, 0, out=buffers["part"]))
        if dx is None and dwte is None:
            continue
        e.mul_(scale.mul_(2.0)[:, None])
        if dx is not None:
            dx[i].copy_(e)
        if dwte is not None:
            add_rows(rows["index"], e.neg_(), table=dwte)
