"""Layer norm and RMS norm: y = norm(x). The forward saves y and the row statistics that the backward needs.

With f the forward is a fused residual add and norm: x1 = x + f, y = norm(x1). The backward adds to dx, the gradient of the
residual stream, and computes Σ dx, the bias gradient of the projection that computed f.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.norm import (
    layernorm_bwd,
    layernorm_fwd,
    norm_workspace,
    rmsnorm_bwd,
    rmsnorm_fwd,
)
from ..kernels.scratch import Scratch
from .layer import Buffer, Constant, Declare, Param


@dataclass(frozen=True, slots=True)
class NormLayer:
    """y = (x − mean) · rstd · w + b, without mean and b for RMS norm        x, y, dy, dx (N, C)   mean, rstd (N,)"""

    w: Param
    b: Param | None
    y: Buffer
    mean: Buffer | None  # None: RMS norm
    rstd: Buffer
    eps: float
    forward_scratch: Scratch
    backward_scratch: Scratch

    @classmethod
    def declare(cls, at: Declare, name: str) -> NormLayer:
        c, layernorm = at.config.n_embd, at.config.norm == "layernorm"
        x = at.rows(f"{name}.y", c)
        return cls(
            w=at.param(f"{name}.weight", c, init=Constant(1.0)),
            b=at.param(f"{name}.bias", c, init=Constant(0.0)) if layernorm and at.config.bias else None,
            y=x,
            mean=at.buffer(f"{name}.mean", (at.n,), at.accumulation_dtype) if layernorm else None,
            rstd=at.buffer(f"{name}.rstd", (at.n,), at.accumulation_dtype),
            eps=at.config.norm_eps,
            forward_scratch=at.scratch("norm", norm_workspace(x, backward=False)),
            backward_scratch=at.scratch("norm_bwd", norm_workspace(x, backward=True)),
        )

    def forward(self, x: Buffer, f: Buffer | None = None, *, x1: Buffer | None = None) -> None:
        """y = norm(x), or x1 = x + f and y = norm(x1)"""
        w, y, rstd, scratch = self.w.value, self.y, self.rstd, self.forward_scratch
        bias = self.b.value if self.b else None
        if self.mean is not None:
            layernorm_fwd(x, w, bias, self.eps, f, x1=x1, y=y, mean=self.mean, rstd=rstd, scratch=scratch)
        else:
            rmsnorm_fwd(x, w, self.eps, f, x1=x1, y=y, rstd=rstd, scratch=scratch)

    def backward(self, dy: Buffer, x: Buffer, *, dx: Buffer, dx_sum: Buffer | None, recompute: bool) -> Buffer:
        """Add to dx, and return y. recompute: compute y again, and overwrite dy with it; otherwise return the saved y. Frozen
        parameters get no gradient."""
        w, dw, mean, rstd, y = self.w.value, self.w.grad, self.mean, self.rstd, dy if recompute else None
        b, db = (self.b.value, self.b.grad) if self.b else (None, None)
        accumulate, scratch = self.w.accumulate, self.backward_scratch
        if mean is not None:
            layernorm_bwd(
                dy, x, w, mean, rstd, b, dx=dx, dw=dw, db=db, dx_sum=dx_sum, y=y, accumulate=accumulate, scratch=scratch
            )
        else:
            rmsnorm_bwd(dy, x, w, rstd, dx=dx, dw=dw, dx_sum=dx_sum, y=y, accumulate=accumulate, scratch=scratch)
        return self.y if y is None else y
