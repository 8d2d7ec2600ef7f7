"""Attention on a transformer's activations: (B, T, H·D) with heads side by side, and q, k, v in one buffer or three.

    qkv (B, T, (Hq + 2·Hkv)·D), the columns of q, then k, then v         o, do (B, T, Hq·D)        lse (B, Hq, T)

`qkv_attention_*` takes a list of one buffer or of three. It passes views to the op of api.py, so nothing is copied. It is an op
so that a memory trace records the buffers of the model. The backward is deterministic by default, so that a resumed run has the
same bits. If a sequence is split over the ranks of a `group` (context.py), T counts the rows of one rank. invariant is as in
`attention_fwd`; the engine refuses it for a split sequence.

Packed rows: with cu_seqlens in the mask, the B·T rows are packed sequences, seen as (B·T, H, D). The memory of lse is then
(Hq, B·T), and rope takes the position of each row from `positions` (B, T).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..op import op
from ..rope import rope_bwd, rope_fwd, rope_workspace
from ..scratch import Form, Scratch, Shapes
from . import table
from .api import attention_bwd, attention_fwd
from .context import Ranks, gather_attention_bwd, gather_attention_fwd, gather_attention_workspace, positions_of
from .mask import Mask
from .problem import FEW_ROWS, Problem

_LENGTHS = (FEW_ROWS, table.SHORT, 1 << 31)  # for each range of lengths the table may select another kernel


def _heads(x: Any, n_head: int, *, packed: bool) -> Any:
    """(B, T, H·D) viewed as (B, H, T, D), or as (B·T, H, D) if packed."""
    b, t, c = x.shape
    return x.view(b * t, n_head, c // n_head) if packed else x.view(b, t, n_head, c // n_head).transpose(1, 2)


def _statistic(lse: Tensor, *, packed: bool) -> Tensor:
    """lse (B, Hq, T), or a view of its memory as (Hq, B·T) if packed."""
    return lse.view(lse.shape[1], -1) if packed else lse


def split(qkv: Any, n_head: int, n_kv_head: int, *, packed: bool = False) -> tuple[Any, Any, Any]:
    """q (B, Hq, T, D), k and v (B, Hkv, T, D) as views of one buffer; (B·T, H, D) if packed."""
    heads = _heads(qkv, n_head + 2 * n_kv_head, packed=packed)
    return heads[:, :n_head], heads[:, n_head : n_head + n_kv_head], heads[:, n_head + n_kv_head :]


def qkv_attention_workspace(
    b: int, t: int, n_head: int, n_kv_head: int, head_dim: int, dtype: torch.dtype, device: torch.device, mask: Mask, *,
    backward: bool, deterministic: bool = True, invariant: bool = False, group: Ranks | None = None,
) -> Shapes:  # fmt: skip
    """Scratch for every kernel that may run up to t rows: the table may select another kernel for few rows, or for a forward
    without dropout, as in evaluation."""
    if group is not None:
        q, k = (Form((b, h, t, head_dim), dtype, device) for h in (n_head, n_kv_head))
        return gather_attention_workspace(q, k, k, mask, group.world, backward=backward, deterministic=deterministic)
    ordered = invariant and not backward
    masks = (mask,) if backward else (mask, replace(mask, dropout_p=0.0))
    problems = []
    if mask.cu_seqlens_q is not None:
        documents = (mask.cu_seqlens_q.shape[0] - 1) // b
        for sequences, rows in product(sorted({b, min(b, table.MANY_SEQUENCES // documents)} - {0}), _LENGTHS):
            rows = min(rows, t)
            ends: Any = Form((sequences * documents + 1,), torch.int32, device)
            packing = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": rows, "max_seqlen_k": rows}
            q, k = (Form((sequences * rows, h, head_dim), dtype, device) for h in (n_head, n_kv_head))
            problems += [Problem(q, k, k, replace(each, **packing), invariant=ordered) for each in masks]
    else:
        for rows in (min(t, FEW_ROWS), t):
            q, k = (Form((b, h, rows, head_dim), dtype, device) for h in (n_head, n_kv_head))
            problems += [Problem(q, k, k, each, invariant=ordered) for each in masks]
    return table.ATTENTION.workspace(*problems, backward=backward, deterministic=backward and deterministic)


def _parts(qkv: list[Tensor], n_head: int, n_kv_head: int, *, packed: bool) -> tuple[Any, Any, Any]:
    """`split` of one buffer, or the same views of three."""
    if len(qkv) == 1:
        return split(qkv[0], n_head, n_kv_head, packed=packed)
    q, k, v = qkv
    return _heads(q, n_head, packed=packed), _heads(k, n_kv_head, packed=packed), _heads(v, n_kv_head, packed=packed)


@op()
def qkv_attention_fwd(
    qkv: list[Tensor], mask: Mask, n_head: int, n_kv_head: int, group: Ranks | None = None, *,
    o: Tensor, lse: Tensor, scratch: Scratch, invariant: bool = False,
) -> None:  # fmt: skip
    packed = mask.varlen
    q, k, v = _parts(qkv, n_head, n_kv_head, packed=packed)
    o, lse = _heads(o, n_head, packed=packed), _statistic(lse, packed=packed)
    if group is None:
        attention_fwd(q, k, v, mask, o=o, lse=lse, scratch=scratch, invariant=invariant)
    else:
        gather_attention_fwd(q, k, v, mask, group, o=o, lse=lse, scratch=scratch)


@op()
def qkv_attention_bwd(
    qkv: list[Tensor], o: Tensor, lse: Tensor, do: Tensor, mask: Mask, n_head: int, n_kv_head: int,
    group: Ranks | None = None, *,
    dqkv: list[Tensor], scratch: Scratch, deterministic: bool = True,
) -> None:  # fmt: skip
    packed = mask.varlen
    (q, k, v), (dq, dk, dv) = (_parts(x, n_head, n_kv_head, packed=packed) for x in (qkv, dqkv))
    o, do = (_heads(x, n_head, packed=packed) for x in (o, do))
    reads = q, k, v, o, _statistic(lse, packed=packed), do, None, mask
    writes: dict[str, Any] = {"dq": dq, "dk": dk, "dv": dv, "scratch": scratch, "deterministic": deterministic}
    if group is None:
        attention_bwd(*reads, **writes)
    else:
        gather_attention_bwd(*reads, group, **writes)


def qkv_rope_workspace(
    b: int, t: int, rotated: int, head_dim: int, dtype: torch.dtype, device: torch.device, *, packed: bool = False
) -> Shapes:
    return rope_workspace(Form((b, t, rotated, head_dim), dtype, device), packed=packed)


@op(accumulates=("qkv",))
def qkv_rope(
    cos: Tensor, sin: Tensor, rotated: int, head_dim: int, group: Ranks | None = None, positions: Tensor | None = None, *,
    qkv: Tensor, scratch: Scratch, back: bool = False,
) -> None:  # fmt: skip
    """Rotates the first `rotated` heads of each row (q's and k's heads) by the row's position in the sequence, in place. back:
    rotates the gradients of these heads back."""
    for heads, cos_at, sin_at in _rotated(qkv, cos, sin, rotated, head_dim, group):
        if back:
            rope_bwd(heads, cos_at, sin_at, positions, dx=heads, scratch=scratch)
        else:
            rope_fwd(heads, cos_at, sin_at, positions, y=heads, scratch=scratch)


def _rotated(
    qkv: Tensor, cos: Tensor, sin: Tensor, rotated: int, head_dim: int, group: Ranks | None
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(heads, cos, sin) for the whole sequence or, with a group, for each of the rank's two runs."""
    b, t, c = qkv.shape
    heads = qkv.view(b, t, c // head_dim, head_dim)[:, :, :rotated]
    if group is None:
        return [(heads, cos, sin)]
    first, last = positions_of(group.rank, group.world, t)
    return [(heads[:, : t // 2], cos[first], sin[first]), (heads[:, t // 2 :], cos[last], sin[last])]
