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
from .lora import Adapter


@dataclass(frozen=True, slots=True)
class FeedForward:
    up: LinearLayer
    gate: LinearLayer | None  # swiglu
    down: LinearLayer
    activation: str
    invariant: bool
    keeps_a: bool  # whether a is saved for the backward
    h: Buffer
    g: Buffer  # h itself without a gate
    a: Buffer
    da: Buffer  # becomes dg in place
    dh: Buffer  # da itself without a gate
    adapter: Adapter | None  # of gate and up
    down_adapter: Adapter | None
    backward_scratch: Scratch

    @classmethod
    def declare(cls, at: Declare, block: int, seed: Buffer | None, *, keeps_a: bool) -> FeedForward:
        name = f"blocks.{block}.ffn"
        c, f, bias, kind = at.config.n_embd, at.config.ffn, at.config.ffn_bias, at.config.activation
        gated = kind == "swiglu"
        up = LinearLayer.declare(at, f"{name}.up", c, f, bias=bias)
        gate = LinearLayer.declare(at, f"{name}.gate", c, f, bias=bias) if gated else None
        down = LinearLayer.declare(at, f"{name}.down", f, c, at.onto_stream, bias=bias)
        h, da = at.rows(f"{name}.h", f), at.rows(f"{name}.da", f)
        layers = (up,) if gate is None else (up, gate)
        return cls(
            up=up,
            gate=gate,
            down=down,
            activation=kind,
            invariant=at.invariant,
            keeps_a=keeps_a,
            h=h,
            g=at.rows(f"{name}.g", f) if gated else h,
            a=at.rows(f"{name}.a", f),
            da=da,
            dh=at.rows(f"{name}.dh", f) if gated else da,
            adapter=Adapter.declare(at, block, "ffn.in", layers, {"up": (0, 0), "gate": (1, 0)}, seed),
            down_adapter=Adapter.declare(at, block, "ffn.down", (down,), {"down": (0, 0)}, seed),
            backward_scratch=at.scratch(kind, activation_workspace(at.form(f), kind, invariant=at.invariant))
            if up.b
            else {},
        )

    def forward(self, x: Buffer, *, y: Buffer) -> None:
        """If only a float8 product reads a, a is rounded to float8 as it is formed."""
        if self.gate is None and self.down.fp8 is not None and not self.keeps_a and self.down_adapter is None:
            self.up.forward(x, y=self.h)
            self.down.forward_activation(self.h, self.activation, y=y)
        else:
            self.recompute(x)
            adapter = self.down_adapter
            if adapter is not None:
                adapter.forward(self.a)
            self.down.forward(self.a, y=y, adapter=adapter.of(0) if adapter is not None else None)

    def recompute(self, x: Buffer) -> None:
        """x → h, g and a, which the backward reads."""
        to_up = to_gate = None
        if self.adapter is not None:
            self.adapter.forward(x)
            to_up, to_gate = self.adapter.of(0), self.adapter.of(1)
        self.up.forward(x, y=self.h, adapter=to_up)
        if self.gate is not None:
            self.gate.forward(x, y=self.g, adapter=to_gate)
            swiglu_fwd(self.g, self.h, a=self.a, invariant=self.invariant)
        else:
            activation_fwd(self.h, self.activation, a=self.a, invariant=self.invariant)

    def backward(self, dy: Buffer, *, dx: Buffer, bias_grad: bool, recompute: bool) -> None:
        """Forms dx, down's weight gradient and, if `bias_grad`, its bias gradient. recompute: a was not saved."""
        up, g, h, da, a = self.up, self.g, self.h, self.da, self.g if recompute and self.reads_a else None
        h_sum, accumulate, scratch = self.sums[0], up.w.accumulate, self.backward_scratch
        if self.down_adapter is not None:
            self.down_adapter.backward(dy)
        self.down.backward_input(dy, dx=da, adapter=self.down_adapter)
        if self.gate is not None:
            dh, g_sum = self.dh, self.sums[1]
            swiglu_bwd(
                da, g, h, dgate=da, dup=dh, a=a, dgate_sum=g_sum, dup_sum=h_sum, accumulate=accumulate,
                invariant=self.invariant, scratch=scratch,
            )  # fmt: skip
        else:
            activation_bwd(
                da, h, self.activation, dh=da, a=a, dh_sum=h_sum, accumulate=accumulate,
                invariant=self.invariant, scratch=scratch,
            )  # fmt: skip
        self.down.backward_weight(dy, self.a if a is None else a, bias_grad=bias_grad)
        if self.down_adapter is not None:
            self.down_adapter.backward_weight(self.a if a is None else a)
        if self.adapter is not None:
            self.adapter.backward(self.dh, self.da)
        up.backward_input(self.dh, dx=dx, adapter=self.adapter)
        if self.gate is not None:
            self.gate.backward_input(self.da, dx=dx, accumulate=True)

    def backward_weight(self, x: Buffer) -> None:
        """The gradients of up and gate, after `backward`."""
        h_sum, g_sum = self.sums
        self.up.backward_weight(self.dh, x, bias_grad=h_sum is None)
        if self.gate is not None:
            self.gate.backward_weight(self.da, x, bias_grad=g_sum is None)
        if self.adapter is not None:
            self.adapter.backward_weight(x)

    @property
    def sums(self) -> tuple[Buffer | None, Buffer | None]:
        """The bias gradients of up and gate that the activation's backward forms: for swiglu both or none."""
        h_sum, g_sum = self.up.bias_grad, self.gate.bias_grad if self.gate is not None else None
        return (None, None) if self.gate is not None and (h_sum is None or g_sum is None) else (h_sum, g_sum)

    @property
    def reads_a(self) -> bool:
        """Whether the backward reads a."""
        return self.down.w.grad is not None or (self.down_adapter is not None and self.down_adapter.a.grad is not None)

    @property
    def reads_x(self) -> bool:
        """Whether `backward_weight` reads x."""
        layers = [self.up, self.gate] if self.gate is not None else [self.up]
        adapted = self.adapter is not None and self.adapter.a.grad is not None
        return adapted or any(layer.w.grad is not None for layer in layers)
