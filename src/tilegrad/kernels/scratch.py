"""Scratch: buffers from the caller that an op uses as workspace; their contents do not matter between calls.

`<op>_workspace(…)` declares them as name → (shape, dtype) from shapes, dtypes and devices alone, so a `Form` or a handle is
enough. `new_scratch` allocates them. `views` gives an op the beginning of each buffer, in the shape that the call needs.
So buffers declared for a large batch also serve a small one.

If an op has several kernels, each kernel names its own buffers, and `below` adds the kernel's name as a prefix: "delta" of
kernel "hopper" is "hopper.delta" to the caller. So no two kernels share a buffer. An op that calls another op declares the
scratch of the called op under the name of the called op. The two functions for this are `below` and `of`:

    declare   shapes |= below("linear", linear_workspace(…))          Table.workspace does it for the kernels of a table
    pass on   linear_fwd(…, scratch=of("linear", scratch))            views(…, kernel="hopper") does it, and checks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

Scratch = dict[str, Tensor]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
Views = Callable[..., Scratch]  # (*memory) → the declared buffers by name: `Layout(…).of` or `separate(…)`
T = TypeVar("T")

SLOT_BYTES = 256  # alignment of buffers in one allocation, as CUDA aligns allocations


class TensorLike(Protocol):
    """The attributes of a tensor that a workspace or a table reads; a `Form` and a handle of the memory plan have them too."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True, slots=True)
class Form:
    """The shape, dtype and device of a tensor that need not exist."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, row statistics and parameter gradients: float64 for float64, float32 for all other dtypes."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def below(owner: str, shapes: Mapping[str, T]) -> dict[str, T]:
    """The buffers of `owner`, a kernel or an op, under the names that its caller uses: owner.name."""
    return {f"{owner}.{name}": value for name, value in shapes.items()}


def of(owner: str, scratch: Mapping[str, T]) -> dict[str, T]:
    """The reverse of `below`: the buffers of `owner`, under the owner's own names."""
    return {name[len(owner) + 1 :]: value for name, value in scratch.items() if name.startswith(f"{owner}.")}


def larger(a: Shapes, b: Shapes) -> Shapes:
    """Buffers that are enough for a and for b: the larger one of each name."""
    for name in a.keys() & b.keys():
        if a[name][1] != b[name][1]:
            raise ValueError(f"scratch[{name!r}]: got {a[name][1]} and {b[name][1]}; accepted: one dtype per name")
    return a | {name: new for name, new in b.items() if name not in a or prod(new[0]) >= prod(a[name][0])}


def new_scratch(shapes: Shapes, device: torch.device | str) -> Scratch:
    """Allocates the declared buffers, uninitialised."""
    return {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}


class Layout:
    """Declared buffers, one after the other in one buffer of `nbytes` bytes."""

    def __init__(self, shapes: Shapes) -> None:
        self._places: dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int]] = {}
        self.nbytes = 0
        for name, (shape, dtype) in shapes.items():
            strides = tuple([prod(shape[i + 1 :]) for i in range(len(shape))])
            self._places[name] = shape, strides, dtype, self.nbytes // dtype.itemsize
            self.nbytes += -(-prod(shape) * dtype.itemsize // SLOT_BYTES) * SLOT_BYTES

    def below(self, owner: str) -> Layout:
        """Only the buffers of `owner`, at the same offsets."""
        part = Layout({})
        part.nbytes, part._places = self.nbytes, of(owner, self._places)
        return part

    def of(self, buffer: Tensor) -> Scratch:
        """Views of the buffer, by name."""
        typed = {dtype: buffer.view(dtype) for dtype in {place[2] for place in self._places.values()}}
        return {
            name: typed[dtype].as_strided(shape, strides, typed[dtype].storage_offset() + start)
            for name, (shape, strides, dtype, start) in self._places.items()
        }


def separate(names: Iterable[str]) -> Views:
    """Views for declared buffers that are separate tensors, passed in the order of declaration."""
    names = tuple(names)
    return lambda *memory: dict(zip(names, memory, strict=True))


def views(
    scratch: Scratch | None, needed: Shapes, device: Any, op: str, *, kernel: str | None = None, more: str = ""
) -> Scratch:
    """The needed buffers as views of the caller's scratch, which may be larger. With `kernel`, the names in the scratch begin
    with the kernel's name. `more` is appended to the error text."""
    out = {}
    for own, (shape, dtype) in needed.items():
        name = own if kernel is None else f"{kernel}.{own}"
        x = None if scratch is None else scratch.get(name)
        if x is None or x.dtype != dtype or x.device != device or x.numel() < prod(shape) or not x.is_contiguous():
            accepted = f"a contiguous {dtype} tensor of at least {prod(shape)} elements on {device}"
            accepted += f"; {op}_workspace(…) lists all buffers{more}"
            if x is None:
                raise ValueError(f"scratch: {op} got no {name!r}; accepted: {accepted}")
            got = f"{x.dtype} {tuple(x.shape)} on {x.device}, strides {x.stride()}"
            raise ValueError(f"scratch[{name!r}]: {op} got {got}; accepted: {accepted}")
        out[own] = x if x.shape == shape else x.view(-1)[: prod(shape)].view(shape)
    return out


def rows_per_block(x: TensorLike, elements: Mapping[str, int]) -> int:
    """Rows of x (N, C) to process at once: about `elements[device type]` elements, at least one row, at most N."""
    n, c = x.shape
    return max(1, min(n, elements[x.device.type] // max(c, 1)))


def rows_of(x: Tensor, i: slice) -> Tensor:
    """x[i], or x itself if i covers all rows: indexing would be a large part of the time of a small op."""
    return x if i.start == 0 and i.stop == x.shape[0] else x[i]


def blocks(n: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover 0 … n."""
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))
