"""A small program of ops to trace, plan, bind and run: a stack of y = x + tanh(x W1') W2'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilegrad.kernels.op import op
from tilegrad.memory.planned.trace import Handle
from tilegrad.memory.types import BufferType


@op()
def linear_fwd(x: Any, w: Any, *, y: Any) -> None:
    torch.mm(x, w.t(), out=y)


@op(accumulates=("dw",))
def linear_bwd(dy: Any, x: Any, w: Any, *, dx: Any, dw: Any) -> None:
    torch.mm(dy, w, out=dx)
    dw.addmm_(dy.t(), x)


@op()
def tanh_fwd(h: Any, *, a: Any) -> None:
    torch.tanh(h, out=a)


@op()
def tanh_bwd(da: Any, h: Any, *, dh: Any) -> None:
    dh.copy_(da * (1 - h.tanh().square()))


@op()
def add(x: Any, f: Any, *, y: Any) -> None:
    torch.add(x, f, out=y)


@op()
def half_mean_square_bwd(y: Any, *, dy: Any) -> None:
    torch.div(y, y.numel(), out=dy)


@dataclass(frozen=True, slots=True)
class Param:
    value: Any
    grad: Any


@dataclass(frozen=True, slots=True)
class Layer:
    """h = x W1'   a = tanh(h)   f = a W2'   y = x + f. h is saved and a is recomputed, which starts a new live range."""

    w1: Param
    w2: Param
    h: Any
    a: Any
    f: Any
    da: Any
    dh: Any
    dx: Any

    def forward(self, x: Any, y: Any) -> None:
        linear_fwd(x, self.w1.value, y=self.h)
        tanh_fwd(self.h, a=self.a)
        linear_fwd(self.a, self.w2.value, y=self.f)
        add(x, self.f, y=y)

    def backward(self, dy: Any, x: Any, dx: Any) -> None:
        tanh_fwd(self.h, a=self.a)
        linear_bwd(dy, self.a, self.w2.value, dx=self.da, dw=self.w2.grad)
        tanh_bwd(self.da, self.h, dh=self.dh)
        linear_bwd(self.dh, x, self.w1.value, dx=self.dx, dw=self.w1.grad)
        add(dy, self.dx, y=dx)


@dataclass(frozen=True, slots=True)
class Stack:
    layers: tuple[Layer, ...]
    x: list[Any]
    dx: list[Any]
    unused: Any

    def step(self) -> None:
        for n, layer in enumerate(self.layers):
            layer.forward(self.x[n], self.x[n + 1])
        half_mean_square_bwd(self.x[-1], dy=self.dx[-1])
        for n in reversed(range(len(self.layers))):
            self.layers[n].backward(self.dx[n + 1], self.x[n], self.dx[n])


def declare(n_layer: int = 6, rows: int = 8, width: int = 16, dtype: torch.dtype = torch.float32) -> Stack:
    def buffer(name: str, shape: tuple[int, ...], role: Any = "activations", layer: str = "") -> Handle:
        return Handle(name, shape, dtype, BufferType.OUTPUT if name[0] == "x" else BufferType.TEMP, role, layer)

    def layer(n: int) -> Layer:
        def param(name: str, shape: tuple[int, ...]) -> Param:
            return Param(
                buffer(f"{n}.{name}", shape, "params", f"layer {n}"),
                buffer(f"{n}.d{name}", shape, "grads", f"layer {n}"),
            )

        wide = {name: buffer(f"{n}.{name}", (rows, 4 * width), layer=f"layer {n}") for name in ("h", "a", "da", "dh")}
        narrow = {name: buffer(f"{n}.{name}", (rows, width), layer=f"layer {n}") for name in ("f", "dx")}
        return Layer(param("w1", (4 * width, width)), param("w2", (width, 4 * width)), **wide, **narrow)

    return Stack(
        tuple(layer(n) for n in range(n_layer)),
        [buffer(f"x{n}", (rows, width), "activations" if n else "inputs") for n in range(n_layer + 1)],
        [buffer(f"dx{n}", (rows, width)) for n in range(n_layer + 1)],
        buffer("unused", (3,)),
    )


def fill(stack: Stack, seed: int = 1) -> None:
    """The same weights and input every time, and gradients of zero."""
    generator = torch.Generator().manual_seed(seed)
    for layer in stack.layers:
        for param in (layer.w1, layer.w2):
            param.value.copy_(torch.randn(param.value.shape, generator=generator) * 0.2)
            param.grad.zero_()
    stack.x[0].copy_(torch.randn(stack.x[0].shape, generator=generator))


def gradients(stack: Stack) -> list[torch.Tensor]:
    return [param.grad.clone() for layer in stack.layers for param in (layer.w1, layer.w2)]
