"""A pre-norm block of the residual stream.

    x1 = x + drop(attention(norm1(x)))        y = x1 + drop(ffn(norm2(x1)))              x, x1, y (N, C)

The residual add is fused into the next norm: a block reads norm1's output and does not add its last branch f. The next block's
norm1 (ln_f after the last block) computes y = x1 + f. `Transformer.stream` lists each block with its next norm.
With the key residual_scalars a block reads u = a x + b x0 instead of x (model/residual.py). Then norm1 is not fused with the
add before it, and the backward of the projection before norm1 computes the bias gradient of this projection.

The backward overwrites dx, the gradient of y, with the gradient of x. Each branch's norm adds to dx and computes Σ dx. Without
dropout, Σ dx is the bias gradient of the projection before that norm. The weight gradients of a branch's first projections are
computed after the norm's backward, because they read the norm's output, which this backward may recompute.

Each block's `recompute` is a subset of {"norm", "activation", "block"}. A result is computed again just before the backward
reads it, so the old value's live range ends early; the bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..kernels.dropout import dropout_fwd, dropout_workspace
from ..kernels.scratch import Scratch
from .attention import AttentionLayer
from .feedforward import FeedForward
from .layer import Buffer, Declare
from .norm import NormLayer
from .residual import ResidualScalars

Recomputed = Literal["norm", "activation", "block"]


@dataclass(frozen=True, slots=True)
class Dropout:
    """x = drop(x), in place; p = 0 does nothing. Each Dropout of a model has its own `counter`, so the masks differ."""

    p: float
    seed: Buffer | None
    counter: int
    dx: Buffer | None  # where the backward writes
    scratch: Scratch

    @classmethod
    def declare(cls, at: Declare, seed: Buffer | None, counter: int, dx: str) -> Dropout:
        if not at.config.dropout:
            return cls(0.0, None, counter, None, {})
        shapes = dropout_workspace(at.form(at.config.n_embd))
        return cls(at.config.dropout, seed, counter, at.rows(dx, at.config.n_embd), at.scratch("dropout", shapes))

    def forward(self, x: Buffer) -> None:
        if self.seed is not None:
            dropout_fwd(x, self.seed, self.p, self.counter, y=x, scratch=self.scratch)

    def backward(self, dy: Buffer) -> Buffer:
        """Returns dx; dy itself if p = 0."""
        if self.seed is None or self.dx is None:
            return dy
        dropout_fwd(dy, self.seed, self.p, self.counter, y=self.dx, scratch=self.scratch)
        return self.dx


@dataclass(frozen=True, slots=True)
class Block:
    scalars: ResidualScalars | None
    norm1: NormLayer
    attention: AttentionLayer
    drop1: Dropout
    norm2: NormLayer
    ffn: FeedForward
    drop2: Dropout
    x1: Buffer
    f: Buffer  # the output of either branch, not yet added to the stream
    dnorm: Buffer
    recompute: frozenset[Recomputed]

    @classmethod
    def declare(cls, at: Declare, i: int, seed: Buffer | None, recompute: frozenset[Recomputed]) -> Block:
        if not recompute <= {*get_args(Recomputed)}:
            accepted = ", ".join(map(repr, get_args(Recomputed)))
            raise ValueError(f"recompute: got {', '.join(map(repr, sorted(recompute)))}; accepted: some of {accepted}")
        name, c = f"blocks.{i}", at.config.n_embd
        keeps_x = not recompute & {"norm", "block"}
        ffn = FeedForward.declare(at, i, seed, keeps_a=not recompute & {"activation", "block"}, keeps_x=keeps_x)
        return cls(
            scalars=ResidualScalars.declare(at, i) if at.config.residual_scalars else None,
            norm1=NormLayer.declare(at, f"{name}.ln1"),
            attention=AttentionLayer.declare(at, i, seed, keeps_x=keeps_x),
            drop1=Dropout.declare(at, seed, 2 * i + 1, dx="scratch.dbranch"),
            norm2=NormLayer.declare(at, f"{name}.ln2"),
            ffn=ffn,
            drop2=Dropout.declare(at, seed, 2 * i + 2, dx="scratch.dbranch"),
            x1=at.rows(f"{name}.x1", c),
            f=at.rows("scratch.branch", c),
            dnorm=at.rows("scratch.dnorm", c),
            recompute=recompute,
        )

    def forward(self, x: Buffer) -> None:
        """norm1's output → x1 and f; y = x1 + f."""
        self.forward_attention(x)
        self.ffn.forward(self.norm2.y, y=self.f)
        self.drop2.forward(self.f)

    def forward_attention(self, x: Buffer) -> None:
        """norm1's output → x1 and norm2's output."""
        self.attention.forward(self.norm1.y, y=self.f)
        self.drop1.forward(self.f)
        self.norm2.forward(x, self.f, x1=self.x1)

    def backward(self, x: Buffer, *, dx: Buffer, dx_sum: Buffer | None) -> None:
        """dx_sum: the bias gradient of the last projection of the previous block."""
        recompute, separate = self.recompute, self.bias_grad_separate
        if "block" in recompute:
            self.norm1.forward(x)
            self.forward_attention(x)
            self.ffn.recompute(self.norm2.y)
            recompute = frozenset()
        norm, activation = "norm" in recompute, "activation" in recompute
        down_separate = separate or self.scalars is not None
        self.ffn.backward(self.drop2.backward(dx), dx=self.dnorm, bias_grad=down_separate, recompute=activation)
        proj_sum = None if separate else self.attention.proj.bias_grad
        n = self.norm2.backward(self.dnorm, self.x1, dx=dx, dx_sum=proj_sum, recompute=norm and self.ffn.reads_x)
        self.ffn.backward_weight(n)
        self.attention.backward(self.drop1.backward(dx), dx=self.dnorm, bias_grad=separate)
        n = self.norm1.backward(self.dnorm, x, dx=dx, dx_sum=dx_sum, recompute=norm and self.attention.reads_x)
        self.attention.backward_weight(n)

    @property
    def last_bias_grad(self) -> Buffer | None:
        """The bias gradient that the next norm's backward computes as Σ dx, or None."""
        return None if self.bias_grad_separate or self.scalars is not None else self.ffn.down.bias_grad

    @property
    def bias_grad_separate(self) -> bool:
        """Whether dropout comes after the projections, so that their bias gradients are not Σ dx."""
        return self.drop1.seed is not None
