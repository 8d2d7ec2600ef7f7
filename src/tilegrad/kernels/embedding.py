"""Token and position embeddings.       tokens (B, T) int64   wte (V, C)   wpe (T_max, C)   x (N, C), N = B·T

    x[b·T + t] = wte[tokens[b, t]] + wpe[t]        dwte[tokens[b, t]] += dx[b·T + t]        dwpe[t] += Σ_b dx[b·T + t]
                                               (accumulate=False: dwte and dwpe are overwritten, with 0 where no row is added)

Sums are formed in the gradients' dtype (float32; float64 for float64) and in an order that does not change from run to
run: on a CPU tokens follow one another, on CUDA `index_put_` sorts them first (which takes some 50 bytes per token from
torch's allocator, inside).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import check_param, check_tensor
from .op import op
from .scratch import Scratch, Shapes, accumulation_dtype, blocks, rows_per_block, views

BLOCK = {"cpu": 1 << 20, "cuda": 1 << 24}  # elements of dx whose dtype is changed at once


def _check(tokens: Tensor, x: Tensor, name: str) -> None:
    """tokens (B, T), and x of B·T rows."""
    if tokens.dtype != torch.int64 or len(tokens.shape) != 2 or not tokens.is_contiguous():
        got = f"{tokens.dtype} {tuple(tokens.shape)}, strides {tokens.stride()}"
        raise ValueError(f"tokens: got {got}; accepted: a contiguous torch.int64 (B, T)")
    check_tensor("tokens", tokens, tuple(tokens.shape), torch.int64, x.device)
    check_tensor(name, x, (tokens.numel(), x.shape[-1]), x.dtype, tokens.device)


@op()
def embedding_fwd(
    tokens: Tensor, wte: Tensor, wpe: Tensor | None, *, x: Tensor, scratch: Scratch | None = None
) -> None:
    """x = wte[tokens] + wpe[position]. On a CPU a token out of range raises, and wte and wpe may be float32 where x is
    bfloat16: then the sum is rounded, and that takes scratch."""
    _check(tokens, x, "x")
    (b, t), c = tokens.shape, x.shape[1]
    check_param("wte", wte, (wte.shape[0], c), x)
    if wpe is not None:
        check_tensor("wpe", wpe, (max(t, wpe.shape[0]), c), wte.dtype, x.device)
    if wte.dtype == x.dtype:
        torch.index_select(wte, 0, tokens.view(-1), out=x)
        if wpe is not None:
            x.view(b, t, c).add_(wpe[:t])
        return
    x32 = views(scratch, embedding_workspace(x), x.device, "embedding")["x32"]
    for n in range(b):
        for i in blocks(t, rows_per_block(x, BLOCK)):
            sums = torch.index_select(wte, 0, tokens[n, i], out=x32[: i.stop - i.start])
            if wpe is not None:
                sums.add_(wpe[i])
            x[n * t + i.start : n * t + i.stop].copy_(sums)


def embedding_workspace(x: Any) -> Shapes:
    """Name → (shape, dtype) of what `scratch` must hold: nothing but for bfloat16."""
    acc = accumulation_dtype(x.dtype)
    return {"x32": ((rows_per_block(x, BLOCK), x.shape[1]), acc)} if x.dtype != acc else {}


@op(accumulates=("dwte", "dwpe"))
def embedding_bwd(
    dx: Tensor, tokens: Tensor, *,
    dwte: Tensor | None = None, dwpe: Tensor | None = None, accumulate: bool = True, scratch: Scratch | None = None,
) -> None:  # fmt: skip
    """dwte[tokens] += dx   dwpe[:T] += Σ_b dx; accumulate=False: both are zero before."""
    _check(tokens, dx, "dx")
    (b, t), c, acc = tokens.shape, dx.shape[1], accumulation_dtype(dx.dtype)
    scratch = views(scratch, embedding_workspace(dx), dx.device, "embedding")
    if dwte is not None:
        check_tensor("dwte", dwte, (dwte.shape[0], c), acc, dx.device)
        flat = tokens.view(-1)
        if not accumulate:
            dwte.zero_()
        for i in blocks(dx.shape[0], rows_per_block(dx, BLOCK)):
            add_rows(flat[i], scratch["x32"][: i.stop - i.start].copy_(dx[i]) if scratch else dx[i], table=dwte)
    if dwpe is not None:
        check_tensor("dwpe", dwpe, (max(t, dwpe.shape[0]), c), acc, dx.device)
        if not accumulate:
            dwpe.zero_()
        for n in range(b):
            for i in blocks(t, rows_per_block(dx, BLOCK)):
                part = dx[n * t + i.start : n * t + i.stop]
                dwpe[i].add_(scratch["x32"][: i.stop - i.start].copy_(part) if scratch else part)


def add_rows(index: Tensor, rows: Tensor, *, table: Tensor) -> None:
    """table[index[n]] += rows[n], the same bits every time.       index (n,) int64   rows (n, C)   table (V, C)"""
    if table.device.type == "cpu":
        table.index_add_(0, index, rows)
    else:
        table.index_put_((index,), rows, accumulate=True)
