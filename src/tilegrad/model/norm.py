"""Layer norm and RMS norm as a layer: y = norm(x), saved with the row statistics that the backward needs.

The backward adds to dx: it is the residual stream's gradient, which the norm's branch joins.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.norm import layernorm_bwd, layernorm_fwd, norm_workspace, rmsnorm_bwd, rmsnorm_fwd
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

    def forward(self, x: Buffer) -> Buffer:
        bias = self.b.value if self.b else None
        scratch = self.forward_scratch
        if self.mean is not None:
            layernorm_fwd(x, self.w.value, bias, self.eps, y=self.y, mean=self.mean, rstd=self.rstd, scratch=scratch)
        else:
            rmsnorm_fwd(x, self.w.value, self.eps, y=self.y, rstd=self.rstd, scratch=scratch)
        return self.y

    def backward(self, dy: Buffer, x: Buffer, *, dx: Buffer) -> None:
        w, dw, accumulate, scratch = self.w.value, self.w.grad, self.w.accumulate, self.backward_scratch
        if self.mean is not None:
            db = self.b.grad if self.b else None
            layernorm_bwd(dy, x, w, self.mean, self.rstd, dx=dx, dw=dw, db=db, accumulate=accumulate, scratch=scratch)
        else:
            rmsnorm_bwd(dy, x, w, self.rstd, dx=dx, dw=dw, accumulate=accumulate, scratch=scratch)
