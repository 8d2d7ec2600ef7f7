"""A pre-norm block of the residual stream.

    x1 = x + drop(attention(norm1(x)))        y = x1 + drop(ffn(norm2(x1)))              x, x1, y (N, C)

The backward turns dx in place from the gradient of y into that of x: each branch's norm adds to it. What is recomputed is
a choice per block, `recompute`, a part of {"norm", "activation", "block"}: the same op runs again just before its result
is read, so the trace sees a new value there and the old one dies early; the bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..kernels.dropout import dropout_bwd, dropout_fwd, dropout_workspace
from ..kernels.residual import add_fwd
from ..kernels.scratch import Scratch
from .attention import AttentionLayer
from .feedforward import FeedForward, SwiGLU
from .layer import Buffer, Declare
from .norm import NormLayer

Recomputed = Literal["norm", "activation", "block"]


@dataclass(frozen=True, slots=True)
class Dropout:
    """x = drop(x), in place; p = 0 does nothing. `counter` tells the masks of one step apart."""

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
        """dx; dy itself where nothing is dropped."""
        if self.seed is None or self.dx is None:
            return dy
        dropout_bwd(dy, self.seed, self.p, self.counter, dx=self.dx, scratch=self.scratch)
        return self.dx


@dataclass(frozen=True, slots=True)
class Block:
    norm1: NormLayer
    attention: AttentionLayer
    drop1: Dropout
    norm2: NormLayer
    ffn: FeedForward | SwiGLU
    drop2: Dropout
    x1: Buffer
    branch: Buffer  # the output of either branch, before it joins the stream
    dnorm: Buffer
    recompute: frozenset[Recomputed]

    @classmethod
    def declare(cls, at: Declare, i: int, seed: Buffer | None, recompute: frozenset[Recomputed]) -> Block:
        if not recompute <= {*get_args(Recomputed)}:
            accepted = ", ".join(map(repr, get_args(Recomputed)))
            raise ValueError(f"recompute: got {', '.join(map(repr, sorted(recompute)))}; accepted: some of {accepted}")
        name, c = f"blocks.{i}", at.config.n_embd
        return cls(
            norm1=NormLayer.declare(at, f"{name}.ln1"),
            attention=AttentionLayer.declare(at, f"{name}.attn", i, seed),
            drop1=Dropout.declare(at, seed, 2 * i + 1, dx="scratch.dbranch"),
            norm2=NormLayer.declare(at, f"{name}.ln2"),
            ffn=(SwiGLU if at.config.activation == "swiglu" else FeedForward).declare(at, f"{name}.ffn"),
            drop2=Dropout.declare(at, seed, 2 * i + 2, dx="scratch.dbranch"),
            x1=at.rows(f"{name}.x1", c),
            branch=at.rows("scratch.branch", c),
            dnorm=at.rows("scratch.dnorm", c),
            recompute=recompute,
        )

    def forward(self, x: Buffer, *, y: Buffer) -> None:
        self.attention.forward(self.norm1.forward(x), y=self.branch)
        self.drop1.forward(self.branch)
        add_fwd(x, self.branch, y=self.x1)
        self.ffn.forward(self.norm2.forward(self.x1), y=self.branch)
        self.drop2.forward(self.branch)
        add_fwd(self.x1, self.branch, y=y)

    def backward(self, x: Buffer, *, dx: Buffer) -> None:
        self.recompute_ffn(x)
        self.ffn.backward(self.drop2.backward(dx), self.norm2.y, dx=self.dnorm)
        self.norm2.backward(self.dnorm, self.x1, dx=dx)
        self.recompute_attention(x)
        self.attention.backward(self.drop1.backward(dx), self.norm1.y, dx=self.dnorm)
        self.norm1.backward(self.dnorm, x, dx=dx)

    def recompute_ffn(self, x: Buffer) -> None:
        """What the backward of the feed-forward reads and was not kept; of a whole block, what all of it reads."""
        if "block" in self.recompute:
            self.attention.forward(self.norm1.forward(x), y=self.branch)
            self.drop1.forward(self.branch)
            add_fwd(x, self.branch, y=self.x1)
            self.ffn.recompute(self.norm2.forward(self.x1))
            return
        if "activation" in self.recompute:
            self.ffn.activate()
        if "norm" in self.recompute:
            self.norm2.forward(self.x1)

    def recompute_attention(self, x: Buffer) -> None:
        """What the backward of attention reads and was not kept."""
        if "norm" in self.recompute and "block" not in self.recompute:
            self.norm1.forward(x)
