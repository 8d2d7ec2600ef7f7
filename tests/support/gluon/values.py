"""The values of device functions: integers, tensors in registers, pointers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Number(int):
    """An integer of the device."""

    @property
    def value(self) -> Number:
        return self

    def __floordiv__(self, other: Any) -> Any:
        return _quotient(self, other) if isinstance(other, int) else NotImplemented

    def __rfloordiv__(self, other: Any) -> Any:
        return _quotient(other, self)

    def __mod__(self, other: Any) -> Any:
        return Number(int(self) - int(_quotient(self, other)) * int(other))

    def __rmod__(self, other: Any) -> Any:
        return Number(other) % self


def _quotient(x: int, y: int) -> Number:
    size = abs(int(x)) // abs(int(y))
    return Number(size if (x < 0) == (y < 0) else -size)


def _stays_a_number(name: str) -> Callable[..., Any]:
    def method(self: Number, *other: Any) -> Any:
        result = getattr(int, name)(self, *other)
        return Number(result) if isinstance(result, int) else result

    return method


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "and", "rand", "or", "ror", "lshift", "rshift", "neg"):
    setattr(Number, f"__{_name}__", _stays_a_number(f"__{_name}__"))


class Block(Tensor):
    """A tensor in registers."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What torch's own method does for functions that return a tensor or several, in less than half the time."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            return result.as_subclass(cls)
        return type(result)(map(block, result)) if type(result) in (tuple, list) else result

    def split(self) -> tuple[Block, Block]:  # type: ignore[override]
        """The two halves of the last axis, as Triton's split gives them."""
        first, last = self.unbind(-1)
        return block(first), block(last)


def block(x: Tensor) -> Block:
    return x.as_subclass(Block)


class Pointer:
    """A pointer into the memory of a tensor."""

    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, n: Any) -> Pointer:
        return Pointer(self.memory, self.at + n)

    @staticmethod
    def of(x: Tensor) -> Pointer:
        reach = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        return Pointer(x.as_strided((reach,), (1,)))

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        """(where, mask) as tensors; an address outside is an error."""
        where, inside = torch.broadcast_tensors(torch.as_tensor(self.at).long(), torch.as_tensor(mask))
        taken = where[inside]
        assert not taken.numel() or 0 <= int(taken.min()) <= int(taken.max()) < len(self.memory), "address outside"
        return where, inside
