"""The feed-forward branch of a block.

    h = x W_upᵀ + b      a = act(h)               swiglu: [h, g] = x [W_up; W_gate]ᵀ + b      a = silu(g) ∘ h
    y = a W_downᵀ + b
    da = dy W_down       dh = da ∘ act'(h)        dx = dh W_up                                dx = [dh, dg] [W_up; W_gate]
Saved: h; x (the norm's output) and a unless recomputed.       x, y (N, C)   a (N, F)   h (N, F), for swiglu (N, 2·F) with g

The activation's backward is the last op that reads h. It computes up's bias gradient Σ dh, and writes a recomputed a over h.
For swiglu it writes [dh, dg] over [h, g], and a over da. So the order is: dgrad of down (da), activation (dh), wgrad of down
(dW), dgrad of up (dx). (In float8, a is rounded from h. If the backward rounds a again, the wgrad of down comes before the
activation.) The wgrad of up, `backward_weight`, runs after the norm's backward, which may recompute x. If only float8 products
read dh, the activation's backward writes only the rounded dh.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.activation import activation_bwd, activation_fwd, activation_workspace, swiglu_bwd, swiglu_fwd
from ..kernels.fp8_linear import fp8_activation_workspace
from ..kernels.scratch import Scratch
from .layer import Buffer, Declare
from .linear import LinearLayer
from .lora import Adapter


@dataclass(frozen=True, slots=True)
class FeedForward:
    up: LinearLayer  # swiglu: up and gate
    down: LinearLayer
    activation: str
    invariant: bool
    keeps_a: bool  # whether a is saved for the backward
    h: Buffer
    a: Buffer
    da: Buffer
    dh: Buffer  # the buffer of da; swiglu: the buffer of h
    rounds_dh: bool  # whether only float8 products read dh
    adapter: Adapter | None  # the adapter of up and gate
    down_adapter: Adapter | None
    backward_scratch: Scratch

    @classmethod
    def declare(cls, at: Declare, block: int, seed: Buffer | None, *, keeps_a: bool, keeps_x: bool) -> FeedForward:
        name = f"blocks.{block}.ffn"
        c, f, bias, kind = at.config.n_embd, at.config.ffn, at.config.ffn_bias, at.config.activation
        parts = {"up": (0, 0), "gate": (0, f)} if kind == "swiglu" else {"up": (0, 0)}
        width, widths = f * len(parts), (f,) * len(parts)
        up = LinearLayer.declare(at, f"{name}.{'_'.join(parts)}", c, width, bias=bias, parts=widths, keeps_x=keeps_x)
        down = LinearLayer.declare(at, f"{name}.down", f, c, at.onto_stream, bias=bias, keeps_x=keeps_a)
        h, da = at.rows(f"{name}.h", width), at.rows(f"{name}.da", f)
        adapter = Adapter.declare(at, block, "ffn.in", (up,), parts, seed)
        rounds_dh, sums = up.rounds_dy and adapter is None, up.b is not None
        if rounds_dh:
            shapes = fp8_activation_workspace(at.form(f), kind, sums=sums)
        else:
            shapes = activation_workspace(at.form(f), kind, sums=sums, invariant=at.invariant)
        return cls(
            up=up,
            down=down,
            activation=kind,
            invariant=at.invariant,
            keeps_a=keeps_a,
            h=h,
            a=at.rows(f"{name}.a", f),
            da=da,
            dh=h if kind == "swiglu" else da,
            rounds_dh=rounds_dh,
            adapter=adapter,
            down_adapter=Adapter.declare(at, block, "ffn.down", (down,), {"down": (0, 0)}, seed),
            backward_scratch=at.scratch(kind, shapes),
        )

    def forward(self, x: Buffer, *, y: Buffer) -> None:
        self.compute_h(x)
        if self.rounds_a:
            if self.keeps_a and self.reads_a:
                self.compute_a()
            self.down.forward_activation(self.h, self.activation, y=y)
            return
        self.compute_a()
        if self.down_adapter is not None:
            self.down_adapter.forward(self.a)
        self.down.forward(self.a, y=y, adapter=self.down_adapter)

    def recompute(self, x: Buffer) -> None:
        """x → h, and a if the backward reads a."""
        self.compute_h(x)
        if self.reads_a:
            self.compute_a()

    def compute_a(self) -> None:
        if self.gated:
            swiglu_fwd(self.h, a=self.a, invariant=self.invariant)
        else:
            activation_fwd(self.h, self.activation, a=self.a, invariant=self.invariant)

    def compute_h(self, x: Buffer) -> None:
        if self.adapter is not None:
            self.adapter.forward(x)
        self.up.forward(x, y=self.h, adapter=self.adapter)

    def backward(self, dy: Buffer, *, dx: Buffer, bias_grad: bool, recompute: bool) -> None:
        """Computes dx, down's weight gradient and, if `bias_grad`, down's bias gradient. recompute: a was not saved."""
        recomputed_a = (self.da if self.gated else self.h) if recompute and self.reads_a else None
        a = self.a if recomputed_a is None else recomputed_a
        if self.down_adapter is not None:
            self.down_adapter.backward(dy)
        self.down.backward_input(dy, dx=self.da, adapter=self.down_adapter)
        if self.rounds_a_again and self.down.fp8 is not None:
            self.down.fp8.x.of_activation(self.h, self.activation, rows=False)
            self.down.backward_weight(dy, None, bias_grad=bias_grad)
            self.backward_activation(a=recomputed_a)
        else:
            self.backward_activation(a=recomputed_a)
            self.down.backward_weight(dy, a, bias_grad=bias_grad)
        if self.down_adapter is not None:
            self.down_adapter.backward_weight(a)
        if self.adapter is not None:
            self.adapter.backward(self.dh)
        self.up.backward_input(None if self.rounds_dh else self.dh, dx=dx, adapter=self.adapter)

    def backward_activation(self, *, a: Buffer | None) -> None:
        """da → dh, up's bias gradient, and a if it is given."""
        da, h, dh, sums = self.da, self.h, self.dh, self.up.bias_grad
        accumulate, invariant, scratch = self.up.w.accumulate, self.invariant, self.backward_scratch
        if self.rounds_dh and self.up.fp8 is not None:
            self.up.fp8.dy.of_activation_backward(
                da, h, self.activation, a=a, dh_sum=sums, accumulate=accumulate, scratch=scratch
            )
        elif self.gated:
            swiglu_bwd(
                da, h, dup_gate=dh, a=a, dup_gate_sum=sums, accumulate=accumulate, invariant=invariant, scratch=scratch
            )
        else:
            activation_bwd(
                da,
                h,
                self.activation,
                dh=dh,
                a=a,
                dh_sum=sums,
                accumulate=accumulate,
                invariant=invariant,
                scratch=scratch,
            )

    def backward_weight(self, x: Buffer) -> None:
        """The weight gradient of up, after `backward`."""
        self.up.backward_weight(self.dh, x, bias_grad=False)
        if self.adapter is not None:
            self.adapter.backward_weight(x)

    @property
    def gated(self) -> bool:
        return self.activation == "swiglu"

    @property
    def rounds_a(self) -> bool:
        """Whether the forward rounds act(h) to float8 from h."""
        return self.down.fp8 is not None and self.down_adapter is None

    @property
    def rounds_a_again(self) -> bool:
        """Whether the backward rounds act(h) again, for the weight gradient of down, because a in float8 was not kept."""
        fp8 = self.down.fp8
        return self.rounds_a and fp8 is not None and fp8.weight_gradient and not fp8.keeps

    @property
    def reads_a(self) -> bool:
        """Whether the backward reads a."""
        adapted = self.down_adapter is not None and self.down_adapter.a.grad is not None
        return adapted or (self.down.reads_x and not self.rounds_a_again)

    @property
    def reads_x(self) -> bool:
        """Whether `backward_weight` reads x."""
        adapted = self.adapter is not None and self.adapter.a.grad is not None
        return adapted or self.up.reads_x
