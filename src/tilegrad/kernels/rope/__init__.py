"""Rotary position embedding: rotates the two halves of a head's vector (the convention of Llama and GPT-NeoX).

    x = (x1, x2), halves of D       angle[t, i] = t · theta^(−2i/D)     cos, sin (T, D/2)
    y1 = x1 ∘ cos − x2 ∘ sin        y2 = x2 ∘ cos + x1 ∘ sin            backward: sin → −sin

x (B, T, H, D) may have any strides, so q and k can be views of the fused projection. Tables and arithmetic are in the
accumulation dtype (float32, float64 for float64). In packed rows `positions` (B, T) int64 replace t. `ROPE` is the table of
kernels: each module offers `workspace` and `rotate`, which rotates back with sign = −1.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from .. import gpu
from ..checks import check_positions, check_tensor
from ..op import op
from ..scratch import Shapes, TensorLike, accumulation_dtype
from ..table import Problem, Where
from .frequencies import RopeScaling, rope_frequencies

ROPE = gpu.triton_else_torch("rope")


def rope_workspace(x: TensorLike, *, packed: bool = False, kernel: str | None = None) -> Shapes:
    """Name → (shape, dtype) of the scratch, forward and backward. packed: calls have `positions`."""
    return ROPE.workspace(Problem(x), kernel=kernel, packed=packed)


@op()
def rope_table(theta: float, d: int, t: int, scaling: RopeScaling | None = None, *, cos: Tensor, sin: Tensor) -> None:
    """cos, sin (T, D/2) of the angles of frequencies.py, computed in float64. It is called once, before the first step. It
    allocates vectors of T float64 numbers; the other functions here allocate nothing."""
    if not theta > 0.0:
        raise ValueError(f"theta: got {theta!r}; accepted: a number > 0")
    if d % 2:
        raise ValueError(f"d: got {d}; accepted: an even head dimension")
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, (t, d // 2), table.dtype, cos.device)
    position = torch.arange(t, dtype=torch.float64, device=cos.device)
    frequencies, factor = rope_frequencies(theta, d, scaling)
    for i, frequency in enumerate(frequencies):
        angle = position * frequency
        cos[:, i].copy_(angle.cos().mul_(factor))
        sin[:, i].copy_(angle.sin().mul_(factor))


@op()
def rope_fwd(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, *, y: Tensor, **where: Unpack[Where]
) -> None:
    """y = x rotated by its positions; y may be x. Tables may be longer than T: only their first T rows are used."""
    _rotate(x, cos, sin, positions, 1.0, y, where)


@op()
def rope_bwd(
    dy: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, *, dx: Tensor, **where: Unpack[Where]
) -> None:
    """dx = dy rotated back; dx may be dy."""
    _rotate(dy, cos, sin, positions, -1.0, dx, where)


def _rotate(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, sign: float, y: Tensor, where: Where
) -> None:
    b, t, _, d = x.shape
    acc = accumulation_dtype(x.dtype)
    if d % 2:
        raise ValueError(f"x: got shape {tuple(x.shape)}; accepted: an even head dimension")
    check_tensor("y", y, tuple(x.shape), x.dtype, x.device)
    for name, table in (("cos", cos), ("sin", sin)):
        least = 0 if positions is not None else t
        check_tensor(name, table, (max(least, table.shape[0]), d // 2), acc, x.device)
    if positions is not None:
        check_positions(positions, (b, t), x)
    options = {"packed": positions is not None}
    ROPE.run("rotate", Problem(x), x, cos, sin, positions, sign, options=options, y=y, **where)
