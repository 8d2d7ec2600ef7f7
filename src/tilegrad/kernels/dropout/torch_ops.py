"""Dropout by torch ops; the mask is drawn block by block in int64. Any device, any dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from ..philox import NO_SEQUENCE, WORK_BUFFERS, drop_mask, round_keys
from ..scratch import Scratch, Shapes, TensorLike, blocks, rows_per_block

BLOCK = {"cpu": 1 << 15, "cuda": 1 << 22}  # elements whose mask is drawn at once


def workspace(x: TensorLike) -> Shapes:
    (n, c), rows = x.shape, rows_per_block(x, BLOCK)
    return {
        "index": ((max(n, c),), torch.int64),
        "counter": ((2,), torch.int64),
        "philox": ((WORK_BUFFERS, rows, c), torch.int64),
        "dropped": ((rows, c), torch.bool),
    }


def fwd(x: Tensor, seed: int | Tensor, dropout_p: float, layer_counter: int, *, y: Tensor, scratch: Scratch) -> None:
    n, c = x.shape
    index, counter = torch.arange(max(n, c), out=scratch["index"]), scratch["counter"]
    counter[0].fill_(layer_counter)
    counter[1].fill_(NO_SEQUENCE)
    keys = round_keys(seed)
    for i in blocks(n, rows_per_block(x, BLOCK)):
        m = i.stop - i.start
        dropped = scratch["dropped"][None, None, :m]
        work = scratch["philox"].view(-1)[: WORK_BUFFERS * m * c].view(WORK_BUFFERS, 1, 1, m, c)
        drop_mask(keys, dropout_p, counter[1:], counter[:1], index[i], index[:c], dropped=dropped, work=work)
        torch.mul(x[i], 1.0 / (1.0 - dropout_p), out=y[i]).masked_fill_(dropped[0, 0], 0.0)
