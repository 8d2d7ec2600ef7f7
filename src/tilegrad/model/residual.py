"""The input of a block with the key residual_scalars, a learned sum of two residual streams.

    u = a x + b x0        x: the stream before the block        x0: the stream before the first block        u, x, x0 (N, C)

The scalars a and b are learned. They start at 1 and 0, so that a new model computes the same as without them. u is not saved:
the backward computes u again, in one buffer for all blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.scaled_sum import scaled_sum_bwd, scaled_sum_fwd, scaled_sum_workspace
from ..kernels.scratch import Scratch
from .layer import Buffer, Constant, Declare, Param


@dataclass(frozen=True, slots=True)
class ResidualScalars:
    a: Param
    b: Param
    u: Buffer
    forward_scratch: Scratch
    backward_scratch: Scratch

    @classmethod
    def declare(cls, at: Declare, block: int) -> ResidualScalars:
        name, form = f"blocks.{block}.scalars", at.form(at.config.n_embd)
        return cls(
            a=at.param(f"{name}.x", 1, init=Constant(1.0)),
            b=at.param(f"{name}.x0", 1, init=Constant(0.0)),
            u=at.rows("scratch.scaled", at.config.n_embd),
            forward_scratch=at.scratch("scaled_sum", scaled_sum_workspace(form, backward=False)),
            backward_scratch=at.scratch("scaled_sum_bwd", scaled_sum_workspace(form, backward=True)),
        )

    def forward(self, x: Buffer, x0: Buffer) -> Buffer:
        """Returns u."""
        scaled_sum_fwd(x, x0, self.a.value, self.b.value, y=self.u, scratch=self.forward_scratch)
        return self.u

    def backward(self, x: Buffer, x0: Buffer, *, dx: Buffer, dx0: Buffer) -> None:
        """Overwrites dx, the gradient of u, with the gradient of x; adds to dx0."""
        scaled_sum_bwd(
            dx,
            x,
            x0,
            self.a.value,
            self.b.value,
            dx=dx,
            dx0=dx0,
            da=self.a.grad,
            db=self.b.grad,
            accumulate=self.a.accumulate,
            scratch=self.backward_scratch,
        )
