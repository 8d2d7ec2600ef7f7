"""The feed-forward branch of a block.

    h = x W_up' + b      a = act(h)               swiglu: a = silu(x W_gate') ∘ h
    y = a W_down' + b
    da = dy W_down       dh = da ∘ act'(h)        dx = dh W_up (+ dgate W_gate)
Saved: x (the norm's output), h (and gate), a unless it is recomputed.        x, y (N, C)   h, a (N, F)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..kernels.activation import activation_bwd, activation_fwd, swiglu_bwd, swiglu_fwd
from ..kernels.residual import add_fwd
from .layer import Declare
from .linear import LinearLayer


@dataclass(frozen=True, slots=True)
class FeedForward:
    up: LinearLayer
    gate: LinearLayer | None  # swiglu only
    down: LinearLayer
    activation: str
    h: Any
    g: Any  # swiglu only
    a: Any
    da: Any
    dh: Any
    dx_part: Any  # swiglu only

    @classmethod
    def declare(cls, at: Declare, name: str) -> FeedForward:
        c, f = at.config.n_embd, at.config.ffn
        swiglu = at.config.activation == "swiglu"
        return cls(
            up=LinearLayer.declare(at, f"{name}.up", c, f),
            gate=LinearLayer.declare(at, f"{name}.gate", c, f) if swiglu else None,
            down=LinearLayer.declare(at, f"{name}.down", f, c),
            activation=at.config.activation,
            h=at.rows(f"{name}.h", f),
            g=at.rows(f"{name}.g", f) if swiglu else None,
            a=at.rows(f"{name}.a", f),
            da=at.rows(f"{name}.da", f),
            dh=at.rows(f"{name}.dh", f) if swiglu else at.rows(f"{name}.da", f),
            dx_part=at.rows("scratch.dx_part", c) if swiglu else None,
        )

    def hidden(self, x: Any) -> None:
        """x → h, a."""
        self.up.forward(x, y=self.h)
        if self.gate:
            self.gate.forward(x, y=self.g)
        self.activate()

    def activate(self) -> None:
        """h → a."""
        if self.gate:
            swiglu_fwd(self.g, self.h, a=self.a)
        else:
            activation_fwd(self.h, self.activation, a=self.a)

    def backward(self, dy: Any, x: Any, *, dx: Any) -> None:
        self.down.backward(dy, self.a, dx=self.da)
        if self.gate:
            swiglu_bwd(self.da, self.g, self.h, dgate=self.da, dup=self.dh)
        else:
            activation_bwd(self.da, self.h, self.activation, dh=self.dh)
        self.up.backward(self.dh, x, dx=dx)
        if self.gate:
            self.gate.backward(self.da, x, dx=self.dx_part)
            add_fwd(dx, self.dx_part, y=dx)
