"""Prepares and runs a kernel of attention on buffers, without the checks and the table of `attention_fwd`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilegrad.kernels.attention.mask import Mask, edges_of_tile
from tilegrad.kernels.attention.problem import Backward, Forward
from tilegrad.kernels.scratch import Scratch, separate


def run_forward(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, o: Tensor | None, lse: Tensor | None, scratch: Scratch
) -> None:
    call = Forward(q, k, v, mask, o, lse, tuple(scratch.values()))
    module.prepare_fwd(call, separate(scratch))(call)


def run_backward(
    module: Any, *reads: Any, dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None,
    dbias: Tensor | None = None, dsinks: Tensor | None = None, scratch: Scratch, deterministic: bool,
) -> None:  # fmt: skip
    """`reads`: q, k, v, o, lse, do, dlse, mask."""
    q, k, v, o, lse, do, dlse, mask = reads
    memory = tuple(scratch.values())
    call = Backward(q, k, v, o, lse, do, dlse, mask, dq, dk, dv, dbias, dsinks, memory, deterministic)
    module.prepare_bwd(call, separate(scratch))(call)


def interval_edges(intervals: Tensor, tile: int) -> Tensor:
    """`edges_of_tile` of every `tile` columns, (B, H, tiles, n, 4); the last tile may be narrower."""
    columns = intervals.unflatten(-1, (-1, 2)).clone()
    (b, h, tk, n), empty = columns.shape[:4], torch.empty(columns.shape[:4], dtype=torch.bool)
    edges = intervals.new_empty(b, h, -(-tk // tile), n, 4)
    for t, first in enumerate(range(0, tk, tile)):
        at = slice(first, first + tile)
        edges_of_tile(columns[:, :, at], empty=empty[:, :, at], edges=edges[:, :, t])
    return edges
