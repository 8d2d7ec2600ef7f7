"""A pre-norm block of the residual stream.

    x1 = x + drop(attention(norm1(x)))        y = x1 + drop(ffn(norm2(x1)))              x, x1, y (N, C)

The backward turns dx in place from the gradient of y into that of x: each branch's norm adds to it. What is recomputed is
a choice per block, `recompute`, a part of {"norm", "activation", "block"}: the same op runs again just before its result
is read, so the trace sees a new value there and the old one dies early; the bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..kernels.residual import add_fwd, dropout_bwd, dropout_fwd, dropout_workspace
from .attention import AttentionLayer
from .feedforward import FeedForward
from .layer import Declare, Scratch
from .norm import NormLayer


@dataclass(frozen=True, slots=True)
class Dropout:
    """In place on a branch's output; `counter` tells the masks of one step apart."""

    p: float
    seed: Any
    counter: int
    scratch: Scratch

    @classmethod
    def declare(cls, at: Declare, seed: Any, counter: int) -> Dropout | None:
        if not at.config.dropout:
            return None
        shapes = dropout_workspace(at.rows("scratch.dropout.x", at.config.n_embd))
        return cls(at.config.dropout, seed, counter, at.scratch("dropout", shapes))

    def forward(self, x: Any) -> None:
        dropout_fwd(x, self.seed, self.p, self.counter, y=x, scratch=self.scratch)

    def backward(self, dy: Any, *, dx: Any) -> None:
        dropout_bwd(dy, self.seed, self.p, self.counter, dx=dx, scratch=self.scratch)


@dataclass(frozen=True, slots=True)
class Block:
    norm1: NormLayer
    attention: AttentionLayer
    drop1: Dropout | None
    norm2: NormLayer
    ffn: FeedForward
    drop2: Dropout | None
    x1: Any
    branch: Any  # the output of either branch, before it joins the stream
    dbranch: Any
    dnorm: Any
    recompute: frozenset[str]

    @classmethod
    def declare(cls, at: Declare, i: int, seed: Any, recompute: frozenset[str]) -> Block:
        name, c = f"blocks.{i}", at.config.n_embd
        return cls(
            norm1=NormLayer.declare(at, f"{name}.ln1"),
            attention=AttentionLayer.declare(at, f"{name}.attn", seed),
            drop1=Dropout.declare(at, seed, 2 * i + 1),
            norm2=NormLayer.declare(at, f"{name}.ln2"),
            ffn=FeedForward.declare(at, f"{name}.ffn"),
            drop2=Dropout.declare(at, seed, 2 * i + 2),
            x1=at.rows(f"{name}.x1", c),
            branch=at.rows("scratch.branch", c),
            dbranch=at.rows("scratch.dbranch", c) if at.config.dropout else None,
            dnorm=at.rows("scratch.dnorm", c),
            recompute=recompute,
        )

    def forward(self, x: Any, *, y: Any) -> None:
        self.inner(x)
        self.ffn.down.forward(self.ffn.a, y=self.branch)
        if self.drop2:
            self.drop2.forward(self.branch)
        add_fwd(self.x1, self.branch, y=y)

    def inner(self, x: Any) -> None:
        """Everything that the backward reads."""
        self.attention.attend(self.norm1.forward(x))
        self.attention.proj.forward(self.attention.o, y=self.branch)
        if self.drop1:
            self.drop1.forward(self.branch)
        add_fwd(x, self.branch, y=self.x1)
        self.ffn.hidden(self.norm2.forward(self.x1))

    def backward(self, x: Any, *, dx: Any) -> None:
        whole = "block" in self.recompute
        if whole:
            self.inner(x)
        elif "activation" in self.recompute:
            self.ffn.activate()
        if "norm" in self.recompute and not whole:
            self.norm2.forward(self.x1)
        self.ffn.backward(self._through(self.drop2, dx), self.norm2.y, dx=self.dnorm)
        self.norm2.backward(self.dnorm, self.x1, dx=dx)

        if "norm" in self.recompute and not whole:
            self.norm1.forward(x)
        self.attention.backward(self._through(self.drop1, dx), self.norm1.y, dx=self.dnorm)
        self.norm1.backward(self.dnorm, x, dx=dx)

    def _through(self, drop: Dropout | None, dx: Any) -> Any:
        """The gradient of a branch's output."""
        if drop is None:
            return dx
        drop.backward(dx, dx=self.dbranch)
        return self.dbranch
