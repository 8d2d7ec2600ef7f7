"""Attention on rows as a transformer holds them: heads side by side in (B, T, H·D), and q, k, v in one buffer or three.

    qkv (B, T, (Hq + 2·Hkv)·D), the columns of q, then k, then v         o, do (B, T, Hq·D)        lse (B, Hq, T)

Views of these are what the attention contract takes, so nothing is copied; as ops of their own they let a memory trace
see one buffer where the contract sees three. The backward is deterministic: a run that is resumed goes on to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..op import op
from ..rope import rope_bwd, rope_fwd, rope_workspace
from ..scratch import Scratch, Shapes
from .api import attention_bwd, attention_fwd, attention_workspace
from .mask import Mask


def _heads(x: Any, n_head: int) -> Any:
    """(B, T, H·D) seen as (B, H, T, D)."""
    b, t, c = x.shape
    return x.view(b, t, n_head, c // n_head).transpose(1, 2)


def split(qkv: Any, n_head: int, n_kv_head: int) -> tuple[Any, Any, Any]:
    """q (B, Hq, T, D), k and v (B, Hkv, T, D), views of one buffer."""
    b, t, c = qkv.shape
    heads = qkv.view(b, t, n_head + 2 * n_kv_head, c // (n_head + 2 * n_kv_head)).transpose(1, 2)
    return heads[:, :n_head], heads[:, n_head : n_head + n_kv_head], heads[:, n_head + n_kv_head :]


def rows_workspace(
    b: int, t: int, n_head: int, n_kv_head: int, head_dim: int, dtype: torch.dtype, device: torch.device, mask: Mask, *,
    backward: bool,
) -> Shapes:  # fmt: skip
    q = _Form((b, n_head, t, head_dim), dtype, device)
    k = _Form((b, n_kv_head, t, head_dim), dtype, device)
    return attention_workspace(q, k, k, mask, backward=backward, deterministic=backward)


class _Form:
    """The shape, dtype and device of a tensor that need not exist."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device


@op()
def qkv_attention_fwd(
    qkv: Tensor, mask: Mask, n_head: int, n_kv_head: int, *, o: Tensor, lse: Tensor, scratch: Scratch
) -> None:
    q, k, v = split(qkv, n_head, n_kv_head)
    attention_fwd(q, k, v, mask, o=_heads(o, n_head), lse=lse, scratch=scratch)


@op()
def qkv_attention_bwd(
    qkv: Tensor, o: Tensor, lse: Tensor, do: Tensor, mask: Mask, n_head: int, n_kv_head: int, *,
    dqkv: Tensor, scratch: Scratch,
) -> None:  # fmt: skip
    q, k, v = split(qkv, n_head, n_kv_head)
    dq, dk, dv = split(dqkv, n_head, n_kv_head)
    attention_bwd(
        q, k, v, _heads(o, n_head), lse, _heads(do, n_head), None, mask,
        dq=dq, dk=dk, dv=dv, scratch=scratch, deterministic=True,
    )  # fmt: skip


def qkv_rope_workspace(b: int, t: int, rotated: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Shapes:
    return rope_workspace(_Form((b, t, rotated, head_dim), dtype, device))


@op()
def qkv_rope_fwd(
    x: Tensor, cos: Tensor, sin: Tensor, rotated: int, head_dim: int, *, qkv: Tensor, scratch: Scratch
) -> None:
    """Turn the first `rotated` heads of the rows (q's and k's) by their positions, in place: qkv is x."""
    heads = _rotated(qkv, rotated, head_dim)
    rope_fwd(heads, cos, sin, y=heads, scratch=scratch)


@op()
def qkv_rope_bwd(
    dy: Tensor, cos: Tensor, sin: Tensor, rotated: int, head_dim: int, *, dqkv: Tensor, scratch: Scratch
) -> None:
    """Turn their gradients back, in place: dqkv is dy."""
    heads = _rotated(dqkv, rotated, head_dim)
    rope_bwd(heads, cos, sin, dx=heads, scratch=scratch)


def _rotated(qkv: Tensor, rotated: int, head_dim: int) -> Tensor:
    b, t, c = qkv.shape
    return qkv.view(b, t, c // head_dim, head_dim)[:, :, :rotated]


@op()
def rows_attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    n_head: int,
    n_kv_head: int,
    *,
    o: Tensor,
    lse: Tensor,
    scratch: Scratch,
) -> None:
    heads = _heads(q, n_head), _heads(k, n_kv_head), _heads(v, n_kv_head)
    attention_fwd(*heads, mask, o=_heads(o, n_head), lse=lse, scratch=scratch)


@op()
def rows_attention_bwd(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, mask: Mask, n_head: int, n_kv_head: int, *,
    dq: Tensor, dk: Tensor, dv: Tensor, scratch: Scratch,
) -> None:  # fmt: skip
    heads = _heads(q, n_head), _heads(k, n_kv_head), _heads(v, n_kv_head)
    attention_bwd(
        *heads, _heads(o, n_head), lse, _heads(do, n_head), None, mask,
        dq=_heads(dq, n_head), dk=_heads(dk, n_kv_head), dv=_heads(dv, n_kv_head), scratch=scratch, deterministic=True,
    )  # fmt: skip
