"""`_smallest` of Triton's sampling, in a kernel of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilegrad.kernels.gpu import launch
from tilegrad.kernels.sampling.triton_ops import _smallest


@triton.jit
def _smallest_kernel(x, key, V, bound, scale, MASSES: tl.constexpr, TILE: tl.constexpr):
    tl.store(key, _smallest(x, V, tl.load(bound), scale, MASSES=MASSES, TILE=TILE))


def smallest_key(x: Tensor, bound: float, scale: float, *, masses: bool) -> int:
    key, limit = torch.zeros((), dtype=torch.int32), torch.tensor(bound, dtype=torch.float64)
    launch(_smallest_kernel, (1,), x, key, len(x), limit, scale, MASSES=masses, TILE=16)
    return int(key)
