"""Embeddings by torch's indexing: any device, any dtype. On CUDA `index_put_` sorts the tokens, and torch's allocator provides
about 50 bytes per token for this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..scratch import Scratch, Shapes, TensorLike, accumulation_dtype, blocks, rows_per_block

if TYPE_CHECKING:
    from . import Gradients, Inputs

BLOCK = {"cpu": 1 << 20, "cuda": 1 << 24}  # elements of dx converted at once


def workspace(x: TensorLike, *, converts: bool = True, packed: bool = False, scaled: bool = False) -> Shapes:
    """x32 is a block of rows in the accumulation dtype, needed if rows are converted and x has another dtype, or if the
    backward scales rows. wpe is a block of rows of wpe, needed for packed rows."""
    acc = accumulation_dtype(x.dtype)
    names = ("x32",) * (scaled or (converts and x.dtype != acc)) + ("wpe",) * packed
    return dict.fromkeys(names, ((rows_per_block(x, BLOCK), x.shape[1]), acc))


def fwd(inputs: Inputs, *, x: Tensor, scratch: Scratch) -> None:
    tokens, wte, wpe, positions, scale = inputs
    (b, t), c = tokens.shape, x.shape[1]
    if wpe is not None and positions is not None:
        _fwd_packed(tokens.view(-1), wte, wpe, positions.view(-1), scale, x=x, scratch=scratch)
        return
    if wte.dtype == x.dtype:
        _gather(wte, tokens.view(-1), scale, out=x)
        if wpe is not None:
            x.view(b, t, c).add_(wpe[:t])
        return
    x32 = scratch["x32"]
    for n in range(b):
        for i in blocks(t, rows_per_block(x, BLOCK)):
            sums = _gather(wte, tokens[n, i], scale, out=x32[: i.stop - i.start])
            if wpe is not None:
                sums.add_(wpe[i])
            x[n * t + i.start : n * t + i.stop].copy_(sums)


def _fwd_packed(
    tokens: Tensor, wte: Tensor, wpe: Tensor, positions: Tensor, scale: float, *, x: Tensor, scratch: Scratch
) -> None:
    c, buffer = x.shape[1], scratch["wpe"].view(-1).view(wpe.dtype)
    for i in blocks(x.shape[0], rows_per_block(x, BLOCK)):
        m = i.stop - i.start
        rows = torch.index_select(wpe, 0, positions[i], out=buffer[: m * c].view(m, c))
        if wte.dtype == x.dtype:
            _gather(wte, tokens[i], scale, out=x[i]).add_(rows)
        else:
            x[i].copy_(_gather(wte, tokens[i], scale, out=scratch["x32"][:m]).add_(rows))


def _gather(wte: Tensor, tokens: Tensor, scale: float, *, out: Tensor) -> Tensor:
    """out = scale · wte[tokens], in the dtype of wte"""
    torch.index_select(wte, 0, tokens, out=out)
    return out if scale == 1.0 else out.mul_(scale)


def bwd(
    dx: Tensor, tokens: Tensor, positions: Tensor | None, scale: float, *, out: Gradients, scratch: Scratch
) -> None:
    dwte, dwpe, accumulate = out
    b, t = tokens.shape
    if dwte is not None:
        if not accumulate:
            dwte.zero_()
        _add_all(tokens.view(-1), dx, scale, scratch, table=dwte)
    if dwpe is not None and not accumulate:
        dwpe.zero_()
    if dwpe is not None and positions is not None:
        _add_all(positions.view(-1), dx, 1.0, scratch, table=dwpe)
    elif dwpe is not None:
        for n in range(b):
            for i in blocks(t, rows_per_block(dx, BLOCK)):
                part = dx[n * t + i.start : n * t + i.stop]
                dwpe[i].add_(scratch["x32"][: i.stop - i.start].copy_(part) if dx.dtype != dwpe.dtype else part)


def _add_all(index: Tensor, dx: Tensor, scale: float, scratch: Scratch, *, table: Tensor) -> None:
    for i in blocks(dx.shape[0], rows_per_block(dx, BLOCK)):
        rows = dx[i] if dx.dtype == table.dtype and scale == 1.0 else scratch["x32"][: i.stop - i.start].copy_(dx[i])
        add_rows(index[i], rows if scale == 1.0 else rows.mul_(scale), table=table)


def add_rows(index: Tensor, rows: Tensor, *, table: Tensor) -> None:
    """table[index[n]] += rows[n], with the same bits each time.       index (n,) int64   rows (n, C)   table (V, C)"""
    if table.device.type == "cpu":
        table.index_add_(0, index, rows)
    else:
        table.index_put_((index,), rows, accumulate=True)
