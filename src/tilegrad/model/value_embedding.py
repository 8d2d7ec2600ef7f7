"""The term that a block adds to its values, with the key value_embeddings.

    v = x W_v' + b + s · table[tokens]        table (V, Hkv·D)   s (1,)

Each block in `ModelConfig.value_blocks` has a table and a scalar s of its own. The table starts at 0 and s at 1, so that a new
model computes the same as without them. The gathered rows are not saved: the backward gathers them again.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.scratch import Scratch
from ..kernels.value_embedding import value_embedding_bwd, value_embedding_fwd, value_embedding_workspace
from .layer import Buffer, Constant, Declare, Param


@dataclass(frozen=True, slots=True)
class ValueEmbedding:
    table: Param
    scalar: Param
    tokens: Buffer
    forward_scratch: Scratch
    backward_scratch: Scratch

    @classmethod
    def declare(cls, at: Declare, block: int) -> ValueEmbedding | None:
        c = at.config
        if block not in c.value_blocks:
            return None
        name, width = f"blocks.{block}.attn.value_embedding", c.kv_heads * c.head_dim
        table = at.param(f"{name}.weight", c.vocab_size, width, init=Constant(0.0))
        rows = at.form(width)
        return cls(
            table=table,
            scalar=at.param(f"{name}.scalar", 1, init=Constant(1.0)),
            tokens=at.tokens,
            forward_scratch=at.scratch("values", value_embedding_workspace(rows, table.value, backward=False)),
            backward_scratch=at.scratch("values_bwd", value_embedding_workspace(rows, table.value, backward=True)),
        )

    def forward(self, *, rows: Buffer) -> None:
        """Adds to v, the last columns of rows."""
        value_embedding_fwd(self.tokens, self.table.value, self.scalar.value, rows=rows, scratch=self.forward_scratch)

    def backward(self, drows: Buffer) -> None:
        """The gradients of the table and of s; dv does not change."""
        table, scalar = self.table, self.scalar
        if table.grad is not None or scalar.grad is not None:
            reads, dtable, dscalar = (drows, self.tokens, table.value, scalar.value), table.grad, scalar.grad
            accumulate, scratch = scalar.accumulate, self.backward_scratch
            value_embedding_bwd(*reads, dtable=dtable, dscalar=dscalar, accumulate=accumulate, scratch=scratch)
            table.keep()
