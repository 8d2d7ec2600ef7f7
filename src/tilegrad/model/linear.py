"""y = x W' + b as a layer.        x, dx (N, Cin)   y, dy (N, Cout)   W (Cout, Cin), or (H, D, D) for one matrix per head"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.fp8_linear import fp8_linear_fwd, fp8_linear_workspace
from ..kernels.linear import (
    linear_bwd_input,
    linear_bwd_weight,
    linear_fwd,
    linear_workspace,
    per_head_linear_bwd_input,
    per_head_linear_bwd_weight,
    per_head_linear_fwd,
)
from ..kernels.scratch import Scratch
from .layer import WEIGHT, Buffer, Constant, Declare, Init, Param


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """dx = dy W   dW += dy' x   db += Σ dy"""

    w: Param
    b: Param | None
    per_head: bool
    scale: Buffer | None  # of a float8 forward
    forward_scratch: Scratch
    backward_scratch: Scratch

    @classmethod
    def declare(
        cls, at: Declare, name: str, inputs: int, outputs: int, init: Init = WEIGHT, *, bias: bool | None = None
    ) -> LinearLayer:
        """bias=None: the config's."""
        weight = at.param(f"{name}.weight", outputs, inputs, init=init)
        has_bias = at.config.bias if bias is None else bias
        b = at.param(f"{name}.bias", outputs, init=Constant(0.0)) if has_bias else None
        return cls._declare(at, name, weight, b, inputs, per_head=False)

    @classmethod
    def declare_per_head(cls, at: Declare, name: str) -> LinearLayer:
        """Head h's D outputs read only its own D inputs: weight (H, D, D) = (head, out, in), bias (H, D)."""
        h, d = at.config.n_head, at.config.head_dim
        weight = at.param(f"{name}.weight", h, d, d, init=WEIGHT)
        has_bias = at.config.bias if at.config.qkv_bias is None else at.config.qkv_bias
        bias = at.param(f"{name}.bias", h, d, init=Constant(0.0)) if has_bias else None
        return cls._declare(at, name, weight, bias, h * d, per_head=True)

    @classmethod
    def _declare(cls, at: Declare, name: str, w: Param, b: Param | None, inputs: int, *, per_head: bool) -> LinearLayer:
        site = name.rsplit(".", 1)[-1]  # layers of one kind follow one another: they work in the same scratch
        x, fp8 = at.form(inputs), at.linear == "fp8" and not per_head
        forward = linear_workspace(x, w.value, backward=False)  # evaluation's too, where training is in float8
        if fp8:
            forward |= fp8_linear_workspace(x, w.value)
        return cls(
            w, b, per_head, at.scale(name) if fp8 else None,
            at.scratch(site, forward),
            at.scratch(f"{site}_bwd", linear_workspace(x, w.value, backward=True)),
        )  # fmt: skip

    def forward(self, x: Buffer, *, y: Buffer) -> None:
        w, b, scratch = self.w.value, self.b.value if self.b else None, self.forward_scratch
        if self.scale is not None:
            fp8_linear_fwd(x, w, b, y=y, state=self.scale, scratch=scratch)
        else:
            run = per_head_linear_fwd if self.per_head else linear_fwd
            run(x, w, b, y=y, scratch=scratch)

    def backward_input(self, dy: Buffer, *, dx: Buffer, accumulate: bool = False) -> None:
        """dx = dy W, or dx += dy W"""
        run = per_head_linear_bwd_input if self.per_head else linear_bwd_input
        run(dy, self.w.value, dx=dx, accumulate=accumulate, scratch=self.backward_scratch)

    def backward_weight(self, dy: Buffer, x: Buffer, *, bias: bool = True) -> None:
        """dW += dy' x   db += Σ dy, unless another op forms it"""
        run, db = per_head_linear_bwd_weight if self.per_head else linear_bwd_weight, self.bias_grad if bias else None
        accumulate, scratch = self.w.accumulate, self.backward_scratch
        run(dy, x, self.w.value, dw=self.w.grad, db=db, accumulate=accumulate, scratch=scratch)

    @property
    def bias_grad(self) -> Buffer | None:
        return self.b.grad if self.b else None
