"""The feed-forward branch of a block.

    h = x W_up' + b      a = act(h)               swiglu: a = silu(x W_gate') ∘ h
    y = a W_down' + b
    da = dy W_down       dh = da ∘ act'(h)        dx = dh W_up (+ dgate W_gate)
Saved: x (the norm's output), h (and gate), a unless it is recomputed.        x, y (N, C)   h, a (N, F)
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.activation import activation_bwd, activation_fwd, swiglu_bwd, swiglu_fwd
from .layer import Buffer, Declare
from .linear import LinearLayer


@dataclass(frozen=True, slots=True)
class FeedForward:
    """y = act(x W_up' + b) W_down' + b"""

    up: LinearLayer
    down: LinearLayer
    activation: str
    h: Buffer
    a: Buffer
    da: Buffer

    @classmethod
    def declare(cls, at: Declare, name: str) -> FeedForward:
        c, f = at.config.n_embd, at.config.ffn
        return cls(
            up=LinearLayer.declare(at, f"{name}.up", c, f, bias=at.config.ffn_bias),
            down=LinearLayer.declare(at, f"{name}.down", f, c, at.onto_stream, bias=at.config.ffn_bias),
            activation=at.config.activation,
            h=at.rows(f"{name}.h", f),
            a=at.rows(f"{name}.a", f),
            da=at.rows(f"{name}.da", f),
        )

    def forward(self, x: Buffer, *, y: Buffer) -> None:
        self.up.forward(x, y=self.h)
        self.activate()
        self.down.forward(self.a, y=y)

    def backward(self, dy: Buffer, *, dx: Buffer, bias: bool) -> None:
        """dx, and the gradients of down; `bias`: that of its bias too."""
        self.down.backward_input(dy, dx=self.da)
        self.down.backward_weight(dy, self.a, bias=bias)
        activation_bwd(self.da, self.h, self.activation, dh=self.da)
        self.up.backward_input(self.da, dx=dx)

    def backward_weight(self, x: Buffer) -> None:
        """The gradients of up, after `backward`."""
        self.up.backward_weight(self.da, x)

    def recompute(self, x: Buffer) -> None:
        """What the backward reads: h and a."""
        self.up.forward(x, y=self.h)
        self.activate()

    def activate(self) -> None:
        """a = act(h)"""
        activation_fwd(self.h, self.activation, a=self.a)


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """y = (silu(x W_gate' + b) ∘ (x W_up' + b)) W_down' + b"""

    up: LinearLayer
    gate: LinearLayer
    down: LinearLayer
    h: Buffer
    g: Buffer
    a: Buffer
    da: Buffer
    dh: Buffer

    @classmethod
    def declare(cls, at: Declare, name: str) -> SwiGLU:
        c, f = at.config.n_embd, at.config.ffn
        return cls(
            up=LinearLayer.declare(at, f"{name}.up", c, f, bias=at.config.ffn_bias),
            gate=LinearLayer.declare(at, f"{name}.gate", c, f, bias=at.config.ffn_bias),
            down=LinearLayer.declare(at, f"{name}.down", f, c, at.onto_stream, bias=at.config.ffn_bias),
            h=at.rows(f"{name}.h", f),
            g=at.rows(f"{name}.g", f),
            a=at.rows(f"{name}.a", f),
            da=at.rows(f"{name}.da", f),
            dh=at.rows(f"{name}.dh", f),
        )

    def forward(self, x: Buffer, *, y: Buffer) -> None:
        self.up.forward(x, y=self.h)
        self.gate.forward(x, y=self.g)
        self.activate()
        self.down.forward(self.a, y=y)

    def backward(self, dy: Buffer, *, dx: Buffer, bias: bool) -> None:
        """dx, and the gradients of down; `bias`: that of its bias too."""
        self.down.backward_input(dy, dx=self.da)
        self.down.backward_weight(dy, self.a, bias=bias)
        swiglu_bwd(self.da, self.g, self.h, dgate=self.da, dup=self.dh)
        self.up.backward_input(self.dh, dx=dx)
        self.gate.backward_input(self.da, dx=dx, accumulate=True)

    def backward_weight(self, x: Buffer) -> None:
        """The gradients of up and gate, after `backward`."""
        self.up.backward_weight(self.dh, x)
        self.gate.backward_weight(self.da, x)

    def recompute(self, x: Buffer) -> None:
        """What the backward reads: h, the gate and a."""
        self.up.forward(x, y=self.h)
        self.gate.forward(x, y=self.g)
        self.activate()

    def activate(self) -> None:
        """a = silu(gate) ∘ h"""
        swiglu_fwd(self.g, self.h, a=self.a)
