"""The feed-forward branch of a block.

    h = x W_up' + b      a = act(h)               swiglu: g = x W_gate' + b      a = silu(g) ∘ h
    y = a W_down' + b
    da = dy W_down       dh = da ∘ act'(h)        dx = dh W_up (+ dg W_gate)
Saved: x (the norm's output), h (and g), a unless it is recomputed.        x, y (N, C)   h, g, a (N, F)

The activation's backward is the last to read h and g. It forms up's bias gradient Σ dh, and writes a recomputed a over h
(swiglu: over g). So the order is: dgrad of down, activation, wgrad of down, dgrad of up. The wgrad of up, `backward_weight`,
runs after the norm's backward, which may recompute x.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.activation import activation_bwd, activation_fwd, activation_workspace, swiglu_bwd, swiglu_fwd
from ..kernels.scratch import Scratch
from .layer import Buffer, Declare
from .linear import LinearLayer


@dataclass(frozen=True, slots=True)
class FeedForward:
    up: LinearLayer
    gate: LinearLayer | None  # swiglu
    down: LinearLayer
    activation: str
    keeps_a: bool  # whether a is saved for the backward
    h: Buffer
    g: Buffer  # h itself without a gate
    a: Buffer
    da: Buffer  # becomes dg in place
    dh: Buffer  # da itself without a gate
    backward_scratch: Scratch

    @classmethod
    def declare(cls, at: Declare, name: str, *, keeps_a: bool) -> FeedForward:
        c, f, bias, kind = at.config.n_embd, at.config.ffn, at.config.ffn_bias, at.config.activation
        gated = kind == "swiglu"
        up = LinearLayer.declare(at, f"{name}.up", c, f, bias=bias)
        gate = LinearLayer.declare(at, f"{name}.gate", c, f, bias=bias) if gated else None
        h, da = at.rows(f"{name}.h", f), at.rows(f"{name}.da", f)
        return cls(
            up=up,
            gate=gate,
            down=LinearLayer.declare(at, f"{name}.down", f, c, at.onto_stream, bias=bias),
            activation=kind,
            keeps_a=keeps_a,
            h=h,
            g=at.rows(f"{name}.g", f) if gated else h,
            a=at.rows(f"{name}.a", f),
            da=da,
            dh=at.rows(f"{name}.dh", f) if gated else da,
            backward_scratch=at.scratch(kind, activation_workspace(at.form(f), kind)) if up.b else {},
        )

    def forward(self, x: Buffer, *, y: Buffer) -> None:
        """If only a float8 product reads a, a is rounded to float8 as it is formed."""
        if self.gate is None and self.down.fp8 is not None and not self.keeps_a:
            self.up.forward(x, y=self.h)
            self.down.forward_activation(self.h, self.activation, y=y)
        else:
            self.recompute(x)
            self.down.forward(self.a, y=y)

    def recompute(self, x: Buffer) -> None:
        """x → h, g and a, which the backward reads."""
        self.up.forward(x, y=self.h)
        if self.gate is not None:
            self.gate.forward(x, y=self.g)
            swiglu_fwd(self.g, self.h, a=self.a)
        else:
            activation_fwd(self.h, self.activation, a=self.a)

    def backward(self, dy: Buffer, *, dx: Buffer, bias_grad: bool, recompute: bool) -> None:
        """Forms dx, down's weight gradient and, if `bias_grad`, its bias gradient. recompute: a was not saved."""
        up, g, h, da, a = self.up, self.g, self.h, self.da, self.g if recompute else None
        h_sum, accumulate, scratch = up.bias_grad, up.w.accumulate, self.backward_scratch
        self.down.backward_input(dy, dx=da)
        if self.gate is not None:
            dh, g_sum = self.dh, self.gate.bias_grad
            swiglu_bwd(
                da, g, h, dgate=da, dup=dh, a=a, dgate_sum=g_sum, dup_sum=h_sum, accumulate=accumulate, scratch=scratch
            )
        else:
            activation_bwd(da, h, self.activation, dh=da, a=a, dh_sum=h_sum, accumulate=accumulate, scratch=scratch)
        self.down.backward_weight(dy, self.a if a is None else a, bias_grad=bias_grad)
        up.backward_input(self.dh, dx=dx)
        if self.gate is not None:
            self.gate.backward_input(self.da, dx=dx, accumulate=True)

    def backward_weight(self, x: Buffer) -> None:
        """The gradients of up and gate, after `backward`."""
        self.up.backward_weight(self.dh, x, bias_grad=False)
        if self.gate is not None:
            self.gate.backward_weight(self.da, x, bias_grad=False)
