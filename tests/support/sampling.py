"""`smallest_kept`, `kth_largest` and `smallest_kept_mass` of Triton's sampling, each in its own kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilegrad.kernels.gpu import launch
from tilegrad.kernels.sampling.triton_numerics import (
    LEAST_KEY,
    kth_largest,
    mass_of,
    order_key,
    smallest_kept,
    smallest_kept_mass,
)


@triton.jit
def _smallest_kernel(x, key, V, bound, scale, MASSES: tl.constexpr, TILE: tl.constexpr):
    tl.store(key, smallest_kept(x, V, tl.load(bound), scale, MASSES=MASSES, TILE=TILE))


def smallest_key(x: Tensor, bound: float, scale: float, *, masses: bool) -> int:
    key, limit = torch.zeros((), dtype=torch.int32), torch.tensor(bound, dtype=torch.float64)
    launch(_smallest_kernel, (1,), x, key, len(x), limit, scale, MASSES=masses, TILE=16)
    return int(key)


@triton.jit
def _smallest_listed_kernel(x, key, n, bound, most, scale, MASSES: tl.constexpr, TILE: tl.constexpr):
    i = tl.arange(0, TILE)
    listed = tl.load(x + i, mask=i < n, other=0.0)
    if MASSES:
        found = smallest_kept_mass(listed, mass_of(listed, scale), tl.load(bound)).to(tl.int32, bitcast=True)
    else:
        keys = tl.where(i < n, order_key(listed), LEAST_KEY)
        found = kth_largest(keys, n, tl.load(bound).to(tl.int32), most)
    tl.store(key, found)


def smallest_listed_key(x: Tensor, bound: float, scale: float, *, masses: bool, more: int) -> int:
    """The keys are in registers. A search by count ends when it keeps at most bound + more keys."""
    key, limit = torch.zeros((), dtype=torch.int32), torch.tensor(bound, dtype=torch.float64)
    most = int(bound) + more
    launch(_smallest_listed_kernel, (1,), x, key, len(x), limit, most, scale, MASSES=masses, TILE=32)
    return int(key)
