"""Attention over two sets of keys from attention over each: outputs mixed by their logsumexps.

    lse' = log(exp lse + exp part_lse)
    o'   = o exp(lse − lse') + part exp(part_lse − lse')          = part + (o − part) sigmoid(lse − part_lse)

o, part (B, H, T, D), lse, part_lse (B, H, T), any strides. lse = −∞ means a row without a key so far: its o is ignored. The
backward needs no op: with o' and lse' instead of o and lse, `attention_bwd` over each set computes exp(s − lse') and do·o',
which are the softmax over both sets and its delta. `MIX` is the table of kernels: each module offers `workspace` and `fwd`.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from .. import gpu
from ..checks import check_columns, check_tensor
from ..op import op
from ..scratch import Shapes, TensorLike, accumulation_dtype
from ..table import Problem, Where

MIX = gpu.triton_else_torch("mix")


def mix_workspace(part: TensorLike, *, kernel: str | None = None) -> Shapes:
    """Name → (shape, dtype) of the scratch."""
    return MIX.workspace(Problem(part), kernel=kernel)


@op(adds=("o", "lse"))
def mix_fwd(part: Tensor, part_lse: Tensor, *, o: Tensor, lse: Tensor, **where: Unpack[Where]) -> None:
    """Adds the keys of `part` to o and lse, which cover the keys so far."""
    acc = accumulation_dtype(part.dtype)
    check_tensor("part_lse", part_lse, tuple(part.shape[:-1]), acc, part.device)
    check_tensor("o", o, tuple(part.shape), part.dtype, part.device)
    check_tensor("lse", lse, tuple(part.shape[:-1]), acc, part.device)
    check_columns("part", part)
    check_columns("o", o)
    MIX.run("fwd", Problem(part), part, part_lse, o=o, lse=lse, **where)
