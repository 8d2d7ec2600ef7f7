"""What stands between the layers: the sum of the residual stream, copies, and elementwise dropout.

    add       y = x + f        backward: both branches read dy
    dropout   y = x ∘ keep / (1 − p),   keep(row, column) = word ≥ floor(p · 2³²)
              word = first word of Philox4×32-10(counter = (column, row, layer_counter, 2³² − 1), key = seed)

The last counter word, which attention uses for the sequence, is one that no sequence has, so the masks never coincide.
The backward is the forward on dy: the mask is drawn again, not kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .checks import check_tensor
from .op import op
from .philox import WORK_BUFFERS, drop_mask, round_keys
from .scratch import Scratch, Shapes, blocks, rows_per_block, views

BLOCK = {"cpu": 1 << 15, "cuda": 1 << 22}  # elements whose mask is drawn at once
_NO_SEQUENCE = 0xFFFFFFFF


@op()
def add_fwd(x: Tensor, f: Tensor, *, y: Tensor) -> None:
    """y = x + f; y may be x or f."""
    for name, other in (("f", f), ("y", y)):
        check_tensor(name, other, tuple(x.shape), x.dtype, x.device)
    torch.add(x, f, out=y)


@op()
def zero_fwd(*, x: Tensor) -> None:
    """x = 0"""
    x.zero_()


@op()
def copy_fwd(x: Tensor, *, y: Tensor) -> None:
    """y = x, in y's dtype and strides."""
    check_tensor("y", y, tuple(x.shape), y.dtype, x.device)
    y.copy_(x)


def dropout_workspace(x: Any) -> Shapes:
    """Name → (shape, dtype) of what `scratch` must hold, forward and backward."""
    (n, c), rows = x.shape, rows_per_block(x, BLOCK)
    return {
        "index": ((max(n, c),), torch.int64),
        "counter": ((2,), torch.int64),
        "philox": ((WORK_BUFFERS, rows, c), torch.int64),
        "dropped": ((rows, c), torch.bool),
    }


@op()
def dropout_fwd(
    x: Tensor, seed: int | Tensor, dropout_p: float, layer_counter: int, *, y: Tensor, scratch: Scratch | None = None
) -> None:
    """y = x ∘ keep / (1 − dropout_p); y may be x (N, C). dropout_p = 0 copies, and needs no scratch."""
    _dropout(x, seed, dropout_p, layer_counter, y=y, scratch=scratch)


@op()
def dropout_bwd(
    dy: Tensor, seed: int | Tensor, dropout_p: float, layer_counter: int, *, dx: Tensor, scratch: Scratch | None = None
) -> None:
    """dx = dy ∘ keep / (1 − dropout_p), with the forward's keep; dx may be dy."""
    _dropout(dy, seed, dropout_p, layer_counter, y=dx, scratch=scratch)


def _dropout(
    x: Tensor, seed: int | Tensor, dropout_p: float, layer_counter: int, *, y: Tensor, scratch: Scratch | None
) -> None:
    check_tensor("y", y, tuple(x.shape), x.dtype, x.device)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: got {dropout_p!r}; accepted: a number p, 0 ≤ p < 1")
    if not 0 <= layer_counter <= _NO_SEQUENCE:
        raise ValueError(f"layer_counter: got {layer_counter!r}; accepted: an int of 32 bits, ≥ 0")
    if dropout_p == 0.0:
        y.copy_(x)
        return
    (n, c), scratch = x.shape, views(scratch, dropout_workspace(x), x.device, "dropout")
    index, counter = torch.arange(max(n, c), out=scratch["index"]), scratch["counter"]
    counter[0].fill_(layer_counter)
    counter[1].fill_(_NO_SEQUENCE)
    keys = round_keys(seed)
    for i in blocks(n, rows_per_block(x, BLOCK)):
        m = i.stop - i.start
        dropped = scratch["dropped"][None, None, :m]
        work = scratch["philox"].view(-1)[: WORK_BUFFERS * m * c].view(WORK_BUFFERS, 1, 1, m, c)
        drop_mask(keys, dropout_p, counter[1:], counter[:1], index[i], index[:c], dropped=dropped, work=work)
        torch.mul(x[i], 1.0 / (1.0 - dropout_p), out=y[i]).masked_fill_(dropped[0, 0], 0.0)
