"""What layers are made of: parameters, and the declaration of every buffer that a program on (b, t) tokens uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..memory.planned.trace import Handle
from ..memory.types import BufferType, Role
from .config import ModelConfig

Scratch = dict[str, Any]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True)
class Param:
    """`value` is what ops read, `grad` what they add to and `master` what the optimizer updates, the two float32 or better.
    `master` is the same buffer as `value`, but for a shorter compute dtype on CUDA: on a CPU the ops round what they read.
    Where `accumulate` is False, the first op of a backward that forms `grad` overwrites it."""

    name: str
    value: Any
    grad: Any
    master: Any
    accumulate: bool


@dataclass(frozen=True, slots=True)
class Declare:
    """Handles of a program on b sequences of t tokens. Buffers of one name are one buffer. `accumulate`: parameter
    gradients are added to; else the program is the first of a step, and overwrites them."""

    config: ModelConfig
    b: int
    t: int
    dtype: torch.dtype
    device: torch.device
    accumulate: bool = True
    params: dict[str, Param] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """Rows of the residual stream."""
        return self.b * self.t

    @property
    def wide(self) -> torch.dtype:
        """The dtype of gradients, statistics and master weights."""
        return torch.promote_types(self.dtype, torch.float32)

    def param(self, name: str, *shape: int) -> Param:
        """A parameter with its gradient, once for each name."""
        if name not in self.params:
            layer = _layer_of(name)
            master = self._handle(name, shape, self.wide, BufferType.TEMP, "params", layer)
            grad = self._handle(f"d {name}", shape, self.wide, BufferType.TEMP, "grads", layer)
            short = self.dtype != self.wide and self.device.type != "cpu"
            value = (
                self._handle(f"{name} (compute)", shape, self.dtype, BufferType.TEMP, "params", layer)
                if short
                else master
            )
            self.params[name] = Param(name, value, grad, master, self.accumulate)
        return self.params[name]

    def rows(self, name: str, columns: int, type: BufferType = BufferType.TEMP) -> Handle:
        """(N, columns) in the compute dtype."""
        return self.buffer(name, (self.n, columns), type=type)

    def buffer(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None, *,
        type: BufferType = BufferType.TEMP, role: Role = "activations",
    ) -> Handle:  # fmt: skip
        return self._handle(name, shape, dtype or self.dtype, type, role, _layer_of(name))

    def scratch(self, name: str, shapes: Shapes, types: dict[str, BufferType] | None = None) -> Scratch:
        """A buffer for each of an op's needs."""
        kinds = types or {}
        return {
            key: self.buffer(f"scratch.{name}.{key}", shape, dtype, type=kinds.get(key, BufferType.TEMP))
            for key, (shape, dtype) in shapes.items()
        }

    def _handle(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, type: BufferType, role: Role, layer: str
    ) -> Handle:
        return Handle(name, shape, dtype, type, role, layer, self.device)


def _layer_of(name: str) -> str:
    """blocks.3.attn.qkv.weight → blocks.3; what belongs to no block is named by its first word."""
    parts = name.removeprefix("d ").split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]
