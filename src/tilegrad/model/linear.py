"""y = x W' + b as a layer.        x, dx (N, Cin)   y, dy (N, Cout)   W (Cout, Cin), or (H, D, D) for one matrix per head"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.column_sum import column_sum_fwd
from ..kernels.fp8_linear import FP8, fp8_activation_fwd, fp8_linear_fwd, fp8_linear_workspace, fp8_quantize_fwd
from ..kernels.linear import (
    linear_bwd_input,
    linear_bwd_weight,
    linear_fwd,
    linear_workspace,
    per_head_linear_bwd_input,
    per_head_linear_bwd_weight,
    per_head_linear_fwd,
)
from ..kernels.low_rank import (
    joined_linear_bwd_input,
    joined_linear_fwd,
    low_rank_add_fwd,
    low_rank_linear_bwd_input,
    low_rank_linear_fwd,
)
from ..kernels.scratch import Scratch, of
from .layer import WEIGHT, Buffer, Constant, Declare, Init, Param
from .lora import Adapter, LowRank


@dataclass(frozen=True, slots=True)
class Fp8:
    """What a float8 forward needs: x in float8, and the scales of x and of W."""

    x: Buffer
    x_scale: Buffer
    w_scale: Buffer

    @classmethod
    def declare(cls, at: Declare, name: str, site: str, inputs: int) -> Fp8:
        x = at.buffer(f"scratch.{site}.x8", (at.n, inputs), FP8)
        return cls(x, at.scale(f"{name}.input"), at.scale(f"{name}.weight"))


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """dx = dy W   dW += dy' x   db += Σ dy         with an adapter (model/lora.py): y += u B'   dx += du A"""

    w: Param
    b: Param | None
    per_head: bool
    invariant: bool
    fp8: Fp8 | None
    forward_scratch: Scratch
    backward_scratch: Scratch

    @classmethod
    def declare(
        cls,
        at: Declare,
        name: str,
        inputs: int,
        outputs: int,
        init: Init = WEIGHT,
        *,
        bias: bool | None = None,
        fp8: bool = True,
        per_head: bool = False,
        parts: tuple[int, ...] = (),
    ) -> LinearLayer:
        """bias=None: as in the config. fp8=False: never in float8, because rounding x would cost what the GEMM gains.
        per_head: head h's D outputs read only its own D inputs, weight (H, D, D) = (head, out, in), bias (H, D).
        parts: the outputs of each of several layers that are computed as one."""
        shape = (at.config.n_head, at.config.head_dim, at.config.head_dim) if per_head else (outputs, inputs)
        has_bias = at.config.bias if bias is None else bias
        rows = shape[1:2] * shape[0] if per_head else parts or (outputs,)
        w = at.param(f"{name}.weight", *shape, init=init, matrices=tuple((n, shape[-1]) for n in rows))
        b = at.param(f"{name}.bias", *shape[:-1], init=Constant(0.0)) if has_bias else None
        site = name.rsplit(".", 1)[-1]  # layers of one kind run one after another and share their scratch
        x = at.form(inputs)
        in_fp8 = fp8 and not per_head and at.linear == "fp8"
        forward = (
            fp8_linear_workspace(x, w.value)
            if in_fp8
            else linear_workspace(x, w.value, backward=False, invariant=at.invariant)
        )
        return cls(
            w=w,
            b=b,
            per_head=per_head,
            invariant=at.invariant,
            fp8=Fp8.declare(at, name, site, inputs) if in_fp8 else None,
            forward_scratch=at.scratch(site, forward),
            backward_scratch=at.scratch(f"{site}_bwd", linear_workspace(x, w.value, backward=True)),
        )

    def forward(self, x: Buffer, *, y: Buffer, adapter: LowRank | None = None) -> None:
        if self.fp8 is not None:
            fp8_quantize_fwd(x, x8=self.fp8.x, state=self.fp8.x_scale)
            self._multiply_fp8(self.fp8, y=y)
            if adapter is not None:
                low_rank_add_fwd(adapter.u, adapter.bs, adapter.parts, ys=[y], scratch=adapter.scratch)
        elif adapter is not None:
            w, b, base = self.w.value, self.b.value if self.b else None, self.forward_scratch
            u, bs, parts, joined, wb, scratch = adapter
            if joined is not None and wb is not None:
                joined_linear_fwd(joined, w, b, bs, parts, y=y, wb=wb)
            else:
                low_rank_linear_fwd(x, w, b, u, bs, parts, y=y, base_scratch=base, scratch=scratch)
        else:
            run = per_head_linear_fwd if self.per_head else linear_fwd
            w, b, scratch = self.w.value, self.b.value if self.b else None, self.forward_scratch
            run(x, w, b, y=y, invariant=self.invariant, scratch=scratch)

    def forward_activation(self, h: Buffer, kind: str, *, y: Buffer) -> None:
        """y = act(h) W' + b in float8; act(h) is not kept."""
        if self.fp8 is None:
            raise ValueError("forward_activation: got a layer that does not multiply in float8; call forward")
        fp8_activation_fwd(h, kind, a8=self.fp8.x, state=self.fp8.x_scale)
        self._multiply_fp8(self.fp8, y=y)

    def _multiply_fp8(self, fp8: Fp8, *, y: Buffer) -> None:
        w, b = self.w.value, self.b.value if self.b else None
        fp8_linear_fwd(fp8.x, fp8.x_scale, w, b, y=y, state=fp8.w_scale, scratch=self.forward_scratch)

    def backward_input(
        self, dy: Buffer, *, dx: Buffer, accumulate: bool = False, adapter: Adapter | None = None
    ) -> None:
        """dx = dy W, or dx += dy W; adapter: the one of this input, whose du A is added too"""
        if adapter is not None and adapter.dy_du is not None and adapter.wa is not None and not accumulate:
            w, du, a = self.w.value, adapter.du, adapter.a.value
            joined_linear_bwd_input(dy, w, du, a, dx=dx, joined=adapter.dy_du, wa=adapter.wa)
            return
        if adapter is not None and adapter.drop is None:
            low_rank_linear_bwd_input(
                dy, self.w.value, adapter.du, adapter.a.value,
                dx=dx, accumulate=accumulate, base_scratch=self.backward_scratch, scratch=adapter.backward_scratch,
            )  # fmt: skip
            return
        run = per_head_linear_bwd_input if self.per_head else linear_bwd_input
        run(dy, self.w.value, dx=dx, accumulate=accumulate, scratch=self.backward_scratch)
        if adapter is not None:
            adapter.backward_dropped(dx=dx)

    def backward_weight(self, dy: Buffer, x: Buffer, *, bias_grad: bool = True) -> None:
        """dW += dy' x   db += Σ dy if `bias_grad`; else another op forms it. Gradients of frozen parameters are not formed."""
        run, db = (
            per_head_linear_bwd_weight if self.per_head else linear_bwd_weight,
            self.bias_grad if bias_grad else None,
        )
        accumulate, scratch = self.w.accumulate, self.backward_scratch
        if self.w.grad is None and not (self.per_head and db is not None):  # x is not read
            if db is not None:
                sums = db.view(dy.shape[1])
                column_sum_fwd(dy, sums=sums, accumulate=accumulate, scratch=of("column_sum", scratch))
            return
        run(dy, x, self.w.value, dw=self.w.grad, db=db, accumulate=accumulate, scratch=scratch)

    @property
    def bias_grad(self) -> Buffer | None:
        return self.b.grad if self.b else None
