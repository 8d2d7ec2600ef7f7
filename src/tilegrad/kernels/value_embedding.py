"""Value embeddings: each token adds a row of a table to its values.

    tokens (B, T) int64   table (V, W)   scalar (1,)   v, dv: the last W columns of rows (N, W or more), N = B·T

    v += scalar · table[tokens]        dscalar += Σ dv ∘ table[tokens]        dtable[tokens[n]] += scalar · dv[n]
                                       (accumulate=False: dscalar and dtable are overwritten; rows without a token become 0)

dv does not change. Each direction gathers rows of the table into scratch, by the ops of embedding. The ops of scaled_sum scale
and add; the backward scales dv into scratch.
"""

from __future__ import annotations

from torch import Tensor

from .embedding import embedding_bwd, embedding_fwd, embedding_workspace
from .op import op
from .scaled_sum import scaled_sum_bwd, scaled_sum_fwd, scaled_sum_workspace
from .scratch import Form, Scratch, Shapes, TensorLike, below, of, views


def value_embedding_workspace(rows: TensorLike, table: TensorLike, *, backward: bool) -> Shapes:
    """Name → (shape, dtype) of the scratch of a forward or of a backward."""
    like = Form((rows.shape[0], table.shape[1]), rows.dtype, rows.device)
    called = below("embedding", embedding_workspace(like))
    called |= below("scaled_sum", scaled_sum_workspace(like, backward=backward))
    return _buffers(rows, table, backward=backward) | called


def _buffers(rows: TensorLike, table: TensorLike, *, backward: bool) -> Shapes:
    names = ("gathered", "scaled") if backward else ("gathered",)
    return dict.fromkeys(names, ((rows.shape[0], table.shape[1]), rows.dtype))


def _values(rows: Tensor, table: Tensor) -> Tensor:
    if len(rows.shape) != 2 or rows.shape[1] < table.shape[1]:
        raise ValueError(f"rows: got {tuple(rows.shape)}; accepted: (N, {table.shape[1]} or more)")
    return rows[:, rows.shape[1] - table.shape[1] :]


@op(adds=("rows",))
def value_embedding_fwd(
    tokens: Tensor, table: Tensor, scalar: Tensor, *, rows: Tensor, scratch: Scratch | None = None
) -> None:
    """v += scalar · table[tokens], rounded once"""
    v, needed = _values(rows, table), _buffers(rows, table, backward=False)
    e, ops_scratch = views(scratch, needed, rows.device, "value_embedding")["gathered"], scratch or {}
    embedding_fwd(tokens, table, None, x=e, scratch=of("embedding", ops_scratch))
    scaled_sum_fwd(e, v, scalar, None, y=v, scratch=of("scaled_sum", ops_scratch))


@op(accumulates=("dtable", "dscalar"))
def value_embedding_bwd(
    drows: Tensor, tokens: Tensor, table: Tensor, scalar: Tensor, *,
    dtable: Tensor | None = None, dscalar: Tensor | None = None, accumulate: bool = True, scratch: Scratch | None = None,
) -> None:  # fmt: skip
    """dscalar += Σ dv ∘ table[tokens]   dtable[tokens] += scalar · dv"""
    dv, needed = _values(drows, table), _buffers(drows, table, backward=True)
    (e, de), ops_scratch = views(scratch, needed, drows.device, "value_embedding").values(), scratch or {}
    embedding_fwd(tokens, table, None, x=e, scratch=of("embedding", ops_scratch))
    sum_scratch = of("scaled_sum", ops_scratch)
    scaled_sum_bwd(dv, e, None, scalar, None, dx=de, da=dscalar, accumulate=accumulate, scratch=sum_scratch)
    if dtable is not None:
        embedding_bwd(de, tokens, dwte=dtable, accumulate=accumulate, scratch=of("embedding", ops_scratch))
