"""The feed-forward branch of a block.

    h = x W_up' + b      a = act(h)               swiglu: a = silu(x W_gate') ∘ h
    y = a W_down' + b
    da = dy W_down       dh = da ∘ act'(h)        dx = dh W_up (+ dgate W_gate)
Saved: x (the norm's output), h (and gate), a unless it is recomputed.        x, y (N, C)   h, a (N, F)

The activation's backward reads h for the last time: it forms up's bias gradient Σ dh, and a recomputed a in the place of h
(of the gate). So the order is: dgrad of down, activation, wgrad of down, dgrad of up; and up's wgrad, `backward_weight`, when x
is there.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.activation import activation_bwd, activation_fwd, activation_workspace, swiglu_bwd, swiglu_fwd
from ..kernels.scratch import Scratch
from .layer import Buffer, Declare
from .linear import LinearLayer


@dataclass(frozen=True, slots=True)
class FeedForward:
    """y = act(x W_up' + b) W_down' + b"""

    up: LinearLayer
    down: LinearLayer
    activation: str
    keeps_a: bool  # for the backward
    h: Buffer
    a: Buffer
    da: Buffer
    scratch: Scratch  # of the activation's backward

    @classmethod
    def declare(cls, at: Declare, name: str, *, keeps_a: bool) -> FeedForward:
        c, f = at.config.n_embd, at.config.ffn
        return cls(
            up=LinearLayer.declare(at, f"{name}.up", c, f, bias=at.config.ffn_bias),
            down=LinearLayer.declare(at, f"{name}.down", f, c, at.onto_stream, bias=at.config.ffn_bias),
            activation=at.config.activation,
            keeps_a=keeps_a,
            h=at.rows(f"{name}.h", f),
            a=at.rows(f"{name}.a", f),
            da=at.rows(f"{name}.da", f),
            scratch=_scratch(at, at.config.activation),
        )

    def forward(self, x: Buffer, *, y: Buffer) -> None:
        """Where nobody reads a but a float8 product, a is rounded as it is formed."""
        self.up.forward(x, y=self.h)
        if self.down.fp8 is not None and not self.keeps_a:
            self.down.forward_activation(self.h, self.activation, y=y)
        else:
            self.activate()
            self.down.forward(self.a, y=y)

    def backward(self, dy: Buffer, *, dx: Buffer, bias: bool, recompute: bool) -> None:
        """dx, and the gradients of down; `bias`: that of its bias too; `recompute`: a was not kept."""
        a = self.h if recompute else None
        self.down.backward_input(dy, dx=self.da)
        activation_bwd(
            self.da, self.h, self.activation, dh=self.da, a=a, dh_sum=self.up.bias_grad,
            accumulate=self.up.w.accumulate, scratch=self.scratch,
        )  # fmt: skip
        self.down.backward_weight(dy, self.a if a is None else a, bias=bias)
        self.up.backward_input(self.da, dx=dx)

    def backward_weight(self, x: Buffer) -> None:
        """The gradients of up, after `backward`."""
        self.up.backward_weight(self.da, x, bias=False)

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
    scratch: Scratch  # of the activation's backward

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
            scratch=_scratch(at, "swiglu"),
        )

    def forward(self, x: Buffer, *, y: Buffer) -> None:
        self.up.forward(x, y=self.h)
        self.gate.forward(x, y=self.g)
        self.activate()
        self.down.forward(self.a, y=y)

    def backward(self, dy: Buffer, *, dx: Buffer, bias: bool, recompute: bool) -> None:
        """dx, and the gradients of down; `bias`: that of its bias too; `recompute`: a was not kept."""
        a = self.g if recompute else None
        self.down.backward_input(dy, dx=self.da)
        swiglu_bwd(
            self.da, self.g, self.h, dgate=self.da, dup=self.dh, a=a,
            dgate_sum=self.gate.bias_grad, dup_sum=self.up.bias_grad,
            accumulate=self.up.w.accumulate, scratch=self.scratch,
        )  # fmt: skip
        self.down.backward_weight(dy, self.a if a is None else a, bias=bias)
        self.up.backward_input(self.dh, dx=dx)
        self.gate.backward_input(self.da, dx=dx, accumulate=True)

    def backward_weight(self, x: Buffer) -> None:
        """The gradients of up and gate, after `backward`."""
        self.up.backward_weight(self.dh, x, bias=False)
        self.gate.backward_weight(self.da, x, bias=False)

    def recompute(self, x: Buffer) -> None:
        """What the backward reads: h, the gate and a."""
        self.up.forward(x, y=self.h)
        self.gate.forward(x, y=self.g)
        self.activate()

    def activate(self) -> None:
        """a = silu(gate) ∘ h"""
        swiglu_fwd(self.g, self.h, a=self.a)


def _scratch(at: Declare, kind: str) -> Scratch:
    """Of an activation's backward, where it adds up columns: up has a bias."""
    biased = at.config.bias if at.config.ffn_bias is None else at.config.ffn_bias
    return at.scratch(kind, activation_workspace(at.form(at.config.ffn), kind)) if biased else {}
