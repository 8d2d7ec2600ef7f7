"""What an op works in: buffers of the caller's that hold nothing between calls.

`<op>_workspace(…)` declares them as name → (shape, dtype) from shapes, dtypes and devices alone, so handles will do. An
op views the beginning of what it is given in the shape it needs: buffers planned for a large batch serve a small one.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

Scratch = dict[str, Tensor]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, row statistics and parameter gradients: float64 for float64, float32 for the rest."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def views(scratch: Scratch | None, needed: Shapes, device: Any, op: str) -> Scratch:
    """The declared buffers as views of the caller's."""
    out = {}
    for name, (shape, dtype) in needed.items():
        x = None if scratch is None else scratch.get(name)
        if x is None or x.dtype != dtype or x.device != device or x.numel() < prod(shape) or not x.is_contiguous():
            accepted = f"a contiguous {dtype} tensor of at least {prod(shape)} elements on {device}"
            accepted += f": {op}_workspace(…) names all"
            if x is None:
                raise ValueError(f"scratch: {op} got no {name!r}; accepted: {accepted}")
            got = f"{x.dtype} {tuple(x.shape)} on {x.device}, strides {x.stride()}"
            raise ValueError(f"scratch[{name!r}]: {op} got {got}; accepted: {accepted}")
        out[name] = x if x.shape == shape else x.view(-1)[: prod(shape)].view(shape)
    return out


def rows_of(x: Tensor, i: slice) -> Tensor:
    """x[i], rows i; x itself where these are all of them: of a small op, indexing is a good part of the time."""
    return x if i.start == 0 and i.stop == x.shape[0] else x[i]


def blocks(n: int, size: int) -> Iterator[slice]:
    """0 … n cut into runs of at most `size`."""
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))
